"""Dealing a stream of unknown length to parts: pure, and by the rules of `shard_indices`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeVar

from parallelkit.data import check_place
from parallelkit.errors import DataShardError

_T = TypeVar("_T")


def deal(
    stream: Iterable[_T],
    *,
    index: int,
    count: int,
    mode: str = "pad",
    start: int = 0,
    batch_size: int = 1,
    worker: int = 0,
    workers: int = 1,
) -> Iterator[_T]:
    """Yield the items of `stream` that belong to part `index` of `count`.

    Every part reads the same stream and takes one item of each round of `count`, so the parts
    are those that `shard_indices` gives for a data set of the same items, in the same order,
    without a message between them. What differs is when things are known: an item is yielded
    once its round was read, or the stream has ended.

    With several `workers` of one part, worker `b % workers` yields batch `b`, whole, and the
    others read past it. Taken in turn, the workers give what a single one would.

    `"pad"` keeps the first `index` items in memory, to repeat them at the end.

    Args:
        stream: the same on every part and worker.
        index, count, mode: as of `shard_indices`.
        start: items at the front of the stream to read past.
        batch_size: items in a batch.
        worker, workers: which of how many workers of this part.

    Raises:
        DataShardError: an argument is out of range; with `"drop"`, when the stream has ended
            with fewer items than parts, so that all parts would be empty.

    Example:
        >>> [list(deal("abcde", index=i, count=2)) for i in (0, 1)]
        [['a', 'c', 'e'], ['b', 'd', 'a']]
    """
    check_place(index, count, mode)
    for name, value, low in (
        ("start", start, 0),
        ("batch_size", batch_size, 1),
        ("workers", workers, 1),
        ("worker", worker, 0),
    ):
        if value < low:
            raise DataShardError(f"{name} is {value!r}; allowed is an integer of at least {low}")
    if worker >= workers:
        raise DataShardError(f"worker is {worker}; with {workers} workers it is 0 to {workers - 1}")
    mine = _part(iter(stream), index, count, mode, start)
    if workers == 1:
        return mine
    return (item for at, item in enumerate(mine) if at // batch_size % workers == worker)


def _part(items: Iterator[_T], index: int, count: int, mode: str, start: int) -> Iterator[_T]:
    first: list[_T] = []
    kept = index if mode == "pad" else 0
    read = 0
    for item in islice(items, start):
        if read < kept:
            first.append(item)
        read += 1
    while read >= start:  # a stream that ended before has nothing left
        mine: list[_T] = []
        got = 0
        for item in islice(items, count):
            if read + got < kept:
                first.append(item)
            if got == index:
                mine.append(item)
            got += 1
        if got == count:
            yield mine[0]
            read += count
            continue
        if mode == "drop" and read == 0:
            raise DataShardError(
                f"mode 'drop' would leave all {count} parts empty: the stream ended after {got} "
                f"items, fewer than parts; use 'pad' to repeat items or 'uneven' to allow empty "
                f"parts"
            )
        if mode != "drop" and got:
            if mine:
                yield mine[0]
            elif mode == "pad":
                yield first[(read + index) % (read + got)]
        return
