"""Exports: each rank lays out exactly the parts that it hands out."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallelkit.errors import ManifestError
from parallelkit.testing.shards import random_manifest
from parallelkit.weights.exports import ALIGNMENT, Part, export
from parallelkit.weights.layout import Mesh, Region, ShardLayout, owners
from parallelkit.weights.manifest import DTYPE_BYTES, Manifest, TensorSpec

MANIFESTS = st.randoms(use_true_random=False).map(random_manifest)
ALIGNMENTS = st.sampled_from([1, 64, ALIGNMENT])


def replicated(*rows):
    return Manifest(
        TensorSpec(name=f"t{i}", dtype=dtype, shape=shape) for i, (dtype, shape) in enumerate(rows)
    )


@settings(deadline=None)
@given(MANIFESTS, ALIGNMENTS)
def test_parts_are_what_owners_says_of_every_tensor(manifest, alignment):
    expected = {
        (rank, i, box)
        for i, t in enumerate(manifest.unique)
        for rank, box in owners(t.layout, manifest.mesh, t.shape)
    }
    found = [
        (rank, part.tensor, part.region)
        for rank in range(manifest.mesh.size)
        for part in export(manifest, rank, alignment=alignment).parts()
    ]
    assert len(found) == len(set(found))
    assert set(found) == expected


@settings(deadline=None)
@given(MANIFESTS, ALIGNMENTS)
def test_parts_are_aligned_in_order_and_do_not_overlap(manifest, alignment):
    for rank in range(manifest.mesh.size):
        made = export(manifest, rank, alignment=alignment)
        parts, end = made.parts(), 0
        assert [p.tensor for p in parts] == sorted({p.tensor for p in parts})
        for part in parts:
            itemsize = DTYPE_BYTES[manifest.unique[part.tensor].dtype]
            assert part.nbytes == part.region.elements * itemsize > 0
            assert part.offset % alignment == 0
            assert end <= part.offset < end + alignment
            assert made.offset(part.tensor) == part.offset
            end = part.offset + part.nbytes
        assert made.nbytes % alignment == 0
        assert end <= made.nbytes < end + alignment
        assert (made.rank, made.manifest) == (rank, manifest)


@pytest.mark.parametrize(
    ("rows", "offsets", "nbytes"),
    [
        ([("bfloat16", (1,)), ("float32", (2,))], [0, 256], 512),
        ([("uint8", (3,)), ("bfloat16", (4,))], [0, 256], 512),
        ([("float64", ()), ("float32", (7,))], [0, 256], 512),
        ([("uint8", (256,)), ("uint8", (257,)), ("bool", ())], [0, 256, 768], 1024),
        ([("int8", (0, 4)), ("float32", (1,)), ("int8", (0,))], [0], 256),
        ([("int8", (0,))], [], 0),
    ],
    ids=["bf16-f32", "u8-bf16", "scalar-f32", "edges", "empty-among", "only-empty"],
)
def test_layouts_that_went_wrong_elsewhere(rows, offsets, nbytes):
    made = export(replicated(*rows), 0)
    assert [part.offset for part in made.parts()] == offsets
    assert made.nbytes == nbytes


def test_of_a_replicated_model_rank_0_hands_out_everything_and_others_nothing():
    manifest = replicated(("float32", (3, 5)), ("bfloat16", (7,)))
    assert export(manifest, 0).parts() == [
        Part(0, Region((0, 0), (3, 5)), 0, 60),
        Part(1, Region((0,), (7,)), 256, 14),
    ]
    assert (export(manifest, 5).nbytes, export(manifest, 5).parts()) == (0, [])


def test_an_alias_is_no_part():
    w = TensorSpec(name="w", dtype="int8", shape=(4,))
    last = TensorSpec(name="last", dtype="int8", shape=(4,))
    manifest = Manifest([w, attrs.evolve(w, name="tied", alias_of="w"), last])
    assert [(p.tensor, p.offset) for p in export(manifest, 0).parts()] == [(0, 0), (1, ALIGNMENT)]


def test_asking_for_a_part_that_a_rank_does_not_hand_out():
    mesh = Mesh(("pipeline",), (2,))
    rows = [
        TensorSpec(name=f"t{i}", dtype="int8", shape=(4,), layout=ShardLayout(at=[("pipeline", i)]))
        for i in range(2)
    ]
    made = export(Manifest(rows, mesh), 1)
    assert made.offset(1) == 0
    with pytest.raises(ManifestError, match="rank 1 hands out nothing of 't0'"):
        made.offset(0)


@pytest.mark.parametrize(("mesh", "rank"), [(Mesh(("data",), (4,)), 4), (None, -1)])
def test_a_rank_that_there_is_not(mesh, rank):
    rows = [TensorSpec(name="w", dtype="int8", shape=(4,))]
    with pytest.raises(ManifestError, match=f"rank {rank} is not one of the publisher's"):
        export(Manifest(rows, mesh), rank)


def test_a_hundred_thousand_tensors_of_uneven_shards():
    mesh, layout = Mesh(("data_shard",), (1024,)), ShardLayout([("data_shard", 0)])
    manifest = Manifest(
        (
            TensorSpec(name=f"t{i}", dtype="bfloat16", shape=(1500 + i % 7, 3), layout=layout)
            for i in range(100_000)
        ),
        mesh,
    )
    made = export(manifest, 700)
    rows = np.array([max(0, min(2, 1500 + i % 7 - 1400)) for i in range(100_000)])
    assert sum(part.nbytes for part in made.parts()) == rows.sum() * 6
    assert made.nbytes == np.count_nonzero(rows) * ALIGNMENT
