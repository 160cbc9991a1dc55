"""The `shm` transport: one sealed segment, its descriptor passed over a Unix socket.

The socket is abstract (no file, so no orphan), its name is random and travels over the encrypted
control channel, as does a pass for each connection; the peer must run as the same user. A
descriptor is handed out once for each pass.
"""

from __future__ import annotations

import array
import contextlib
import os
import secrets
import socket
import stat
import struct
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from parallelkit.errors import EpochError, ProtocolError, TransportError
from parallelkit.specs import TransportCandidate, TransportRequest
from parallelkit.weights.buckets import as_bytes
from parallelkit.weights.endpoint import check_descriptors
from parallelkit.weights.passes import PASS_BYTES, Passes
from parallelkit.weights.pulls import check_pull
from parallelkit.weights.regions import Bytes, Span, view
from parallelkit.weights.segments import SHM_DIR, Segment, sweep_orphans

NAME = "shm"
SECONDS_PER_GB = 0.12
_SOCKET_SECONDS = 10.0
_RETRY_SECONDS = 0.05


class _Offer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the segment is: behind a socket, for a pass, or at a path."""

    nbytes: int
    socket: str = ""
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
    return TransportCandidate(
        name=NAME,
        reach=reach,
        cost=SECONDS_PER_GB,
        reason=reason,
        publish_options=("named",),
        subscribe_options=(),
    )


class ShmPublisher:
    """The end of one publisher rank. A daemon thread hands descriptors to peers with a pass."""

    name = NAME

    def __init__(self, nbytes: int, *, secret: bytes, rank: int = 0, named: bool = False) -> None:
        """Allocate the segment, after removing what dead processes of this user left.

        Args:
            nbytes: size of the arena.
            secret: what passes are made from; shared by the publisher's ranks.
            rank: whose passes work here.
            named: use a named segment even though descriptors can be passed.

        Raises:
            TransportError: there is not enough memory.
        """
        self._passes = Passes(secret, rank)
        check_descriptors()
        sweep_orphans()
        self._segment = Segment.create(nbytes, named=named)
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
        """Where the segment is; always the same."""
        if self._segment.path is not None:
            offer = _Offer(self._segment.nbytes, path=str(self._segment.path))
        else:
            offer = _Offer(self._segment.nbytes, socket=self._address[1:])
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
                # A byte more than a pass has, so that a longer message is none.
                if uid == os.geteuid() and self._passes.redeem(peer.recv(PASS_BYTES + 1)):
                    socket.send_fds(peer, [b"1"], [self._segment.fd])


class ShmSubscriber:
    """A member's end: the segment of one publisher rank, mapped for reading."""

    name = NAME

    def __init__(self, offer: bytes, key: bytes) -> None:
        """Fetch the descriptor and map it.

        Args:
            offer: what the rank's `offer` gave; key: a pass for it.

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
        fd = _open_named(facts.path) if facts.path else _fetch(facts, key)
        self._segment = Segment.attach(fd, facts.nbytes, sealed=not facts.path)

    @property
    def memory(self) -> memoryview:
        return self._segment.arena

    def pull(
        self, spans: Sequence[Span], into: Sequence[Bytes], *, epoch: int, deadline: float
    ) -> None:
        arena = as_bytes(self._segment.arena)
        check_pull(spans, into, len(arena))
        self._check_epoch(epoch)
        for span, target in zip(spans, into, strict=True):
            source = view(arena, span)
            np.copyto(target.reshape(source.shape), source)
        self._check_epoch(epoch)

    def epoch(self, *, deadline: float) -> int:
        return self._segment.epoch

    def _check_epoch(self, epoch: int) -> None:
        if self._segment.epoch != epoch:
            raise EpochError(
                f"the publisher is at epoch {self._segment.epoch}, and these bytes were of epoch "
                f"{epoch}: it went on"
            )

    def close(self) -> None:
        self._segment.close()


def _fetch(offer: _Offer, key: bytes) -> int:
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
            peer.settimeout(_SOCKET_SECONDS)
            _connect(peer, "\0" + offer.socket)
            peer.send(key)
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


def _connect(peer: socket.socket, address: str) -> None:
    """Connect; while too many others wait in line, the kernel does not let us wait, too."""
    deadline = time.monotonic() + _SOCKET_SECONDS
    while True:
        try:
            return peer.connect(address)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_RETRY_SECONDS)


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
