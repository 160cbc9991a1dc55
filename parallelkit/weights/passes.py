"""Passes: what lets one session open a data connection to one rank of the publisher.

Rank 0 issues them without asking the rank that they are for: all ranks of a publisher share a
secret, and a pass is a nonce with a keyed hash of nonce and rank. So members can join while the
other ranks train. A pass travels over the encrypted control channel only.

A nonce begins with a clock's count. It bounds what has to be remembered: of the passes used, the
latest `REMEMBERED` (or half as many) are kept, and older ones than those are refused.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
import time
from typing import Final

from parallelkit.errors import TransportError

SECRET_BYTES: Final = 32
NONCE_BYTES: Final = 24
KEY_BYTES: Final = 32
PASS_BYTES: Final = NONCE_BYTES + KEY_BYTES
REMEMBERED: Final = 65536

_COUNT_BYTES: Final = 8


def issue(secret: bytes, rank: int) -> bytes:
    """Make a pass for one session and one rank of the publisher, `PASS_BYTES` long.

    Args:
        secret: `SECRET_BYTES` that all ranks of the publisher share.
        rank: the publisher's rank that it is for.

    Raises:
        TransportError: the secret has another length, or the rank is negative.
    """
    count = time.time_ns().to_bytes(_COUNT_BYTES, "big")
    nonce = count + secrets.token_bytes(NONCE_BYTES - _COUNT_BYTES)
    return nonce + key_of(secret, rank, nonce)


def key_of(secret: bytes, rank: int, nonce: bytes) -> bytes:
    """The half of a pass that only who knows `secret` can make, from the other half."""
    if len(secret) != SECRET_BYTES or not 0 <= rank < 1 << 32:
        raise TransportError(
            f"a pass needs a secret of {SECRET_BYTES} bytes and a rank from 0; these are "
            f"{len(secret)} bytes and rank {rank}"
        )
    text = rank.to_bytes(4, "big") + nonce
    return hashlib.blake2b(text, key=secret, digest_size=KEY_BYTES, person=b"pk-pass").digest()


class Passes:
    """The passes of one rank, and which were used. Safe to call from several threads."""

    def __init__(self, secret: bytes, rank: int, uses: int = 1) -> None:
        """Begin with none used.

        Args:
            secret: what all ranks of the publisher share.
            rank: this rank.
            uses: how often each pass works.
        """
        self._secret = secret
        self._rank = rank
        self._uses = uses
        self._used: dict[bytes, int] = {}
        self._floor = b""
        self._lock = threading.Lock()
        key_of(secret, rank, b"")  # refuses a secret of another length now

    def key(self, nonce: bytes) -> bytes:
        """The secret half of the pass with this nonce, whether it was issued or not."""
        return key_of(self._secret, self._rank, nonce)

    def redeem(self, pass_: bytes) -> bool:
        """Use a pass: whether it is one of this rank's and had a use left."""
        nonce, key = pass_[:NONCE_BYTES], pass_[NONCE_BYTES:]
        if not hmac.compare_digest(self.key(nonce), key) or len(pass_) != PASS_BYTES:
            return False
        with self._lock:
            used = self._used.get(nonce, 0)
            if used >= self._uses or (not used and nonce <= self._floor):
                return False
            self._used[nonce] = used + 1
            if len(self._used) > REMEMBERED:
                oldest = sorted(self._used)[: REMEMBERED // 2]
                self._floor = oldest[-1]
                for old in oldest:
                    del self._used[old]
        return True
