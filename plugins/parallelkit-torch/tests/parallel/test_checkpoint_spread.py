"""Which rank writes what: every region once, by a rank that holds it, evenly."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from parallelkit_torch.parallel.checkpoint_spread import Piece, Place, assign

from parallelkit.errors import CheckpointError, RankMismatchError


def whole(key: str, *shape: int, first: bool = False, dtype: str = "float32") -> Piece:
    return Piece(key, dtype, shape, (0,) * len(shape), shape, first)


def rows(key: str, total: int, start: int, stop: int) -> Piece:
    return Piece(key, "float32", (total, 4), (start, 0), (stop - start, 4), False)


def test_replicas_are_written_once_and_evenly() -> None:
    pieces = [whole(f"w{number}", 8, 8) for number in range(12)]
    owners = assign([pieces] * 4)
    assert len(owners) == 12
    assert sorted(owners.values()) == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3


def test_buffers_are_the_first_holders() -> None:
    pieces = [whole(f"b{number}", 4, first=True) for number in range(6)]
    assert set(assign([pieces, pieces]).values()) == {0}
    assert set(assign([[], pieces, pieces]).values()) == {1}


def test_shards_replicas_and_stages_together() -> None:
    held = [
        [rows("a", 7, 0, 4), whole("norm", 4)],
        [rows("a", 7, 4, 7), whole("norm", 4)],
        [rows("a", 7, 0, 4), whole("head", 4)],
        [rows("a", 7, 4, 7), whole("head", 4)],
    ]
    owners = assign(held)
    assert owners.keys() == {
        Place("a", (0, 0)),
        Place("a", (4, 0)),
        Place("norm", (0,)),
        Place("head", (0,)),
    }
    assert owners[Place("a", (0, 0))] in (0, 2)
    assert owners[Place("a", (4, 0))] in (1, 3)
    assert owners[Place("norm", (0,))] in (0, 1)
    assert owners[Place("head", (0,))] in (2, 3)


def test_ranks_without_a_share_and_empty_tensors() -> None:
    held = [[rows("a", 1, 0, 1), whole("e", 0, 3)], [rows("a", 1, 1, 1), whole("e", 0, 3)]]
    assert assign(held) == {Place("a", (0, 0)): 0, Place("e", (0, 0)): 1}
    assert assign([[whole("s")]]) == {Place("s", ()): 0}
    assert assign([[], []]) == {}


@pytest.mark.parametrize(
    ("held", "kind", "said"),
    [
        ([[whole("a", 2)], [whole("a", 3)]], RankMismatchError, r"rank 0 float32 \[2\], rank 1"),
        (
            [[whole("a", 2)], [whole("a", 2, dtype="bfloat16")]],
            RankMismatchError,
            r"rank 1 bfloat16 \[2\]",
        ),
        (
            [[rows("a", 4, 0, 2)], [rows("a", 4, 0, 3)]],
            RankMismatchError,
            "rank 0 .2, 4., rank 1 .3, 4.",
        ),
        ([[rows("a", 4, 0, 2)], [rows("a", 4, 3, 4)]], CheckpointError, "16 elements, .* of 12"),
        ([[rows("a", 4, 0, 3)], [rows("a", 4, 2, 4)]], CheckpointError, "16 elements, .* of 20"),
        ([[rows("a", 4, 0, 0)]], CheckpointError, "16 elements, .* of 0"),
    ],
)
def test_what_does_not_fit_together(
    held: list[list[Piece]], kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=said):
        assign(held)


@pytest.mark.parametrize("seed", range(30))
def test_random_layouts(seed: int) -> None:
    """Grids of shards by replicas: each region has one writer, which holds it; loads are even."""
    random.seed(seed)
    shards, replicas = random.randint(1, 4), random.randint(1, 3)
    ranks = list(itertools.product(range(shards), range(replicas)))
    held: list[list[Piece]] = [[] for _ in ranks]
    elements = 0
    for number in range(random.randint(1, 30)):
        total = random.randint(1, 9)
        elements += total * 4
        each = math.ceil(total / shards)
        for rank, (shard, _) in enumerate(ranks):
            start = min(total, shard * each)
            held[rank].append(rows(f"t{number}", total, start, min(total, start + each)))
    owners = assign(held)
    sizes = [0] * len(ranks)
    for place, rank in owners.items():
        mine = [p for p in held[rank] if (p.key, p.offsets) == place]
        assert len(mine) == 1
        sizes[rank] += math.prod(mine[0].sizes)
    assert sum(sizes) == elements
    for shard in range(shards):  # replicas of one shard differ by at most its largest region
        loads = [sizes[rank] for rank, (which, _) in enumerate(ranks) if which == shard]
        assert max(loads) - min(loads) <= 9 * 4
    assert owners == assign(held), "the same on every rank"
