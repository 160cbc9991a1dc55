"""The control plane's end of a rank other than 0: it says what it does and waits for rank 0."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Final, final

import msgspec

from parallelkit.meeting.clock import Deadline
from parallelkit.meeting.frames import BadFrame, Connection, Frame, Interrupted, Kind, PeerGone
from parallelkit.meeting.star import GRACE, Call, Failed, Fold, GivenUp, Star, Verdict

MORE: Final = 64 << 20  # bytes of everybody's words together


@final
class Leaf(Star):
    """The end of a rank other than 0."""

    def __init__(
        self, hub: Connection, rank: int, world_size: int, timeout: float, where: str
    ) -> None:
        super().__init__(rank, world_size, timeout, where)
        self._hub = hub
        self._host = hub.local_host
        self._left = False

    @property
    def host(self) -> str:
        return self._host

    def leave(self, wait: float = 0.0, *, linger: bool = False) -> None:
        if not self._left and not self._hub.torn:
            with contextlib.suppress(PeerGone, TimeoutError):
                self._hub.send(Kind.LEAVE, b"", Deadline(GRACE))
        self._left = True
        if not linger:
            self._hub.close()

    def linger(self, wait: float) -> bool:
        if self._hub.fileno() < 0:
            return False
        with contextlib.suppress(BadFrame):
            try:
                while self._hub.advance() is not None:
                    pass
            except PeerGone:
                self._hub.close()
                return True
        self._hub.leave_open()
        return False

    # --- calls

    def _exchange(self, what: str, words: bytes, deadline: Deadline) -> list[bytes]:
        self._calls += 1
        self._hub.expect(limit=MORE)
        self._send(Kind.CALL, msgspec.msgpack.encode(Call(what, words)), deadline)
        frame = self._receive(Kind.GO, deadline)
        try:
            return msgspec.msgpack.decode(frame.payload, type=list[bytes])
        except msgspec.DecodeError as error:
            raise Failed(Verdict("protocol", [0], text=f"rank 0 said {error}")) from error

    def _broadcast(self, data: memoryview, src: int, deadline: Deadline) -> None:
        for piece in self._pieces(data):
            if src == self.rank:
                self._send(Kind.DATA, piece, deadline)
            else:
                self._take(piece, deadline)

    def _all_gather(self, parts: Sequence[memoryview], deadline: Deadline) -> None:
        for pieces in zip(*map(self._pieces, parts), strict=True):
            self._send(Kind.DATA, pieces[self.rank], deadline)
            for owner, piece in enumerate(pieces):
                if owner != self.rank:
                    self._take(piece, deadline)

    def _reduce(
        self, piece: memoryview, fold: Fold, owners: Sequence[int], deadline: Deadline
    ) -> None:
        self._send(Kind.DATA, piece, deadline)
        if self.rank in owners:
            self._take(piece, deadline)

    # --- messages

    def _take(self, into: memoryview, deadline: Deadline) -> None:
        self._hub.expect(into=into)
        self._receive(Kind.DATA, deadline)

    def _send(self, kind: Kind, payload: memoryview | bytes, deadline: Deadline) -> None:
        try:
            self._hub.send(kind, payload, deadline, listen=True)
        except TimeoutError as error:
            raise Failed(Verdict("timeout", [0], [self.rank], deadline.seconds)) from error
        except Interrupted:
            self._receive(kind, deadline)  # raises: rank 0 speaks first only to say bad news
        except PeerGone as error:
            with contextlib.suppress(TimeoutError):
                self._receive(kind, Deadline(0.0))  # perhaps it said why
            raise Failed(Verdict("gone", [0])) from error

    def _receive(self, kind: Kind, deadline: Deadline) -> Frame:
        try:
            frame = self._hub.receive(deadline)
        except PeerGone as error:
            raise Failed(Verdict("gone", [0])) from error
        except TimeoutError:
            frame = self._give_up(deadline)
        except BadFrame as error:
            raise Failed(Verdict("protocol", [0], text=str(error))) from error
        if frame.kind is kind:
            return frame
        if frame.kind is Kind.LEAVE:
            raise Failed(Verdict("left", [0]))
        if frame.kind is Kind.BAD:
            with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
                raise Failed(msgspec.msgpack.decode(frame.payload, type=Verdict))
        said = f"rank 0 sent {frame.kind.name} where {kind.name} was due"
        raise Failed(Verdict("protocol", [0], text=said))

    def _give_up(self, deadline: Deadline) -> Frame:
        """Tell rank 0 that this rank waits no more; it says who is to blame, if it is there."""
        verdict = Verdict("timeout", [0], [self.rank], deadline.seconds)
        grace = Deadline(GRACE)
        try:
            if not self._hub.torn:
                said = GivenUp(self._calls, deadline.seconds)
                self._hub.send(Kind.GIVE_UP, msgspec.msgpack.encode(said), grace)
            return self._hub.receive(grace)
        except (TimeoutError, PeerGone, BadFrame) as error:
            raise Failed(verdict) from error
