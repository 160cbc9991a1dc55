"""The publisher's decisions about requests on data connections; no sockets, one thread.

Before a connection has shown a pass, or the session that one opened, nothing else is answered and
nothing but small messages is parsed. A refusal says why; the connection can try again.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any, Final

import attrs
import numpy as np

from parallelkit.errors import ProtocolError, TransportError
from parallelkit.weights import tcp_wire as w
from parallelkit.weights.messages import clip
from parallelkit.weights.passes import NONCE_BYTES, PASS_BYTES, Passes
from parallelkit.weights.regions import Span, view

#: A span of at least so many bytes in one run is sent from the arena itself, without a copy.
DIRECT_BYTES: Final = 64 << 10

Frames = list[Any]


@attrs.define(eq=False)
class _Session:
    """What one pass opened.

    Attributes:
        id: random, known to both ends.
        secret: the secret half of the pass; challenge: the subscriber's random bytes.
        used: numbers that connections had; routes: of the connections that are open.
    """

    id: bytes
    secret: bytes = attrs.field(repr=False)
    challenge: bytes
    used: set[int] = attrs.field(factory=set)
    routes: set[bytes] = attrs.field(factory=set)


@attrs.define(eq=False)
class _Line:
    """One connection of a session; `last` is the highest id of a request on it."""

    session: _Session
    key: bytes = attrs.field(repr=False)
    last: int = 0


class Gate:
    """Answers the requests of all connections of one publisher rank."""

    def __init__(
        self, arena: memoryview, passes: Passes, epoch: Callable[[], int], *, encrypted: bool
    ) -> None:
        """Begin without any session.

        Args:
            arena: the bytes to read from.
            passes: decides who may.
            epoch: tells the arena's epoch now.
            encrypted: connections are, so messages carry no digests.
        """
        self._arena = arena
        self._passes = passes
        self._epoch = epoch
        self._encrypted = encrypted
        self._lines: dict[bytes, _Line] = {}
        self._sessions: dict[bytes, _Session] = {}

    def forget(self) -> None:
        """Answer nobody any more, and let go of the arena."""
        self._lines.clear()
        self._sessions.clear()
        self._arena = memoryview(b"")

    def known(self, route: bytes) -> bool:
        """Whether the connection has shown a pass or a session."""
        return route in self._lines

    def lost(self, route: bytes) -> None:
        """A connection ended. A session ends with its last one."""
        line = self._lines.pop(route, None)
        if line is not None:
            line.session.routes.discard(route)
            if not line.session.routes:
                self._sessions.pop(line.session.id, None)

    def answer(self, route: bytes, frames: Sequence[memoryview]) -> Frames:
        """The frames of the reply; whatever the request is, this does not raise.

        Args:
            route: names the connection.
            frames: the request and, without encryption, its digest.
        """
        number = 0
        try:
            request = self._open(route, frames)
            number = request.id if isinstance(request, w.Pull | w.Look) else 0
            return self._sealed(route, *self._reply(route, request))
        except (ProtocolError, TransportError) as error:
            reason = str(error)
        except MemoryError:
            reason = "the publisher has no memory for this reply"
        return self._sealed(route, w.No(number, clip(reason)), [])

    def _open(self, route: bytes, frames: Sequence[memoryview]) -> w.Request:
        """Parse a request of a connection that may make one, with a digest that is right."""
        expected = 1 if self._encrypted else 2
        if len(frames) != expected:
            raise ProtocolError(f"a request of {len(frames)} frames instead of {expected}")
        line = self._lines.get(route)
        if line is None and sum(map(len, frames)) > w.MAX_HELLO:
            raise ProtocolError(f"a first message of {len(frames[0])} bytes, of {w.MAX_HELLO}")
        request = w.decode_request(frames[0])
        first = isinstance(request, w.Hello | w.Join)
        if first == (line is not None):
            raise ProtocolError(
                "a connection that has shown its pass shows one again"
                if first
                else "a connection asks for something and has shown no pass"
            )
        if not self._encrypted:
            key = line.key if line is not None else self._key(request)
            if not w.same_tag(frames[1], w.tag(key, "subscriber", frames[0])):
                raise ProtocolError("the digest of a request is wrong: another key, or altered")
        return request

    def _key(self, request: w.Request) -> bytes:
        """The key of the digest of a first message."""
        if isinstance(request, w.Hello):
            return self._passes.key(request.key[:NONCE_BYTES])
        assert isinstance(request, w.Join)
        session = self._session(request)
        return w.connection_key(session.secret, session.challenge, session.id, request.number)

    def _reply(self, route: bytes, request: w.Request) -> tuple[w.Reply, Frames]:
        if isinstance(request, w.Hello):
            return self._hello(route, request), []
        if isinstance(request, w.Join):
            return self._join(route, request), []
        line = self._lines[route]
        if request.id <= line.last:
            raise ProtocolError(f"request {request.id} after request {line.last}")
        line.last = request.id
        epoch = self._epoch()
        if isinstance(request, w.Look) or request.epoch != epoch:
            return w.Epoch(request.id, epoch), []
        return self._pull(request)

    def _hello(self, route: bytes, hello: w.Hello) -> w.Hi:
        if hello.protocol != w.PROTOCOL:
            raise ProtocolError(
                f"protocol {hello.protocol} of the tcp transport; this publisher speaks "
                f"{w.PROTOCOL}: install the same parallelkit on both sides"
            )
        pass_ = hello.key
        if not self._encrypted and len(pass_) == NONCE_BYTES:
            pass_ += self._passes.key(pass_)  # that the peer has it too, its digest has shown
        if len(pass_) != PASS_BYTES or not self._passes.redeem(pass_):
            raise TransportError(
                "the pass is refused: of another publisher or rank, altered, or used before"
            )
        session = _Session(
            secrets.token_bytes(w.SESSION_BYTES), pass_[NONCE_BYTES:], hello.challenge
        )
        self._sessions[session.id] = session
        return self._admit(route, session, 0)

    def _join(self, route: bytes, join: w.Join) -> w.Hi:
        return self._admit(route, self._session(join), join.number)

    def _session(self, join: w.Join) -> _Session:
        session = self._sessions.get(join.session)
        if session is None:
            raise TransportError("a connection names a session that is not open")
        if join.number in session.used or not 0 < join.number < w.MAX_CONNECTIONS:
            raise TransportError(
                f"connection {join.number} of a session: each number from 1 to "
                f"{w.MAX_CONNECTIONS - 1} may be used once"
            )
        return session

    def _admit(self, route: bytes, session: _Session, number: int) -> w.Hi:
        key = w.connection_key(session.secret, session.challenge, session.id, number)
        session.used.add(number)
        session.routes.add(route)
        self._lines[route] = _Line(session, key)
        return w.Hi(session.id, self._arena.nbytes)

    def _pull(self, request: w.Pull) -> tuple[w.Reply, Frames]:
        frames = pack(self._arena, request.spans)
        return w.Data(request.id, sum(map(len, frames))), frames

    def _sealed(self, route: bytes, reply: w.Reply, payload: Frames) -> Frames:
        """A reply's frames, with a digest where the connection is known and not encrypted."""
        frames = [w.encode(reply), *payload]
        line = self._lines.get(route)
        if line is not None and not self._encrypted:
            frames.append(w.tag(line.key, "publisher", frames[0], payload))
        return frames


