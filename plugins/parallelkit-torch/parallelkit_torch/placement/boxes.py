"""Regular sets of bytes, and whether together they cover a tensor exactly once. No framework.

Everything here is arithmetic on starts, sizes and steps; a flag for each element is made only for
sets that interleave, and then for the largest unit that all of them are made of.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import attrs
import numpy as np

Flags = np.ndarray[Any, Any]


@attrs.frozen
class Box:
    """Elements of one memory, as a strided view has them.

    Attributes:
        start: byte of the first element within the memory.
        item: bytes of one element.
        shape: number of elements in each dim.
        steps: bytes from one element to the next in each dim; 0 where a dim is expanded.
    """

    start: int
    item: int
    shape: tuple[int, ...]
    steps: tuple[int, ...]

    @property
    def count(self) -> int:
        """Number of elements; those of an expanded dim are counted each."""
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        """Byte behind the last element."""
        end = self.start + self.item
        for n, step in zip(self.shape, self.steps, strict=True):
            if not n:
                return self.start
            end += step * (n - 1)
        return end

    def as_set(self) -> Box:
        """The same bytes with as few dims as possible, the contiguous ones part of the item."""
        dims = sorted(
            (step, n) for step, n in zip(self.steps, self.shape, strict=True) if n > 1 and step
        )
        item = self.item
        left: list[tuple[int, int]] = []
        for step, n in dims:
            if not left and step == item:
                item *= n
            elif left and step == left[-1][0] * left[-1][1]:
                left[-1] = (left[-1][0], left[-1][1] * n)
            else:
                left.append((step, n))
        left.reverse()
        return Box(self.start, item, tuple(n for _, n in left), tuple(step for step, _ in left))


def doubled(boxes: Sequence[Box]) -> set[int]:
    """Indexes of the boxes that have a byte in common with another."""
    sets = sorted(
        ((box.as_set(), index) for index, box in enumerate(boxes) if box.count),
        key=lambda pair: pair[0].start,
    )
    found: set[int] = set()
    for together in _clusters(sets):
        found |= _doubled_within(together)
    return found


def missing_rows(tensor: Box, covering: Iterable[Box]) -> list[tuple[int, int]]:
    """Where a tensor is not covered: ranges of rows (indexes of dim 0) that lack an element.

    Args:
        tensor: what is to be covered, all dims as the tensor has them; of no dim: one row.
        covering: boxes of the same memory; what lies outside the tensor does not matter.
    """
    if not tensor.count:
        return []
    whole = tensor.as_set()
    sets = [box.as_set() for box in covering if box.count]
    if not whole.shape and not any(box.shape for box in sets) and _spans(whole, sets):
        return []
    if _covered(whole, sets).all():
        return []
    rows = tensor.shape[0] if tensor.shape else 1
    lacking = ~_covered(tensor, sets).reshape(rows, -1).all(axis=1)
    return list(_ranges(np.flatnonzero(lacking).tolist()))


def _covered(tensor: Box, sets: Sequence[Box]) -> Flags:
    """For each unit of the tensor, in its own dims, whether a box has it."""
    near = [box for box in sets if box.start < tensor.end and box.end > tensor.start]
    low = min([tensor.start, *(box.start for box in near)])
    high = max([tensor.end, *(box.end for box in near)])
    unit = _unit([tensor, *near], low)
    flags = np.zeros((high - low) // unit, np.bool_)
    for box in near:
        _view(flags, box, low, unit)[...] = True
    return _view(flags, tensor, low, unit)


def _spans(whole: Box, runs: Sequence[Box]) -> bool:
    """Whether contiguous runs leave no gap in a contiguous whole."""
    at = whole.start
    for run in sorted(runs, key=lambda box: box.start):
        if run.start > at:
            return False
        at = max(at, run.end)
    return at >= whole.end


def _clusters(sets: list[tuple[Box, int]]) -> Iterator[list[tuple[Box, int]]]:
    """Groups whose ranges of bytes touch one another; a box on its own is in none."""
    cluster: list[tuple[Box, int]] = []
    end = 0
    for box, index in sets:
        if box.start >= end:
            if len(cluster) > 1:
                yield cluster
            cluster = []
        cluster.append((box, index))
        end = max(end, box.end)
    if len(cluster) > 1:
        yield cluster


def _doubled_within(cluster: list[tuple[Box, int]]) -> set[int]:
    if not any(box.shape for box, _ in cluster):
        return _doubled_runs(cluster)
    base, end = cluster[0][0].start, max(box.end for box, _ in cluster)
    unit = _unit([box for box, _ in cluster], base)
    counts = np.zeros((end - base) // unit, np.uint8)
    for box, _ in cluster:
        view = _view(counts, box, base, unit)
        np.minimum(view + 1, 2, out=view)
    return {index for box, index in cluster if (_view(counts, box, base, unit) > 1).any()}


def _doubled_runs(cluster: list[tuple[Box, int]]) -> set[int]:
    """As `_doubled_within`, for contiguous runs sorted by their start."""
    found: set[int] = set()
    last, index = cluster[0]
    for box, other in cluster[1:]:
        if box.start < last.end:
            found |= {index, other}
        if box.end > last.end:
            last, index = box, other
    return found


def _unit(boxes: Sequence[Box], base: int) -> int:
    """The largest number of bytes that all boxes are made of, counted from `base`."""
    return math.gcd(*(n for b in boxes for n in (b.item, b.start - base, *b.steps)))


def _view(flags: Flags, box: Box, base: int, unit: int) -> Flags:
    """The part of `flags`, one for each `unit` bytes from `base`, that is the box."""
    return np.lib.stride_tricks.as_strided(
        flags[(box.start - base) // unit :],
        (*box.shape, box.item // unit),
        (*(step // unit for step in box.steps), 1),
    )


def _ranges(rows: Iterable[int]) -> Iterator[tuple[int, int]]:
    start = stop = -1
    for row in rows:
        if row == stop:
            stop += 1
            continue
        if start >= 0:
            yield start, stop
        start, stop = row, row + 1
    if start >= 0:
        yield start, stop
