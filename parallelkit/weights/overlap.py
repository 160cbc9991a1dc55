"""Whether tensors share memory, from addresses and strides alone; no framework."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np


class Span(NamedTuple):
    """Where a tensor's elements lie.

    Attributes:
        name: for messages.
        start: address of the first element, in bytes.
        item: bytes of one element.
        shape: of the tensor; a span is made of tensors with elements only.
        steps: bytes from one element to the next in each dim.
        space: what the address belongs to, such as a device.
    """

    name: str
    start: int
    item: int
    shape: tuple[int, ...]
    steps: tuple[int, ...]
    space: Hashable = "cpu"

    @classmethod
    def strided(
        cls,
        name: str,
        start: int,
        item: int,
        shape: Sequence[int],
        strides: Sequence[int],
        space: Hashable,
    ) -> Span:
        """Make one of strides in elements, as frameworks have them."""
        return cls(name, start, item, tuple(shape), tuple(step * item for step in strides), space)

    @property
    def end(self) -> int:
        """Address behind the last element."""
        reach = sum(step * (n - 1) for step, n in zip(self.steps, self.shape, strict=True))
        return self.start + reach + self.item

    @property
    def joined(self) -> Span:
        """The same bytes with as few dims as possible, those without gaps part of the item."""
        dims = sorted((step, n) for step, n in zip(self.steps, self.shape, strict=True) if n > 1)
        item, left = self.item, list[tuple[int, int]]()
        for step, n in dims:
            if not left and step == item:
                item *= n
            else:
                left.append((step, n))
        shape, steps = tuple(n for _, n in left), tuple(step for step, _ in left)
        return self._replace(item=item, shape=shape, steps=steps)

    def within(self, mask: np.ndarray[Any, Any], base: int, unit: int) -> np.ndarray[Any, Any]:
        """The part of `mask`, one flag for each `unit` bytes from `base`, that is this tensor."""
        return np.lib.stride_tricks.as_strided(
            mask[(self.start - base) // unit :],
            (*self.shape, self.item // unit),
            (*(step // unit for step in self.steps), 1),
        )


def self_overlapping(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two elements may share one place; exact for every tensor made by views.

    Example:
        >>> self_overlapping((2, 3), (3, 1)), self_overlapping((2, 3), (0, 1))
        (False, True)
    """
    if math.prod(shape) == 0:
        return False
    reach = 0
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def overlap(spans: Iterable[Span]) -> tuple[str, str] | None:
    """Name two tensors that have an element's memory in common, the first found; else None.

    Exact: views of one storage that interleave, as the columns of a matrix, do not overlap.
    """
    spaces: dict[Hashable, list[Span]] = {}
    for span in spans:
        spaces.setdefault(span.space, []).append(span)
    for together in spaces.values():
        for cluster in _clusters(together):
            pair = _overlap_within(cluster)
            if pair:
                return pair
    return None


def shared(ours: Iterable[Span], theirs: Iterable[Span]) -> bool:
    """Whether an element of one group has memory in common with one of the other.

    Exact, as `overlap`. Those of one group may overlap one another.
    """
    spaces: dict[Hashable, list[Span]] = {}
    for side, group in (("ours", ours), ("theirs", theirs)):
        for span in group:
            spaces.setdefault(span.space, []).append(span.joined._replace(name=side))
    return any(
        _shared_within(cluster)
        for together in spaces.values()
        for cluster in _clusters(together)
        if len({span.name for span in cluster}) > 1
    )


def _shared_within(cluster: Sequence[Span]) -> bool:
    """Whether spans of two names meet; they are in order of their starts."""
    reached = {"ours": 0, "theirs": 0}  # the end of each side's spans without gaps
    for span in cluster:
        if any(span.start < end for side, end in reached.items() if side != span.name):
            return True
        if not span.shape:
            reached[span.name] = max(reached[span.name], span.end)
    mask, base, unit = _flags(cluster)
    for span in cluster:
        if span.name == "ours":
            span.within(mask, base, unit)[...] = True
    return any(span.within(mask, base, unit).any() for span in cluster if span.name == "theirs")


def _clusters(spans: list[Span]) -> Iterator[list[Span]]:
    """Groups of spans that touch one another; a span on its own is in none."""
    spans.sort(key=lambda span: span.start)
    cluster: list[Span] = []
    end = 0
    for span in spans:
        if span.start >= end:
            if len(cluster) > 1:
                yield cluster
            cluster = []
        cluster.append(span)
        end = max(end, span.end)
    if len(cluster) > 1:
        yield cluster


def _overlap_within(cluster: list[Span]) -> tuple[str, str] | None:
    mask, base, unit = _flags(cluster)
    for position, span in enumerate(cluster):
        mine = span.within(mask, base, unit)
        if mine.any():
            for other in itertools.islice(cluster, position):
                mask[:] = False
                other.within(mask, base, unit)[...] = True
                if mine.any():
                    return other.name, span.name
        mine[...] = True
    return None


def _flags(cluster: Sequence[Span]) -> tuple[np.ndarray[Any, Any], int, int]:
    """A flag for each unit of memory that spans are made of, the first address, and the unit."""
    base, end = cluster[0].start, max(span.end for span in cluster)
    unit = math.gcd(*(n for s in cluster for n in (s.item, s.start - base, *s.steps)))
    return np.zeros((end - base) // unit, np.bool_), base, unit
