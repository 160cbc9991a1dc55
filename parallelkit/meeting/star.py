"""The control plane of a group: rank 0 is connected to every other rank, for the group's life.

Every call is collective: all ranks make it, in the same order. Before anything moves, rank 0
compares what the ranks are about to do; a difference is an error on all of them and the group
goes on. Whoever does not come by the deadline, or is gone, is named to all, and the group is
broken from then on. A rank that was stopped and wakes late reads that too: it never gets values
of a call that the others gave up.

Bytes of tensors go the same way, through rank 0, in pieces.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import msgspec

from parallelkit.errors import CollectiveError, CollectiveTimeoutError
from parallelkit.meeting.clock import Deadline, listed

_PIECE: Final = 4 << 20  # bytes of a tensor in one message
_HELD: Final = 256 << 20  # bytes of pieces that rank 0 holds at most
_TEXT: Final = 1000  # characters of a call's description
#: Seconds for rank 0 to answer a rank that gave up.
GRACE: Final = 1.0
#: Combines others' pieces into the first, in the order of ranks.
Fold = Callable[[memoryview, Sequence[memoryview]], None]


class Call(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a rank is about to do, and a few bytes for everybody."""

    what: str
    words: bytes = b""


class Verdict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Why a call failed, told by rank 0 to all.

    Attributes:
        kind: `mismatch`, `timeout`, `gone`, `left` or `protocol`.
        ranks: whose fault it is.
        waited: who had given up.
        seconds: the limit that passed.
        text: what else there is to say.
    """

    kind: str
    ranks: list[int] = []
    waited: list[int] = []
    seconds: float = 0.0
    text: str = ""


class GivenUp(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rank waited `seconds` in its call number `call`, and waits no more."""

    call: int
    seconds: float


