"""Copies between two memories as arithmetic, and how many small ones become few. No framework."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

import attrs


@attrs.frozen(order=True)
class Move:
    """One strided copy. Offsets and steps in elements, each of its own side's dtype.

    Attributes:
        shape: elements in each dim, the same on both sides.
        steps: between elements: source and target of each dim; a source's may be 0.
        source, target: first element.
    """

    shape: tuple[int, ...]
    steps: tuple[tuple[int, int], ...]
    target: int
    source: int

    @property
    def count(self) -> int:
        """Number of elements written."""
        return math.prod(self.shape)

    @property
    def source_steps(self) -> tuple[int, ...]:
        return tuple(step for step, _ in self.steps)

    @property
    def target_steps(self) -> tuple[int, ...]:
        return tuple(step for _, step in self.steps)

    def simplified(self) -> Move:
        """The same copy with as few dims as possible, slowest first in the target's memory."""
        dims = [(step, n) for n, step in zip(self.shape, self.steps, strict=True) if n != 1]
        dims.sort(key=lambda dim: -dim[0][1])
        left: list[tuple[tuple[int, int], int]] = []
        for step, n in dims:
            if left and left[-1][0] == (step[0] * n, step[1] * n):
                left[-1] = (step, left[-1][1] * n)
            else:
                left.append((step, n))
        shape = tuple(n for _, n in left)
        return Move(shape, tuple(step for step, _ in left), self.target, self.source)

    def whole(self, count: int) -> bool:
        """Whether it moves `count` elements from the first on, contiguous at both ends."""
        return (
            self.source == 0
            and self.count == count
            and (not self.shape or (len(self.shape) == 1 and self.steps == ((1, 1),)))
        )


def merged(moves: Iterable[Move]) -> list[Move]:
    """Fewer copies that write the same elements with the same values.

    Copies of equal shape at equal distances become one with a dim more; as when a loader copies
    row by row. The order is lost, so no element may be written twice.
    """
    left = sorted(move.simplified() for move in moves if move.count)
    while True:
        fewer = sorted(_pass(left))
        if len(fewer) == len(left):
            return fewer
        left = fewer


def _pass(moves: list[Move]) -> list[Move]:
    done: list[Move] = []
    for _, group in itertools.groupby(moves, key=lambda move: (move.shape, move.steps)):
        run: list[Move] = []
        for move in group:
            if run and not _goes_on(run, move):
                done.append(_joined(run))
                run = []
            run.append(move)
        done.append(_joined(run))
    return done


def _goes_on(run: list[Move], move: Move) -> bool:
    """Whether a move is as far from the last of a run as those are from one another."""
    step = _distance(run[-1], move)
    if step[0] < 0:  # no tensor has a negative step
        return False
    return len(run) == 1 or step == _distance(run[0], run[1])


def _distance(first: Move, second: Move) -> tuple[int, int]:
    return second.source - first.source, second.target - first.target


def _joined(run: list[Move]) -> Move:
    first = run[0]
    if len(run) == 1:
        return first
    shape, steps = (len(run), *first.shape), (_distance(first, run[1]), *first.steps)
    return Move(shape, steps, first.target, first.source).simplified()
