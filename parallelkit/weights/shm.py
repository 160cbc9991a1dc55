"""The `shm` transport: one sealed segment, its descriptor passed over a Unix socket.

The socket is abstract (no file, so no orphan), its name and a key for each connection are random
and travel over the encrypted control channel; the peer must run as the same user. A descriptor is
handed out once for each key.
"""

from __future__ import annotations

import array
import contextlib
import hmac
import os
import secrets
import socket
import stat
import struct
import threading
import time
from pathlib import Path

import msgspec

from parallelkit.errors import ProtocolError, TransportError
from parallelkit.specs import TransportCandidate, TransportRequest
from parallelkit.weights.segments import SHM_DIR, Segment, sweep_orphans

NAME = "shm"
SECONDS_PER_GB = 0.12
_KEY_BYTES = 32
_SOCKET_SECONDS = 10.0
_RETRY_SECONDS = 0.05


class _Offer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the subscriber needs: a socket and a key, or a path."""

    nbytes: int
    socket: str = ""
    key: bytes = b""
    path: str = ""


def candidate(request: TransportRequest) -> TransportCandidate:
    """Tell whether two ends share this host's memory."""
    a, b = request.publisher, request.subscriber
    reach, reason = True, "same host and user: one copy through shared memory"
    if request.device != "cpu":
        reason = f"weights on {request.device} are staged through host memory"
    if b is not None and a.boot_id != b.boot_id:
        reach, reason = False, "the two ends are on different hosts"
    elif b is not None and a.uid != b.uid:
        reach, reason = False, f"the two ends run as different users ({a.uid} and {b.uid})"
    elif b is not None and a.net_namespace != b.net_namespace:
        reach, reason = False, "the two ends are in different network namespaces"
    return TransportCandidate(name=NAME, reach=reach, cost=SECONDS_PER_GB, reason=reason)


class ShmPublisher:
    """The publisher's end. A daemon thread hands descriptors to peers with a key."""

    name = NAME

    def __init__(self, nbytes: int, *, named: bool = False) -> None:
        """Allocate the segment, after removing what dead processes of this user left.

        Args:
            nbytes: size of the arena.
            named: use a named segment even though descriptors can be passed.
        """
        sweep_orphans()
        self._segment = Segment.create(nbytes, named=named)
        self._keys: set[bytes] = set()
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._closing = False
        if self._segment.path is None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._address = "\0parallelkit-" + secrets.token_hex(16)
            self._socket.bind(self._address)
            self._socket.listen(64)
            self._thread = threading.Thread(
                target=self._serve, args=(self._socket,), name="parallelkit-shm", daemon=True
            )
            self._thread.start()

    @property
    def buffer(self) -> memoryview:
        return self._segment.arena

    @property
    def epoch(self) -> int:
        return self._segment.epoch

    def bump(self) -> int:
        self._segment.epoch += 1
        return self._segment.epoch

    def offer(self) -> bytes:
        """A fresh key for one connection."""
        if self._segment.path is not None:
            offer = _Offer(self._segment.nbytes, path=str(self._segment.path))
        else:
            key = secrets.token_bytes(_KEY_BYTES)
            with self._lock:
                self._keys.add(key)
            offer = _Offer(self._segment.nbytes, socket=self._address[1:], key=key)
        return msgspec.msgpack.encode(offer)

    def close(self) -> None:
        """Stop handing out and drop the segment; connected subscribers keep their mapping."""
        self._closing = True
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._thread.join(_SOCKET_SECONDS)
            self._socket.close()
            self._socket = None
        self._segment.close()

    def _serve(self, listener: socket.socket) -> None:
        while True:
            try:
                peer, _ = listener.accept()
            except OSError:
                if self._closing:
                    return
                time.sleep(_RETRY_SECONDS)  # out of descriptors, as a rule: it passes
                continue
            with peer, contextlib.suppress(OSError):
                peer.settimeout(1.0)  # one slow peer must not keep the others waiting
                credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
                uid = struct.unpack("3i", credentials)[1]
                if uid == os.geteuid() and self._redeem(peer.recv(_KEY_BYTES)):
                    socket.send_fds(peer, [b"1"], [self._segment.fd])

    def _redeem(self, key: bytes) -> bool:
        with self._lock:
            found = [k for k in self._keys if hmac.compare_digest(k, key)]
            self._keys.difference_update(found)
        return bool(found)


class ShmSubscriber:
    """The subscriber's end: the publisher's segment, mapped for reading."""

    name = NAME

    def __init__(self, offer: bytes) -> None:
        """Fetch the descriptor and map it.

        Raises:
            ProtocolError: the offer is malformed.
            TransportError: the publisher's socket cannot be reached, or the segment is refused.
        """
        try:
            facts = msgspec.msgpack.decode(offer, type=_Offer)
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"the shm offer is malformed: {error}") from error
        if facts.nbytes <= 0:
            raise ProtocolError(f"the shm offer is for {facts.nbytes} bytes")
        fd = _open_named(facts.path) if facts.path else _fetch(facts)
        self._segment = Segment.attach(fd, facts.nbytes, sealed=not facts.path)

    @property
    def buffer(self) -> memoryview:
        return self._segment.arena

    @property
    def epoch(self) -> int:
        return self._segment.epoch

    def close(self) -> None:
        self._segment.close()


def _fetch(offer: _Offer) -> int:
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
            peer.settimeout(_SOCKET_SECONDS)
            peer.connect("\0" + offer.socket)
            peer.send(offer.key)
            data, ancillary, *_ = peer.recvmsg(1, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC)
    except (OSError, ValueError) as error:
        raise TransportError(f"cannot reach the publisher's shm socket: {error}") from error
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    if not data or len(fds) != 1:
        for fd in fds:
            os.close(fd)
        raise TransportError("the publisher refused to hand over its segment")
    return fds[0]


def _open_named(text: str) -> int:
    path = Path(text)
    if path.parent != SHM_DIR or not path.name.startswith("parallelkit-"):
        raise ProtocolError(f"the shm offer names {text!r}, which is no segment of parallelkit")
    try:
        # O_NONBLOCK: a pipe by that name must not make us wait for its writer.
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        raise TransportError(f"cannot open the publisher's segment: {error}") from error
    if stat.S_IMODE(os.fstat(fd).st_mode) != 0o600:
        os.close(fd)
        raise TransportError(f"the segment {text} is refused: its mode is not 0600")
    return fd
