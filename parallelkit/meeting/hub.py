"""Rank 0's end of the control plane: it compares, collects, combines, and tells all."""

from __future__ import annotations

import contextlib
import select
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NoReturn, final

import msgspec

from parallelkit.meeting.clock import Deadline
from parallelkit.meeting.frames import BadFrame, Connection, Frame, Kind, PeerGone
from parallelkit.meeting.star import (
    GRACE,
    Call,
    Failed,
    Fold,
    GivenUp,
    Star,
    Verdict,
    differences,
)

LONGEST: Final = 3600.0  # seconds of one wait: what the kernel counts in holds it


@final
class Hub(Star):
    """Rank 0's end."""

    def __init__(self, peers: dict[int, Connection], timeout: float, where: str, host: str) -> None:
        super().__init__(0, len(peers) + 1, timeout, where)
        self._peers = peers
        self._ranks = {peer.fileno(): rank for rank, peer in peers.items()}
        self._epoll = select.epoll()
        self._host = host
        self._left = False

    @property
    def host(self) -> str:
        return self._host

    def leave(self, wait: float = 0.0, *, linger: bool = False) -> None:
        if not self._left:
            self._left = True
            self._tell(Kind.LEAVE, b"")
            self._await(self._has_left, wait)
        if not linger:
            self._close()

    def linger(self, wait: float) -> bool:
        if not self._epoll.closed:
            self._await(self._has_ended, wait)
        self._close()
        return False

    def _await(self, done: Callable[[Connection], bool], wait: float) -> None:
        """Wait until something holds for every peer, or the time is over."""
        deadline = Deadline(wait)
        waiting = {peer.fileno(): peer for peer in self._peers.values()}
        for descriptor in waiting:
            self._epoll.register(descriptor, select.EPOLLIN)
        while waiting:
            found = self._epoll.poll(min(deadline.left, LONGEST))
            if not found and deadline.left <= 0:
                break
            for descriptor, _ in found:
                if done(waiting[descriptor]):
                    del waiting[descriptor]
                    self._epoll.unregister(descriptor)
        for descriptor in waiting:
            self._epoll.unregister(descriptor)

    def _close(self) -> None:
        if self._epoll.closed:
            return
        for peer in self._peers.values():
            peer.close()
        self._epoll.close()

    @staticmethod
    def _has_left(peer: Connection) -> bool:
        peer.expect()
        try:
            frame = peer.advance()
        except (PeerGone, BadFrame):
            return True
        return frame is not None and frame.kind is Kind.LEAVE

    @staticmethod
    def _has_ended(peer: Connection) -> bool:
        try:
            peer.advance()
        except PeerGone:
            return True
        except BadFrame:
            return False
        return False

    # --- calls

    def _exchange(self, what: str, words: bytes, deadline: Deadline) -> list[bytes]:
        self._calls += 1
        for peer in self._peers.values():
            peer.expect()
        frames = self._collect(Kind.CALL, deadline, alone=True)
        calls = {0: Call(what, words)}
        for rank, frame in frames.items():
            try:
                calls[rank] = msgspec.msgpack.decode(frame.payload, type=Call)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                self._fail(Verdict("protocol", [rank], text=f"rank {rank} said {error}"), error)
        if any(call.what != what for call in calls.values()):
            self._fail(Verdict("mismatch", text=differences(calls)))
        said = [calls[rank].words for rank in range(self.world_size)]
        self._give(msgspec.msgpack.encode(said), self._peers, deadline, kind=Kind.GO)
        return said

    def _broadcast(self, data: memoryview, src: int, deadline: Deadline) -> None:
        others = [rank for rank in self._peers if rank != src]
        for piece in self._pieces(data):
            if src:
                self._peers[src].expect(into=piece)
                self._collect(Kind.DATA, deadline, (src,))
            self._give(piece, others, deadline)

    def _all_gather(self, parts: Sequence[memoryview], deadline: Deadline) -> None:
        for pieces in zip(*map(self._pieces, parts), strict=True):
            for rank, peer in self._peers.items():
                peer.expect(into=pieces[rank])
            self._collect(Kind.DATA, deadline)
            for owner, piece in enumerate(pieces):
                self._give(piece, [rank for rank in self._peers if rank != owner], deadline)

    def _reduce(
        self, piece: memoryview, fold: Fold, owners: Sequence[int], deadline: Deadline
    ) -> None:
        theirs = [memoryview(bytearray(len(piece))) for _ in self._peers]
        for peer, into in zip(self._peers.values(), theirs, strict=True):
            peer.expect(into=into)
        self._collect(Kind.DATA, deadline)
        fold(piece, theirs)
        self._give(piece, [rank for rank in owners if rank], deadline)

    # --- messages

    def _collect(
        self,
        kind: Kind,
        deadline: Deadline,
        ranks: Sequence[int] | None = None,
        *,
        alone: bool = False,
    ) -> dict[int, Frame]:
        """Wait for one message from each of `ranks`.

        Args:
            alone: nobody may say more than that until it is answered, so whoever has spoken is
                watched on, and is noticed when it gives up or dies.
        """
        waiting = set(self._peers if ranks is None else ranks)
        frames: dict[int, Frame] = {}
        watched = dict.fromkeys(waiting)
        for rank in watched:
            self._epoll.register(self._peers[rank], select.EPOLLIN)
        try:
            while waiting:
                found = self._epoll.poll(min(deadline.left, LONGEST))
                if not found and deadline.left <= 0:
                    self._fail(Verdict("timeout", sorted(waiting), [0], deadline.seconds))
                for descriptor, _ in found:
                    rank = self._ranks[descriptor]
                    frame = self._read(rank, kind, waiting, deadline)
                    if frame is None:
                        continue
                    frames[rank] = frame
                    waiting.discard(rank)
                    if not alone:
                        self._epoll.unregister(descriptor)
                        del watched[rank]
            for rank in watched:  # all have spoken; perhaps some gave up before this rank came
                self._read(rank, kind, waiting, deadline)
        finally:
            for rank in watched:
                self._epoll.unregister(self._peers[rank])
        return frames

    def _read(self, rank: int, kind: Kind, waiting: set[int], deadline: Deadline) -> Frame | None:
        try:
            frame = self._peers[rank].advance()
        except PeerGone as error:
            self._fail(Verdict("gone", [rank]), error)
        except BadFrame as error:
            self._fail(Verdict("protocol", [rank], text=f"rank {rank}: {error}"), error)
        if frame is None:
            return None
        if frame.kind is Kind.LEAVE:
            self._fail(Verdict("left", [rank]))
        if frame.kind is Kind.GIVE_UP:
            self._given_up(rank, frame, waiting, deadline)
            return None
        if frame.kind is not kind or rank not in waiting:
            said = f"rank {rank} sent {frame.kind.name} where {kind.name} was due"
            self._fail(Verdict("protocol", [rank], text=said))
        return frame

    def _given_up(self, rank: int, frame: Frame, waiting: set[int], deadline: Deadline) -> None:
        """Somebody's time is over before ours: who kept it waiting?"""
        try:
            said = msgspec.msgpack.decode(frame.payload, type=GivenUp)
        except msgspec.DecodeError as error:
            self._fail(Verdict("protocol", [rank], text=f"rank {rank} said {error}"), error)
        if said.call < self._calls:
            return  # of an earlier call, which it got an answer to after all
        missing = sorted(waiting - {rank})
        if not missing or deadline.elapsed < said.seconds / 2:
            missing = [0, *missing]  # this rank itself came late
        self._fail(Verdict("timeout", missing, [rank], said.seconds))

    def _give(
        self,
        payload: memoryview | bytes,
        ranks: Iterable[int],
        deadline: Deadline,
        *,
        kind: Kind = Kind.DATA,
    ) -> None:
        for rank in ranks:
            try:
                self._peers[rank].send(kind, payload, deadline)
            except PeerGone as error:
                self._fail(Verdict("gone", [rank]), error)
            except TimeoutError as error:
                self._fail(Verdict("timeout", [rank], [0], deadline.seconds), error)

    def _fail(self, verdict: Verdict, cause: Exception | None = None) -> NoReturn:
        """Tell all, and raise."""
        self._tell(Kind.BAD, msgspec.msgpack.encode(verdict))
        raise Failed(verdict) from cause

    def _tell(self, kind: Kind, payload: bytes) -> None:
        limit = Deadline(GRACE)
        for peer in self._peers.values():
            if not peer.torn:
                with contextlib.suppress(PeerGone, TimeoutError):
                    peer.send(kind, payload, limit)
