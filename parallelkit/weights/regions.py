"""Boxes of a tensor, and the bytes that they are in one row-major memory: spans.

A span is arithmetic, not a list: where the first byte is, how many follow each other, and how often
that repeats at which distances. It is what a transport is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from parallelkit.errors import ProtocolError
from parallelkit.weights.layout import Region

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

#: Repetitions in a span; numpy has room for 32 dims, a tensor of ours for 16.
MAX_STEPS: Final = 16


class Span(NamedTuple):
    """Bytes of a box inside one contiguous memory, in the box's own row-major order.

    Attributes:
        offset: the first byte.
        run: how many bytes follow each other.
        steps: how runs repeat: pairs of a count and a distance in bytes, slowest first.

    Example:
        >>> Span(8, 4, ((3, 16),)).nbytes  # bytes 8 to 11, 24 to 27, 40 to 43
        12
    """

    offset: int
    run: int
    steps: tuple[tuple[int, int], ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes in it."""
        return self.run * math.prod(count for count, _ in self.steps)

    @property
    def end(self) -> int:
        """One past its last byte; `offset` where it is empty."""
        if not self.nbytes:
            return self.offset
        return self.offset + self.run + sum((count - 1) * far for count, far in self.steps)

    def check(self, nbytes: int) -> None:
        """Raise `ProtocolError` unless the span lies in a memory of `nbytes` bytes, each once.

        So whoever serves it never reads more bytes than there are.
        """
        good = len(self.steps) <= MAX_STEPS and min(self.offset, self.run) >= 0
        extent = self.run
        for count, far in reversed(self.steps):
            good = good and count >= 0 and (count < 2 or far >= extent)
            extent += max(count - 1, 0) * far
        if not good or self.end > nbytes:
            raise ProtocolError(
                f"a span (offset {self.offset}, run {self.run}, steps {self.steps!r:.200}) is not "
                f"inside a memory of {nbytes} bytes; allowed are at most {MAX_STEPS} steps, none "
                f"shorter than what it repeats, and an end of at most {nbytes}"
            )


def view(memory: Any, span: Span) -> Bytes:
    """The bytes of a span, without a copy.

    Args:
        memory: any contiguous buffer; the view is writable if it is.
        span: what of it.

    Returns:
        A uint8 array of shape `(*counts, run)`, strided; of shape `(0,)` for an empty span.

    Raises:
        ProtocolError: the span reaches outside.
    """
    span.check(memory.nbytes)
    if not span.nbytes:
        return np.empty(0, np.uint8)
    shape = (*(count for count, _ in span.steps), span.run)
    strides = (*(far for _, far in span.steps), 1)
    return np.ndarray(shape, np.uint8, memory, span.offset, strides)


def whole(shape: Sequence[int]) -> Region:
    """The box of all elements."""
    return Region((0,) * len(shape), tuple(shape))


def inside(box: Region, within: Region) -> bool:
    """Whether `box` has the same dims as `within` and no element outside of it."""
    return (
        len(box.offsets) == len(box.sizes) == len(within.sizes)
        and all(size >= 0 for size in box.sizes)
        and all(
            start <= low and low + size <= start + extent
            for low, size, start, extent in zip(*box, *within, strict=True)
        )
    )


def intersection(one: Region, other: Region) -> Region | None:
    """What two boxes of one tensor share; None where that is nothing."""
    lows = tuple(map(max, one.offsets, other.offsets))
    sizes = tuple(
        min(a + n, b + m) - low for a, n, b, m, low in zip(*one, *other, lows, strict=True)
    )
    return Region(lows, sizes) if all(size > 0 for size in sizes) else None


def span_of(box: Region, within: Region | Sequence[int], itemsize: int, base: int = 0) -> Span:
    """The bytes of a box in the memory of a larger one, in runs as long as they can be.

    Args:
        box: some elements, in coordinates of the tensor.
        within: the elements in memory, row-major without gaps, in the same coordinates; or a
            shape, for all.
        itemsize: bytes of an element; base: where that memory begins.

    Raises:
        ProtocolError: the box is not inside `within`.

    Example:
        >>> span_of(Region((1, 0), (2, 3)), (4, 3), 2)
        Span(offset=6, run=12, steps=())
        >>> span_of(Region((0, 1), (4, 2)), (4, 3), 2)
        Span(offset=2, run=4, steps=((4, 6),))
    """
    within = within if isinstance(within, Region) else whole(within)
    if not inside(box, within):
        raise ProtocolError(f"{box!r:.200} is not inside {within!r:.200}")
    return span_along(*distances(box, within, itemsize), box.sizes, itemsize, base)


def distances(box: Region, within: Region, itemsize: int) -> tuple[int, tuple[int, ...]]:
    """Where a box begins in the memory of a larger one, and how far apart its elements are.

    Returns:
        The first byte, and the distance in bytes between neighbours on each dim.
    """
    far, strides = itemsize, list[int]()
    for extent in reversed(within.sizes):
        strides.append(far)
        far *= extent
    strides.reverse()
    starts = zip(box.offsets, within.offsets, strides, strict=True)
    return sum((low - start) * stride for low, start, stride in starts), tuple(strides)


def span_along(
    offset: int, strides: Iterable[int], counts: Sequence[int], itemsize: int, base: int = 0
) -> Span:
    """A span from counts and distances of elements, slowest first, merged where they allow it."""
    if 0 in counts:  # an empty box may begin past the end of the memory; a span may not
        return Span(base, 0)
    run, steps = itemsize, list[tuple[int, int]]()
    for count, far in zip(reversed(counts), reversed(tuple(strides)), strict=True):
        if count == 1:
            continue
        if not steps and far == run:
            run *= count
        elif steps and far == steps[-1][0] * steps[-1][1]:
            steps[-1] = (steps[-1][0] * count, steps[-1][1])
        else:
            steps.append((count, far))
    return Span(base + offset, run, tuple(reversed(steps)))