class Star:
    """One rank's end of the control plane; a world of one needs no connection.

    Attributes:
        rank, world_size: place in the group.
        where: `host:port` of rank 0, for messages.
        timeout: seconds of a call that says nothing else.
        broken: the error that broke the group, or None.
    """

    def __init__(
        self, rank: int, world_size: int, timeout: float, where: str = "this process"
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.timeout = timeout
        self.where = where
        self.broken: str | None = None
        self._calls = 0

    @property
    def host(self) -> str:
        """This rank's address, as far as the others reach it by it."""
        return "127.0.0.1"

    # --- what ranks say to each other

    def agree(self, what: str, timeout: float | None = None) -> None:
        """Meet every rank, and raise on all of them unless all make the same call.

        Raises:
            CollectiveError: calls differ, a rank is gone or has closed the group, or the group
                was broken before.
            CollectiveTimeoutError: `missing` names those who did not come.
        """
        self.exchange(what, b"", timeout)

    def exchange(self, what: str, words: bytes = b"", timeout: float | None = None) -> list[bytes]:
        """As `agree`, and give every rank every rank's few bytes, by rank."""
        deadline = Deadline(timeout or self.timeout)
        with self._running(what):
            return self._exchange(short(what), words, deadline)

    def send_bytes(
        self, what: str, data: bytes, src: int, limit: int, timeout: float | None = None
    ) -> bytes:
        """Give every rank the bytes of `src`, whose number only it knows, up to `limit`."""
        deadline = Deadline(timeout or self.timeout)
        with self._running(what):
            mine = len(data).to_bytes(8, "little") if self.rank == src else b""
            said = self._exchange(short(what), mine, deadline)[src]
            size = int.from_bytes(said, "little")
            if len(said) != 8 or size > limit:
                raise CollectiveError(f"{what} failed: rank {src} announced {size} bytes")
            body = bytearray(data) if self.rank == src else bytearray(size)
            self._broadcast(memoryview(body), src, deadline)
            return bytes(body)

    # --- tensors as bytes; `what` tells all that decides sizes

    def broadcast(self, what: str, data: memoryview, src: int) -> None:
        """Fill `data` on every rank with that of `src`."""
        with self._call(what) as deadline:
            self._broadcast(data, src, deadline)

    def all_gather(self, what: str, parts: Sequence[memoryview]) -> None:
        """Fill each rank's part on every rank; this rank's own is filled already."""
        with self._call(what) as deadline:
            self._all_gather(parts, deadline)

    def all_reduce(self, what: str, data: memoryview, fold: Fold) -> None:
        """Combine `data` of all ranks, in place. Its size and 16 must divide or be divided."""
        with self._call(what) as deadline:
            for piece in self._pieces(data):
                self._reduce(piece, fold, range(self.world_size), deadline)

    def reduce_scatter(self, what: str, parts: Sequence[memoryview], fold: Fold) -> None:
        """Combine the ranks' parts; each gets its own, in place, the others are left undefined."""
        with self._call(what) as deadline:
            for owner, part in enumerate(parts):
                for piece in self._pieces(part):
                    self._reduce(piece, fold, (owner,), deadline)

    def leave(self, wait: float = 0.0, *, linger: bool = False) -> None:
        """Leave the group. Rank 0 waits up to `wait` seconds for the others to leave.

        Args:
            linger: keep the connections open, for `linger`.
        """

    def linger(self, wait: float) -> bool:
        """After `leave(linger=True)`, at the end of the process: learn whose process ended.

        Rank 0 waits up to `wait` seconds for the processes of all others to end. The others do
        not wait.

        Returns:
            Whether rank 0's process has ended before this one.
        """
        return False

    # --- inner parts: nothing to do in a world of one

    def _exchange(self, what: str, words: bytes, deadline: Deadline) -> list[bytes]:
        return [words]

    def _broadcast(self, data: memoryview, src: int, deadline: Deadline) -> None: ...

    def _all_gather(self, parts: Sequence[memoryview], deadline: Deadline) -> None: ...

    def _reduce(
        self, piece: memoryview, fold: Fold, owners: Sequence[int], deadline: Deadline
    ) -> None:
        fold(piece, ())

    def _pieces(self, data: memoryview) -> Iterator[memoryview]:
        size = max(4096, min(_PIECE, _HELD // self.world_size)) // 4096 * 4096
        for at in range(0, len(data), size):
            yield data[at : at + size]

    @contextmanager
    def _call(self, what: str) -> Iterator[Deadline]:
        deadline = Deadline(self.timeout)
        with self._running(what):
            self._exchange(short(what), b"", deadline)
            yield deadline

    @contextmanager
    def _running(self, what: str) -> Iterator[None]:
        """Turn whatever ends the call into an error of ours; all but a mismatch break the group."""
        if self.broken:
            raise CollectiveError(f"{what} was called on a broken group; earlier: {self.broken}")
        try:
            yield
        except Failed as failed:
            error = self._error(failed.verdict, what)
            if failed.verdict.kind != "mismatch":
                self.broken = str(error)
            raise error from failed.__cause__
        except BaseException as error:
            self.broken = f"{what} was left by {type(error).__name__}"
            raise

    def _error(self, verdict: Verdict, what: str) -> CollectiveError:
        head, ranks = f"rank {self.rank}: {what} failed", listed(verdict.ranks)
        if verdict.kind == "mismatch":
            return CollectiveError(verdict.text)
        if verdict.kind == "gone":
            return CollectiveError(f"{head}: rank(s) {ranks} are gone")
        if verdict.kind == "left":
            return CollectiveError(f"{head}: rank(s) {ranks} have closed the group")
        if verdict.kind == "timeout" and self.rank in verdict.ranks:
            return CollectiveError(
                f"{head}: this rank came too late, rank(s) {listed(verdict.waited)} had given up"
            )
        if verdict.kind == "timeout":
            return CollectiveTimeoutError(
                f"{head}: rank(s) {ranks} did not take part within {verdict.seconds:g} s. Every "
                "rank must make the same calls in the same order",
                missing=verdict.ranks,
            )
        return CollectiveError(f"{head}: {verdict.text}")


class Failed(Exception):
    """A call failed, for the reason given."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.kind)
        self.verdict = verdict


def short(what: str) -> str:
    """A call's description of bounded length; one that is too long ends with a hash of it all."""
    if len(what) <= _TEXT:
        return what
    mark = hashlib.blake2b(what.encode(), digest_size=8).hexdigest()
    return f"{what[: _TEXT - 20]}... {mark}"


def differences(calls: dict[int, Call]) -> str:
    rows: dict[str, list[int]] = {}
    for rank, call in sorted(calls.items()):
        rows.setdefault(call.what, []).append(rank)
    return "ranks made different calls; nothing was sent:\n" + "\n".join(
        f"  rank(s) {listed(ranks)}: {what}" for what, ranks in rows.items()
    )
