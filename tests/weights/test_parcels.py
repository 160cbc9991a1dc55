"""What ranks send to rank 0: everything once, packed, and put where it belongs."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallelkit.weights.layout import Mesh, Region, ShardLayout
from parallelkit.weights.manifest import DTYPE_BYTES, Manifest, TensorSpec
from parallelkit.weights.parcels import inbound, parcels, place, span, split_bytes, window

AXES = ("pipeline", "data", "data_shard", "tensor")


@st.composite
def manifests(draw):
    degrees = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    mesh = Mesh(AXES[: len(degrees)], degrees)
    specs = []
    for number in range(draw(st.integers(1, 5))):
        shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
        axes = draw(st.permutations(mesh.axes))
        named = axes[: draw(st.integers(0, len(axes)))]
        split = draw(st.integers(0, len(named))) if shape else 0
        shards = [(axis, draw(st.integers(0, len(shape) - 1))) for axis in named[:split]]
        at = [(axis, draw(st.integers(0, mesh.degree(axis) - 1))) for axis in named[split:]]
        specs.append(
            TensorSpec(
                name=f"w{number}",
                dtype=draw(st.sampled_from(["int8", "bfloat16", "float32", "complex128"])),
                shape=shape,
                layout=ShardLayout(shards, at) if named else None,
            )
        )
    return Manifest(specs, mesh)


def cut(whole, spec, box):
    """A box's bytes by numpy's own indexing."""
    item = DTYPE_BYTES[spec.dtype]
    inside = tuple(slice(low, low + n) for low, n in zip(*box, strict=True))
    return whole.reshape(*spec.shape, item)[inside].reshape(-1)


@settings(max_examples=150, deadline=None)
@given(manifests(), st.integers(1, 100))
def test_whole_tensors_come_together_from_parcels(manifest, limit):
    rng = np.random.default_rng(0)
    sources = [rng.integers(0, 256, spec.nbytes, np.uint8) for spec in manifest.unique]
    targets = [np.zeros(spec.nbytes, np.uint8) for spec in manifest.unique]
    written = [np.zeros(spec.nbytes, np.uint8) for spec in manifest.unique]
    here = sum(parcel.nbytes for parcel in parcels(manifest, 0))
    arrived = list(inbound(manifest, limit))
    for parcel in itertools.chain(parcels(manifest, 0), arrived):
        for part in parcel.parts:
            spec = manifest.unique[part.tensor]
            data = cut(sources[part.tensor], spec, part.region)
            assert len(data) == part.nbytes > 0
            place(targets[part.tensor], spec, part.region, np.ascontiguousarray(data))
            ones = np.ones(part.nbytes, np.uint8)
            add = np.zeros_like(written[part.tensor])
            place(add, spec, part.region, ones)
            written[part.tensor] += add
    for source, target, count in zip(sources, targets, written, strict=True):
        np.testing.assert_array_equal(source, target)
        assert (count == 1).all()
    assert split_bytes(manifest) == (here, sum(parcel.nbytes for parcel in arrived))


@settings(max_examples=150, deadline=None)
@given(manifests(), st.integers(1, 100))
def test_rank_0_asks_each_rank_in_the_order_in_which_it_sends(manifest, limit):
    asked = list(inbound(manifest, limit))
    for rank in range(1, manifest.mesh.size):
        assert [p for p in asked if p.rank == rank] == list(parcels(manifest, rank, limit))
    firsts = [parcel.parts[0].tensor for parcel in asked]
    assert firsts == sorted(firsts)
    assert all(p.nbytes <= limit or len(p.parts) == 1 for p in asked)


def test_small_parts_share_a_message_and_large_ones_do_not():
    mesh = Mesh(("tensor",), (2,))
    cut_rows = ShardLayout([("tensor", 0)])
    sizes = (10, 20, 1000, 10, 10)
    manifest = Manifest(
        [
            TensorSpec(name=f"w{i}", dtype="uint8", shape=(2 * n,), layout=cut_rows)
            for i, n in enumerate(sizes)
        ],
        mesh,
    )
    found = list(parcels(manifest, 1, 100))
    assert [[part.tensor for part in parcel.parts] for parcel in found] == [[0, 1], [2], [3, 4]]
    assert [parcel.nbytes for parcel in found] == [30, 1000, 20]


def test_without_layouts_rank_0_has_everything():
    manifest = Manifest([TensorSpec(name="w", dtype="float32", shape=(3,))])
    assert [p.nbytes for p in parcels(manifest, 0)] == [12]
    assert list(inbound(manifest)) == []
    assert split_bytes(manifest) == (12, 0)


@pytest.mark.parametrize(
    ("offsets", "sizes", "shape", "expected"),
    [
        ((), (), (), (0, 1)),
        ((2,), (3,), (9,), (2, 3)),
        ((2, 0), (2, 5), (8, 5), (10, 10)),
        ((2, 1), (1, 3), (8, 5), (11, 3)),
        ((0, 1), (8, 2), (8, 5), None),
        ((1, 2, 0), (1, 2, 4), (3, 8, 4), (40, 8)),
        ((0, 2, 0), (2, 2, 4), (3, 8, 4), None),
        ((0, 0, 0), (3, 8, 4), (3, 8, 4), (0, 96)),
        ((0, 0, 1), (1, 1, 1), (1, 1, 4), (1, 1)),
    ],
)
def test_a_box_that_is_one_run(offsets, sizes, shape, expected):
    box = Region(offsets, sizes)
    assert span(box, shape) == expected
    spec = TensorSpec(name="w", dtype="int16", shape=shape)
    whole = np.arange(spec.nbytes, dtype=np.uint8)
    run = window(whole, spec, box)
    assert (run is None) == (expected is None)
    if run is not None:
        np.testing.assert_array_equal(run, cut(whole, spec, box))
        assert np.shares_memory(run, whole)
