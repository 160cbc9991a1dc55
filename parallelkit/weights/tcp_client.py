"""The subscriber's end of the `tcp` transport: pulls spans of one publisher rank's arena.

A pull is cut into requests of at most `REPLY_BYTES`, which are spread over the connections, several
on their way at a time, and each reply is copied to its place as it arrives.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import zmq

from parallelkit.errors import (
    EpochError,
    ProtocolError,
    StateError,
    TransportError,
    UpdateTimeoutError,
)
from parallelkit.weights import tcp_wire as w
from parallelkit.weights.endpoint import check_descriptors
from parallelkit.weights.passes import NONCE_BYTES, PASS_BYTES
from parallelkit.weights.pulls import check_pull
from parallelkit.weights.regions import Bytes, Span
from parallelkit.weights.tcp_line import AlteredReplyError, Line, SharedContext, peer_of
from parallelkit.weights.tcp_server import NAME

CONNECTIONS: Final = 2
#: Requests on their way on one connection.
DEPTH: Final = 4

#: How long it may take until a waiting call notices `close`.
_SLICE_SECONDS: Final = 0.2
#: A pull is cut finer than `REPLY_BYTES` if that gives each connection something to do.
_LEAST_REQUEST: Final = 512 << 10

_shared: Final = SharedContext()
os.register_at_fork(after_in_child=_shared.forget)

#: A request's spans, and where their bytes go, in order.
_Part = tuple[list[Span], list[Bytes]]


class TcpSubscriber:
    """One member's end towards one publisher rank. Used by one thread at a time."""

    name = NAME
    memory = None

    def __init__(
        self,
        offer: bytes,
        key: bytes,
        *,
        connections: int = CONNECTIONS,
        timeout: float = 30.0,
    ) -> None:
        """Connect and show the pass.

        Args:
            offer: the publisher rank's.
            key: a pass for this session and that rank; it is used up.
            connections: TCP connections that share the pulls, 1 to 16.
            timeout: seconds for all of it.

        Raises:
            ProtocolError: the offer or the pass is malformed.
            TransportError: `connections` is none of 1 to 16, or the publisher refused the pass
                or the handshake.
            PeerLostError: nothing listens there.
            UpdateTimeoutError: no answer within `timeout`.
        """
        self._offer = w.decode_offer(offer)
        self.peer = peer_of(self._offer)  #: as errors name it
        if len(key) != PASS_BYTES:
            raise ProtocolError(f"a pass of {len(key)} bytes; it has {PASS_BYTES}")
        check_connections(connections)
        check_descriptors()
        self._lock = threading.Lock()
        self._owner = 0
        self._stopping = False
        self._lines: list[Line] = []
        self._poller = zmq.Poller()
        self._context: zmq.Context[Any] | None = _shared.take()
        try:
            self._connect(key, connections, time.monotonic() + timeout)
        except BaseException:
            self.close()
            raise

    def pull(
        self, spans: Sequence[Span], into: Sequence[Bytes], *, epoch: int, deadline: float
    ) -> None:
        """Fill each `into` with the packed bytes of a span of the arena.

        Args:
            spans: what of the arena, in bytes.
            into: for each a contiguous, writable uint8 array of as many bytes.
            epoch: what the publisher's epoch has to be, before and after.
            deadline: on the monotonic clock, in seconds.

        Raises:
            ProtocolError: a span reaches outside of the arena, or an array does not fit; nothing
                was sent. Or the publisher sent something that is no reply.
            EpochError: the epoch is another one: what arrived is void.
            PeerLostError: the publisher is gone.
            UpdateTimeoutError: not all arrived by the deadline.
        """
        check_pull(spans, into, self._offer.nbytes)
        total = sum(array.nbytes for array in into)
        with self._use():
            size = min(max(total // (2 * len(self._lines)), _LEAST_REQUEST), w.REPLY_BYTES)
            parts = _parts(spans, into, size)
            more = True
            while more or any(line.waiting for line in self._lines):
                while more and (line := self._free_line()) is not None:
                    part = next(parts, None)
                    if part is None:
                        more = False
                    else:
                        request = w.Pull(line.next_id(), epoch, part[0])
                        line.send(request)
                        line.waiting[request.id] = part
                if any(line.waiting for line in self._lines):
                    self._take(*self._next(self._lines, deadline), epoch, deadline)
            self._same_epoch(self._look(deadline), epoch)

    def epoch(self, *, deadline: float) -> int:
        """The publisher's epoch now; a round trip.

        Args:
            deadline: on the monotonic clock, in seconds.

        Raises:
            PeerLostError, UpdateTimeoutError: the publisher is gone, or does not answer.
        """
        with self._use():
            return self._look(deadline)

    def close(self) -> None:
        """Close the connections. A call that waits in another thread ends first, with an error."""
        self._stopping = True
        if self._owner == threading.get_ident():
            return  # a signal handler within a call of this thread, which closes when it ends
        with self._lock:
            self._free()

    # --- connecting ----------------------------------------------------------------------------

    def _connect(self, key: bytes, connections: int, deadline: float) -> None:
        encrypted = bool(self._offer.key)
        nonce, secret = key[:NONCE_BYTES], key[NONCE_BYTES:]
        challenge = secrets.token_bytes(w.SESSION_BYTES)
        client = zmq.curve_keypair() if encrypted else None
        session = b""
        for number in range(connections):
            seconds = max(deadline - time.monotonic(), 0.0)
            assert self._context is not None
            line = Line.open(self._context, self._offer, client, seconds)
            self._lines.append(line)
            self._poller.register(line.socket, zmq.POLLIN)
            self._poller.register(line.monitor, zmq.POLLIN)
            if number == 0:
                line.send(w.Hello(w.PROTOCOL, key if encrypted else nonce, challenge), secret)
            else:
                line.key = w.connection_key(secret, challenge, session, number)
                line.send(w.Join(session, number))
            frames = self._next([line], deadline)[1]
            if line.key is None and isinstance(hi := w.decode_reply(frames[0]), w.Hi):
                # The digest of this reply, checked below, shows that the publisher knows the key.
                line.key = w.connection_key(secret, challenge, hi.session, 0)
            reply, _ = line.open_reply(frames)
            if not isinstance(reply, w.Hi) or reply.nbytes != self._offer.nbytes:
                raise ProtocolError(f"{self.peer} greets with {reply!r:.200}")
            session = reply.session

    # --- waiting -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _use(self) -> Iterator[None]:
        """One call at a time; what it leaves unanswered is forgotten."""
        if self._owner == threading.get_ident():
            raise StateError(f"a call to {self.peer} within another one")
        with self._lock:
            if self._stopping:
                raise StateError(f"the connection to {self.peer} is closed")
            self._owner = threading.get_ident()
            try:
                yield
            finally:
                self._owner = 0
                for line in self._lines:
                    line.waiting.clear()
                if self._stopping:  # close() set it meanwhile
                    self._free()  # type: ignore[unreachable]

    def _free(self) -> None:
        lines, self._lines = self._lines, []
        for line in lines:
            line.close()
        context, self._context = self._context, None
        if context is not None:
            _shared.give(context)

    def _next(self, lines: Sequence[Line], deadline: float) -> tuple[Line, list[memoryview]]:
        """Wait for a reply on one of these connections."""
        while True:
            if self._stopping:
                raise StateError(f"close() while a call waited for {self.peer}")
            left = deadline - time.monotonic()
            if left <= 0:
                raise UpdateTimeoutError(
                    f"{self.peer} has not answered everything by the deadline", missing=[self.peer]
                )
            for line in lines:
                frames = line.receive()
                if frames is not None:
                    return line, frames
            if not sum(line.watch() for line in lines):
                self._poller.poll(int(1000 * min(left, _SLICE_SECONDS)) + 1)

    def _free_line(self) -> Line | None:
        """The connection that waits for least, if that is less than `DEPTH`."""
        line = min(self._lines, key=lambda line: len(line.waiting))
        return line if len(line.waiting) < DEPTH else None

    def _take(self, line: Line, frames: list[memoryview], epoch: int, deadline: float) -> None:
        """Put the bytes of one reply where they belong."""
        try:
            reply, payload = line.open_reply(frames)
        except AlteredReplyError:
            if not line.expects(frames[0]):
                return  # of a call that has ended; its bytes may have been written over since
            # The arena may have been written between the digest and the sending.
            self._same_epoch(self._look(deadline), epoch)
            raise
        if isinstance(reply, w.Hi) or reply.id > line.last:
            raise ProtocolError(f"{self.peer} sent {reply!r:.200}, which nobody asked for")
        part: _Part | None = line.waiting.pop(reply.id, None)
        if part is None:
            return  # of a call that has ended
        if isinstance(reply, w.Epoch):
            self._same_epoch(reply.epoch, epoch)
        expected = sum(target.size for target in part[1])
        found = sum(map(len, payload))
        if not isinstance(reply, w.Data) or not reply.nbytes == found == expected:
            raise ProtocolError(
                f"{self.peer} sent {reply!r:.200} and {found} bytes, not {expected}"
            )
        scatter(payload, part[1])

    def _look(self, deadline: float) -> int:
        line = self._lines[0]
        request = w.Look(line.next_id())
        line.send(request)
        line.waiting[request.id] = None
        while True:
            _, frames = self._next([line], deadline)
            try:
                reply, _ = line.open_reply(frames)
            except AlteredReplyError:
                if isinstance(w.decode_reply(frames[0]), w.Data):
                    continue  # bytes of the pull whose epoch is in question
                raise
            if isinstance(reply, w.Epoch) and reply.id == request.id:
                return reply.epoch
            if isinstance(reply, w.Hi) or reply.id >= request.id:
                raise ProtocolError(f"{self.peer} sent {reply!r:.200} instead of its epoch")

    def _same_epoch(self, found: int, expected: int) -> None:
        if found != expected:
            raise EpochError(
                f"{self.peer} is at epoch {found}, not {expected}: what was pulled is void"
            )


def check_connections(value: Any) -> int:
    """Raise `TransportError` unless `value` is a number of connections; returns it."""
    if type(value) is not int or not 1 <= value <= w.MAX_CONNECTIONS:
        raise TransportError(f"connections is {value!r:.80}; allowed are 1 to {w.MAX_CONNECTIONS}")
    return value


def _parts(spans: Sequence[Span], into: Sequence[Bytes], size: int) -> Iterator[_Part]:
    """Cut a pull into requests of at most `size` bytes and `REQUEST_SPANS` spans."""
    asked, targets, room = list[Span](), list[Bytes](), size
    for span, array in zip(spans, into, strict=True):
        flat, start = array if array.ndim == 1 else array.reshape(-1), 0
        for piece in w.cut(span, size) if flat.size > size else [span]:
            nbytes = flat.size if piece is span else piece.nbytes
            if not nbytes:
                continue
            if nbytes > room or len(asked) == w.REQUEST_SPANS:
                yield asked, targets
                asked, targets, room = [], [], size
            asked.append(piece)
            targets.append(flat if piece is span else flat[start : start + nbytes])
            start += nbytes
            room -= nbytes
    if asked:
        yield asked, targets


def scatter(frames: Sequence[memoryview], targets: Sequence[Bytes]) -> None:
    """Copy frames, one after the other, over targets, one after the other; as many bytes."""
    left, start = iter(targets), 0
    target = next(left, None)
    for frame in frames:
        data, taken = np.frombuffer(frame, np.uint8), 0
        while taken < data.size:
            assert target is not None, "as many bytes, says the caller"
            count = min(target.size - start, data.size - taken)
            target[start : start + count] = data[taken : taken + count]
            start, taken = start + count, taken + count
            if start == target.size:
                target, start = next(left, None), 0
