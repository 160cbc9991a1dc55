"""Merging of copies: the same elements, by fewer copies."""

from __future__ import annotations

import itertools
import random

import pytest
from parallelkit_torch.placement.moves import Move, merged


def pairs(moves: list[Move]) -> dict[int, int]:
    """Target element to source element, one by one."""
    found: dict[int, int] = {}
    for move in moves:
        for place in itertools.product(*map(range, move.shape)):
            source = move.source + sum(i * s for i, (s, _) in zip(place, move.steps, strict=True))
            target = move.target + sum(i * t for i, (_, t) in zip(place, move.steps, strict=True))
            assert target not in found
            found[target] = source
    return found


def block(rows: int, columns: int, source: int, target: int, widths: tuple[int, int]) -> Move:
    return Move((rows, columns), (widths, (1, 1)), target, source)


def test_rows_one_by_one_become_one_copy() -> None:
    rows = [block(1, 8, 8 * i, 100 + 8 * i, (8, 8)) for i in range(6)]
    (one,) = merged(reversed(rows))
    assert one == Move((48,), ((1, 1),), 100, 0)
    assert not one.whole(48 + 8)
    assert one.whole(48)


def test_columns_of_a_narrow_load_become_one_copy_of_two_dims() -> None:
    rows = [block(1, 4, 4 + 8 * i, 4 * i, (8, 4)) for i in range(6)]
    (one,) = merged(rows)
    assert one.shape == (6, 4)
    assert pairs([one]) == pairs(rows)


def test_a_source_that_runs_backwards_is_not_merged() -> None:
    rows = [block(1, 4, 4 * (5 - i), 4 * i, (4, 4)) for i in range(6)]
    assert pairs(merged(rows)) == pairs(rows)
    assert all(step >= 0 for move in merged(rows) for step in move.source_steps)


def test_empty_and_scalar() -> None:
    assert merged([Move((0, 4), ((4, 1), (1, 1)), 0, 0)]) == []
    (scalar,) = merged([Move((), (), 3, 0)])
    assert scalar.whole(1)
    assert merged([Move((1, 1), ((7, 9), (1, 1)), 3, 0)]) == [scalar]


@pytest.mark.parametrize("seed", range(40))
def test_any_cut_of_a_tensor_is_the_same_tensor(seed: int) -> None:
    """A tensor cut at random, in random order, transposed or not, written into another."""
    random_ = random.Random(seed)
    rows, columns = random_.randint(1, 12), random_.randint(1, 12)
    wide = columns + random_.randint(0, 3)
    flipped = random_.random() < 0.5
    source = (1, rows) if flipped else (columns, 1)

    def cuts(n: int) -> list[tuple[int, int]]:
        at = sorted({0, n, *(random_.randint(0, n) for _ in range(random_.randint(0, 6)))})
        return list(itertools.pairwise(at))

    moves = [
        Move(
            (b - a, d - c),
            ((source[0], wide), (source[1], 1)),
            50 + a * wide + c,
            a * source[0] + c * source[1],
        )
        for a, b in cuts(rows)
        for c, d in cuts(columns)
    ]
    before = pairs(moves)
    random_.shuffle(moves)
    after = merged(moves)
    assert pairs(after) == before
    assert len(after) <= len(moves)
