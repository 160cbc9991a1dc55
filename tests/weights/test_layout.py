"""Layouts: every element is held where arithmetic says, and served exactly once."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallelkit.errors import ManifestError
from parallelkit.weights.layout import (
    Mesh,
    Region,
    ShardLayout,
    overlaps,
    owners,
    region,
    servers,
    serves,
    summary,
)

AXES = ("pipeline", "data", "data_shard", "context", "tensor")
MESH = Mesh(AXES, (2, 2, 3, 1, 2))


@st.composite
def laid_out(draw):
    """A mesh, a shape and a layout that fit together."""
    degrees = draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    mesh = Mesh(AXES[: len(degrees)], degrees)
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    axes = draw(st.permutations(mesh.axes))
    named = axes[: draw(st.integers(0, len(axes)))]
    split = draw(st.integers(0, len(named))) if shape else 0
    shards = [(axis, draw(st.integers(0, len(shape) - 1))) for axis in named[:split]]
    at = [(axis, draw(st.integers(0, mesh.degree(axis) - 1))) for axis in named[split:]]
    layout = ShardLayout(shards, at)
    layout.check(mesh, shape)
    return mesh, shape, layout


def indices(box):
    return tuple(slice(low, low + n) for low, n in zip(box.offsets, box.sizes, strict=True))


@settings(max_examples=300, deadline=None)
@given(laid_out())
def test_owners_serve_every_element_exactly_once(case):
    mesh, shape, layout = case
    served = np.zeros(shape, int)
    for rank, box in owners(layout, mesh, shape):
        assert box.elements > 0
        assert region(layout, mesh, shape, rank) == box
        served[indices(box)] += 1
    assert (served == 1).all()


def test_owners_serve_every_element_exactly_once_over_thousands_of_meshes():
    rng = random.Random(0)
    for _ in range(3000):
        mesh = Mesh(AXES, [rng.choice((1, 1, 2, 3, 4)) for _ in AXES])
        shape = tuple(rng.randrange(0, 12) for _ in range(rng.randrange(1, 4)))
        axes = rng.sample(AXES, rng.randrange(0, 5))
        cut = rng.randrange(0, len(axes) + 1)
        layout = ShardLayout(
            [(axis, rng.randrange(len(shape))) for axis in axes[:cut]],
            [(axis, rng.randrange(mesh.degree(axis))) for axis in axes[cut:]],
        )
        layout.check(mesh, shape)
        served = np.zeros(shape, np.int8)
        for _, box in owners(layout, mesh, shape):
            served[indices(box)] += 1
        assert (served == 1).all(), (mesh, shape, layout)
        ranks = {rank for rank, _ in owners(layout, mesh, shape)}
        assert ranks <= set(servers([layout], mesh))


@settings(max_examples=300, deadline=None)
@given(laid_out())
def test_the_owner_of_a_part_is_the_lowest_rank_that_holds_it(case):
    mesh, shape, layout = case
    holders = {}
    for rank in range(mesh.size):
        box = region(layout, mesh, shape, rank)
        if box is not None and box.elements:
            holders.setdefault(box, []).append(rank)
    assert {box: rank for rank, box in owners(layout, mesh, shape)} == {
        box: ranks[0] for box, ranks in holders.items()
    }
    every = [rank for rank in range(mesh.size) if serves(layout, mesh, rank)]
    assert servers([layout], mesh) == every
    replicas = mesh.size // math.prod(mesh.degree(a) for a, _ in (*layout.shards, *layout.at))
    assert all(len(ranks) == replicas for ranks in holders.values())


@settings(max_examples=300, deadline=None)
@given(laid_out(), st.data())
def test_overlaps_are_what_owners_says_cut_to_the_box(case, data):
    mesh, shape, layout = case
    low = tuple(data.draw(st.integers(0, n)) for n in shape)
    size = tuple(data.draw(st.integers(0, n - first)) for n, first in zip(shape, low, strict=True))
    expected = {}
    for rank, (start, extent) in owners(layout, mesh, shape):
        first = tuple(map(max, low, start))
        last = tuple(map(min, np.add(low, size).tolist(), np.add(start, extent).tolist()))
        if all(a < b for a, b in zip(first, last, strict=True)):
            sizes = tuple(b - a for a, b in zip(first, last, strict=True))
            expected[rank] = Region(first, sizes)
    found = list(overlaps(layout, mesh, shape, Region(low, size)))
    assert dict(found) == expected
    assert len(found) == len(expected)


def test_overlaps_look_at_no_rank_that_does_not_meet_the_box():
    """A million ranks, of which one holds the box: a second for each would never end."""
    mesh = Mesh(("pipeline", "data_shard", "tensor"), (4, 1 << 17, 8))
    layout = ShardLayout([("tensor", 0), ("data_shard", 0)], [("pipeline", 3)])
    box = Region((1 << 20, 0), (2, 5))
    rows = 1 << 20  # of each tensor coordinate; 8 of each rank
    assert list(overlaps(layout, mesh, (8 * rows, 5), box)) == [(3 * (1 << 20) + 1, box)]
    assert list(overlaps(None, mesh, (8 * rows, 5), box)) == [(0, box)]
    assert list(overlaps(layout, None, (8 * rows, 5), box)) == [(0, box)]
    assert list(overlaps(layout, mesh, (8 * rows, 5), Region((0, 0), (4, 0)))) == []


@settings(max_examples=300, deadline=None)
@given(laid_out())
def test_division_is_numpys_by_chunks_of_the_rounded_up_size(case):
    """The same by cutting an array of indexes again and again."""
    mesh, shape, layout = case
    whole = np.arange(math.prod(shape)).reshape(shape)
    for rank in range(mesh.size):
        part = whole
        for axis, dim in layout.shards:
            chunk = -(-part.shape[dim] // mesh.degree(axis))
            start = chunk * mesh.coordinate(rank, axis)
            part = np.take(part, range(start, min(start + chunk, part.shape[dim])), axis=dim)
        box = region(layout, mesh, shape, rank)
        if any(mesh.coordinate(rank, axis) != where for axis, where in layout.at):
            assert box is None
            continue
        assert box.sizes == part.shape
        np.testing.assert_array_equal(whole[indices(box)], part)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=5))
def test_a_rank_is_its_coordinates_in_mixed_radix(degrees):
    mesh = Mesh(AXES[: len(degrees)], degrees)
    places = list(itertools.product(*map(range, degrees)))
    for rank, place in enumerate(places):
        assert tuple(mesh.coordinate(rank, axis) for axis in mesh.axes) == place
        assert sum(c * mesh.stride(a) for a, c in zip(mesh.axes, place, strict=True)) == rank
    assert mesh.size == len(places)


def test_two_divisions_of_one_dim_in_either_order():
    mesh = Mesh(("data_shard", "tensor"), (2, 2))
    tensor_first = ShardLayout([("tensor", 0), ("data_shard", 0)])
    shard_first = ShardLayout([("data_shard", 0), ("tensor", 0)])
    rows = {
        name: [region(layout, mesh, (7,), rank) for rank in range(4)]
        for name, layout in (("tensor", tensor_first), ("shard", shard_first))
    }
    spans = {
        name: [(box.offsets[0], box.offsets[0] + box.sizes[0]) for box in boxes]
        for name, boxes in rows.items()
    }
    assert spans == {
        "tensor": [(0, 2), (4, 6), (2, 4), (6, 7)],
        "shard": [(0, 2), (2, 4), (4, 6), (6, 7)],
    }


def test_fewer_rows_than_ranks_leave_some_empty():
    mesh = Mesh(("data_shard",), (4,))
    layout = ShardLayout([("data_shard", 0)])
    boxes = [region(layout, mesh, (5, 2), rank) for rank in range(4)]
    assert [box.sizes[0] for box in boxes] == [2, 2, 1, 0]
    assert [rank for rank, _ in owners(layout, mesh, (5, 2))] == [0, 1, 2]
    assert [rank for rank, _ in owners(layout, mesh, (1, 2))] == [0]


def test_scalars_empty_tensors_and_no_layout():
    assert list(owners(None, None, ())) == [(0, ((), ()))]
    assert list(owners(None, None, (2, 3))) == [(0, ((0, 0), (2, 3)))]
    assert list(owners(ShardLayout(at=[("pipeline", 1)]), MESH, ())) == [(12, ((), ()))]
    assert list(owners(ShardLayout([("tensor", 1)]), MESH, (0, 8))) == []


@pytest.mark.parametrize(
    ("axes", "degrees", "said"),
    [
        ((), (), "1 to 16 names"),
        (("a", "a"), (2, 2), "each once"),
        (("", "b"), (2, 2), "1 to 64 bytes"),
        (("a" * 65,), (2,), "1 to 64 bytes"),
        (("\ud800",), (2,), "1 to 64 bytes"),
        ((3,), (2,), "names"),
        ([f"a{i}" for i in range(17)], [1] * 17, "1 to 16 names"),
        (("a",), (2, 2), "for each axis"),
        (("a",), (0,), "positive integer"),
        (("a",), (-1,), "positive integer"),
        (("a",), (True,), "positive integer"),
        (("a",), (1.0,), "positive integer"),
        (("a", "b"), (1 << 12, 1 << 13), "at most 16777216 ranks"),
    ],
)
def test_a_mesh_that_cannot_be(axes, degrees, said):
    with pytest.raises(ManifestError, match=said):
        Mesh(axes, degrees)


@pytest.mark.parametrize(
    ("shards", "at", "said"),
    [
        ([("model", 0)], [], "no axis 'model'; it has pipeline"),
        ([], [("model", 0)], "no axis 'model'"),
        ([("tensor", 2)], [], "divides dim 2 over 'tensor'; the tensor has 2"),
        ([("tensor", -1)], [], "divides dim -1"),
        ([("tensor", 0), ("tensor", 1)], [], "names axis 'tensor' twice"),
        ([("tensor", 0)], [("tensor", 1)], "names axis 'tensor' twice"),
        ([], [("pipeline", 2)], "allowed are 0 to 1"),
        ([], [("pipeline", -1)], "allowed are 0 to 1"),
    ],
)
def test_a_layout_that_does_not_fit(shards, at, said):
    with pytest.raises(ManifestError, match=said):
        ShardLayout(shards, at).check(MESH, (4, 4))


@pytest.mark.parametrize(
    "pairs", [[("tensor",)], [("tensor", 0, 0)], [("tensor", "0")], [(0, 0)], [("tensor", True)]]
)
def test_layouts_are_pairs(pairs):
    for fields in ({"shards": pairs}, {"at": pairs}):
        with pytest.raises(ManifestError, match="pairs of an axis and an integer"):
            ShardLayout(**fields)


def test_words_for_people():
    both = ShardLayout([("tensor", 0), ("data_shard", 0)])
    stage = ShardLayout([("tensor", 1)], [("pipeline", 1)])
    assert str(both) == "dim 0 over tensor, dim 0 over data_shard"
    assert str(stage) == "dim 1 over tensor, at pipeline 1"
    assert str(ShardLayout()) == "replicated"
    assert MESH.describe() == "pipeline 2 x data 2 x data_shard 3 x tensor 2"
    assert summary([both] * 310 + [None] * 29, MESH) == (
        "310 tensors sharded over data_shard 3 x tensor 2, 29 replicated"
    )
    assert summary([stage, ShardLayout(at=[("pipeline", 0)]), None], MESH) == (
        "1 tensor sharded over tensor 2 at pipeline 1, 1 replicated, 1 replicated at pipeline 0"
    )
    assert summary([ShardLayout([("context", 0)])], MESH) == "1 tensor replicated"
