"""A process group whose ranks are threads of one process, to test what ranks tell each other."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from parallelkit import plain
from parallelkit.errors import CollectiveError, CollectiveTimeoutError, GroupClosedError
from parallelkit.protocols import Plain, ProcessGroup

T = TypeVar("T")


class Hall:
    """Where the ranks of one group meet. A collective that fails breaks the group, as real ones."""

    def __init__(self, world_size: int, timeout: float) -> None:
        self.world_size = world_size
        self.timeout = timeout
        self.changed = threading.Condition()
        self.said: dict[int, bytes] = {}
        self.arrived: dict[int, set[int]] = {}
        self.gone: set[int] = set()
        self.broken = ""

    def fail(self, error: CollectiveError) -> CollectiveError:
        """Break the group; returns the error to raise."""
        self.broken = self.broken or str(error)
        self.changed.notify_all()
        return error


class MeetingGroup:
    """One rank of a group of threads. Tensors are not carried, objects are."""

    framework, backend, device = "fake", "threads", "cpu"

    def __init__(self, hall: Hall, rank: int) -> None:
        self.rank = self.local_rank = rank
        self.world_size = hall.world_size
        self.timeout = hall.timeout
        self.closed = False
        self.native: Any = self
        self._hall = hall
        self._turn = 0

    def barrier(self, *, timeout: float | None = None) -> None:
        turn, everyone = self._next(), set(range(self.world_size))

        def here() -> bool:
            return self._hall.arrived[turn] >= everyone

        with self._hall.changed:
            self._hall.arrived.setdefault(turn, set()).add(self.rank)
            self._hall.changed.notify_all()
            self._wait(here, timeout, lambda: sorted(everyone - self._hall.arrived[turn]))

    def broadcast_object(self, obj: Plain, src: int = 0, *, timeout: float | None = None) -> Plain:
        turn = self._next()
        with self._hall.changed:
            if turn in self._hall.said:  # it was sent before the group broke
                return plain.decode(self._hall.said[turn])
            if self._hall.broken:
                raise CollectiveError(f"the group is broken: {self._hall.broken}")
            if src == self.rank:
                self._hall.said[turn] = plain.encode(obj)
                self._hall.changed.notify_all()
                return plain.decode(self._hall.said[turn])
            self._wait(lambda: turn in self._hall.said, timeout, lambda: [src])
            return plain.decode(self._hall.said[turn])

    def leave(self) -> None:
        """Die: whoever waits for this rank learns of it."""
        with self._hall.changed:
            self._hall.gone.add(self.rank)
            self._hall.changed.notify_all()

    def _next(self) -> int:
        if self.closed:
            raise GroupClosedError("the group is closed")
        self._turn += 1
        return self._turn

    def _wait(
        self, done: Callable[[], bool], timeout: float | None, missing: Callable[[], list[int]]
    ) -> None:
        deadline = time.monotonic() + (self.timeout if timeout is None else timeout)
        while not done():
            if self._hall.broken:
                raise CollectiveError(f"the group is broken: {self._hall.broken}")
            lost = self._hall.gone.intersection(missing())
            if lost:
                raise self._hall.fail(CollectiveError(f"rank(s) {sorted(lost)} ended"))
            left = deadline - time.monotonic()
            if left <= 0:
                text = f"rank(s) {missing()} did not arrive in time"
                raise self._hall.fail(CollectiveTimeoutError(text, missing=missing()))
            self._hall.changed.wait(left)

    def all_reduce(self, x: Any, op: str = "sum") -> Any:
        raise NotImplementedError

    def broadcast(self, x: Any, src: int = 0) -> Any:
        raise NotImplementedError

    def all_gather(self, x: Any) -> list[Any]:
        raise NotImplementedError

    def reduce_scatter(self, x: Any, op: str = "sum") -> Any:
        raise NotImplementedError

    def subgroup(self, ranks: Sequence[int]) -> ProcessGroup | None:
        raise NotImplementedError

    def close(self) -> None:
        self.closed = True

    def __enter__(self) -> MeetingGroup:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def meet(world_size: int, timeout: float = 10.0) -> list[MeetingGroup]:
    """The ranks of a group, to be used by one thread each."""
    hall = Hall(world_size, timeout)
    return [MeetingGroup(hall, rank) for rank in range(world_size)]


def on_ranks(
    groups: Sequence[MeetingGroup], work: Callable[[MeetingGroup], T], seconds: float = 60.0
) -> list[T | BaseException]:
    """Do something in a thread of each rank; returns each one's result or error, by rank.

    Raises:
        TimeoutError: a rank is not done within so many seconds.
    """
    results: list[T | BaseException] = [TimeoutError("not done")] * len(groups)

    def run(position: int) -> None:
        try:
            results[position] = work(groups[position])
        except BaseException as error:
            results[position] = error

    threads = [
        threading.Thread(target=run, args=(position,), daemon=True)
        for position in range(len(groups))
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + seconds
    for rank, thread in enumerate(threads):
        thread.join(max(deadline - time.monotonic(), 0.0))
        if thread.is_alive():
            raise TimeoutError(f"rank {rank} is not done within {seconds:g} s")
    return results
