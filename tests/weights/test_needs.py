"""What a member keeps: the same however it is said, and always inside the tensors."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallelkit.errors import NeedsError, WeightTransferError
from parallelkit.weights.layout import Mesh, Region, ShardLayout, region
from parallelkit.weights.manifest import Manifest, TensorSpec
from parallelkit.weights.needs import Needs
from parallelkit.weights.regions import whole

SHAPES = [(4, 6), (4, 6), (3,), (), (0, 2), (4, 6)]


def manifest_of(shapes=SHAPES):
    rows = [TensorSpec(name=f"t{i}", dtype="int8", shape=shape) for i, shape in enumerate(shapes)]
    return Manifest([*rows, attrs.evolve(rows[0], name="tied", alias_of="t0")])


MANIFEST = manifest_of()
PARTS = [
    st.sampled_from([None, whole(shape), Region((0,) * len(shape), (0,) * len(shape))])
    for shape in SHAPES
]


@settings(deadline=None)
@given(st.tuples(*PARTS))
def test_what_was_said_is_what_is_kept(regions):
    needs = Needs.of(MANIFEST, regions)
    assert len(needs) == len(SHAPES)
    assert [needs[i] for i in range(len(SHAPES))] == list(regions)
    assert len(set(needs.regions)) == len(needs.regions)
    assert set(needs.regions) == {r for r in regions if r is not None}


@settings(deadline=None)
@given(st.tuples(*PARTS), st.data())
def test_needs_are_equal_however_the_table_is_written(regions, data):
    needs = Needs.of(MANIFEST, regions)
    # Any order, entries twice, entries that nothing refers to.
    table = [*needs.regions, *needs.regions, Region((1,), (1,))]
    table = data.draw(st.permutations(table))
    which = [
        None
        if r is None
        else data.draw(st.sampled_from([i for i, t in enumerate(table) if t == r]))
        for r in regions
    ]
    rows = [(list(r.offsets), list(r.sizes)) for r in table]
    again = Needs.from_wire(MANIFEST, rows, which)
    assert again == needs
    assert hash(again) == hash(needs)
    assert again.digest == needs.digest
    assert again.regions == needs.regions
    np.testing.assert_array_equal(again.which, needs.which)
    assert again.to_wire() == needs.to_wire()
    assert Needs.from_wire(MANIFEST, *needs.to_wire()) == needs


@settings(deadline=None)
@given(st.tuples(*PARTS), st.tuples(*PARTS))
def test_digests_differ_where_needs_do(one, other):
    first, second = Needs.of(MANIFEST, one), Needs.of(MANIFEST, other)
    assert (first == second) == (first.digest == second.digest) == (one == other)


def test_whole_is_every_tensor_and_each_shape_once():
    needs = Needs.whole(MANIFEST)
    assert [needs[i] for i in range(len(needs))] == [whole(shape) for shape in SHAPES]
    assert needs.regions == (whole((4, 6)), whole((3,)), whole(()), whole((0, 2)))
    assert needs.which.tolist() == [0, 0, 1, 2, 3, 0]
    assert needs == Needs.of(MANIFEST, map(whole, SHAPES))
    assert needs != Needs.of(MANIFEST, [None] * len(SHAPES))
    assert needs != "needs"


def test_the_numbers_cannot_be_changed():
    with pytest.raises(ValueError, match="read-only"):
        Needs.whole(MANIFEST).which[0] = 1


@pytest.mark.parametrize("rank", range(6))
def test_shards_of_another_mesh(rank):
    mesh = Mesh(("data", "tensor"), (2, 3))
    layouts = [
        ShardLayout([("tensor", 0)]),
        ShardLayout([("tensor", 1), ("data", 0)]),
        ShardLayout([("tensor", 0)], [("data", 1)]),
        None,
        ShardLayout(),
        ShardLayout([("tensor", 0)]),
    ]
    needs = Needs.sharded(MANIFEST, layouts, mesh, rank)
    assert [needs[i] for i in range(len(needs))] == [
        whole(shape) if layout is None else region(layout, mesh, shape, rank)
        for layout, shape in zip(layouts, SHAPES, strict=True)
    ]


@pytest.mark.parametrize(
    ("layouts", "rank", "said"),
    [
        ([None] * 5, 0, "one layout for each unique tensor"),
        ([None] * 6, 2, "a rank of the mesh"),
        ([None] * 6, -1, "a rank of the mesh"),
        ([ShardLayout([("data", 0)])] + [None] * 5, 0, "tensor 't0': the mesh has no axis 'data'"),
        ([None] * 3 + [ShardLayout([("tensor", 0)])] + [None] * 2, 0, "tensor 't3': .* 0 dim"),
    ],
)
def test_shards_that_do_not_fit(layouts, rank, said):
    with pytest.raises(NeedsError, match=said):
        Needs.sharded(MANIFEST, layouts, Mesh(("tensor",), (2,)), rank)


@pytest.mark.parametrize(
    "box",
    [
        Region((0, 0), (5, 6)),
        Region((1, 0), (4, 6)),
        Region((-1, 0), (2, 6)),
        Region((0, 0), (-1, 6)),
        Region((0,), (4,)),
        Region((), ()),
        Region((0, 0), (4, 6, 1)),
        Region((0, 0, 0), (4, 6)),
        Region((0, 1 << 70), (4, 1 << 70)),
    ],
    ids=str,
)
def test_a_region_outside_its_tensor_is_refused_by_name(box):
    others = [whole(shape) for shape in SHAPES[:-1]]
    with pytest.raises(NeedsError, match=r"of tensor 't5' .* not inside its shape \[4, 6\]"):
        Needs.of(MANIFEST, [*others, box])
    rows = [(list(r.offsets), list(r.sizes)) for r in (*others, box)]
    with pytest.raises(NeedsError, match="of tensor 't5'"):
        Needs.from_wire(MANIFEST, rows, list(range(6)))


@pytest.mark.parametrize("count", [0, 5, 7])
def test_there_is_one_for_each_unique_tensor(count):
    with pytest.raises(NeedsError, match=f"regions for {count} tensors; the manifest has 6"):
        Needs.of(MANIFEST, [None] * count)
    with pytest.raises(NeedsError, match=f"regions for {count} tensors"):
        Needs.from_wire(MANIFEST, [], [None] * count)


@pytest.mark.parametrize(
    ("rows", "which", "said"),
    [
        ([], [0] + [None] * 5, "none of the 0 given"),
        ([([0, 0], [4, 6])], [1] + [None] * 5, "none of the 1 given"),
        ([([0, 0], [4, 6])], [-1] + [None] * 5, "none of the 1 given"),
        ([([0, 0], [4, 6])], [True] + [None] * 5, "none of the 1 given"),
        ([([0, 0], [4, 6])], [1 << 40] + [None] * 5, "none of the 1 given"),
        ([([0, 0],)], [None] * 6, "region 0 is"),
        ([([0, 0.0], [4, 6])], [None] * 6, "region 0 is"),
        ([([0, "0"], [4, 6])], [None] * 6, "region 0 is"),
        ([([0, True], [4, 6])], [None] * 6, "region 0 is"),
    ],
)
def test_a_table_from_the_wire_is_checked(rows, which, said):
    with pytest.raises(NeedsError, match=said):
        Needs.from_wire(MANIFEST, rows, which)


def test_a_table_from_the_wire_is_counted_before_it_is_read():
    with pytest.raises(NeedsError, match="1000 regions for 6 tensors"):
        Needs.from_wire(MANIFEST, [None] * 1000, [0] * 6)


def test_the_error_is_one_of_weight_transfer_and_short():
    assert issubclass(NeedsError, WeightTransferError)
    huge = Region((0,) * 10**5, (1,) * 10**5)
    with pytest.raises(NeedsError) as caught:
        Needs.of(MANIFEST, [huge] + [None] * 5)
    assert len(str(caught.value)) < 800


def test_classes_are_combinations_of_kind_and_region_by_first_use():
    regions = [whole((4, 6)), Region((0, 0), (1, 6)), None, whole(()), None, whole((4, 6))]
    needs = Needs.of(MANIFEST, regions)
    assert needs.pairs(MANIFEST) == [(0, 0, 0), (1, 0, 1), (2, 1, -1), (3, 2, 2), (4, 3, -1)]
    assert needs.classes(MANIFEST).tolist() == [0, 1, 2, 3, 4, 0]