def pack(arena: memoryview, spans: Sequence[Span]) -> Frames:
    """The bytes of spans as frames: long runs from the arena itself, the rest copied together.

    Raises:
        ProtocolError: a span reaches outside of the arena, or they are more than `REPLY_BYTES`;
            found before any memory is taken.
    """
    nbytes = 0
    for span in spans:
        span.check(arena.nbytes)
        nbytes += span.nbytes
    if nbytes > w.REPLY_BYTES:
        raise ProtocolError(f"a request for {nbytes} bytes; {w.REPLY_BYTES} are allowed")
    frames, small = Frames(), list[Span]()
    for span in spans:
        if span.run >= DIRECT_BYTES and not span.steps:
            if small:
                frames.append(_together(arena, small))
                small = []
            frames.append(arena[span.offset : span.offset + span.run])
        else:
            small.append(span)
    if small:
        frames.append(_together(arena, small))
    return frames


def _together(arena: memoryview, spans: Sequence[Span]) -> memoryview:
    memory = np.frombuffer(arena, np.uint8)
    packed = np.empty(sum(span.nbytes for span in spans), np.uint8)
    start = 0
    for span in spans:
        if not span.steps:  # the same as below, in a fifth of the time
            end = start + span.run
            packed[start:end] = memory[span.offset : span.offset + span.run]
        else:
            source = view(memory, span)
            end = start + source.size
            packed[start:end].reshape(source.shape)[...] = source
        start = end
    return packed.data
