"""The transfer plan: whatever the shards on both sides, each needed byte moves, once."""

from __future__ import annotations

import itertools

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallelkit.errors import ManifestError, NeedsError
from parallelkit.testing.shards import (
    arena_of,
    carry_out,
    random_manifest,
    random_needs,
    random_values,
    slices,
)
from parallelkit.weights.exports import ALIGNMENT
from parallelkit.weights.layout import Mesh, Region, ShardLayout
from parallelkit.weights.manifest import DTYPE_BYTES, Manifest, TensorSpec
from parallelkit.weights.needs import Needs
from parallelkit.weights.plan import BUCKET_BYTES, plan_transfer
from parallelkit.weights.regions import Span


def manifest_of(*rows, mesh=None):
    """Rows of dtype, shape and any other fields of a tensor."""
    return Manifest(
        (
            TensorSpec(name=f"t{i}", dtype=dtype, shape=shape, **(fields[0] if fields else {}))
            for i, (dtype, shape, *fields) in enumerate(rows)
        ),
        mesh,
    )


@st.composite
def cases(draw):
    """A manifest, what is kept of it, and the constants of a plan."""
    rng = draw(st.randoms(use_true_random=False))
    manifest = random_manifest(rng)
    constants = {
        "bucket_bytes": rng.choice((1, 7, 64, 257, 1000, 1 << 16, BUCKET_BYTES)),
        "alignment": rng.choice((1, 64, ALIGNMENT)),
    }
    return manifest, random_needs(rng, manifest), constants


@settings(max_examples=200, deadline=None)
@given(cases())
def test_every_needed_byte_is_placed_once_and_is_the_right_one(case):
    manifest, needs, constants = case
    plan = plan_transfer(manifest, needs, **constants)
    values = random_values(manifest)
    arenas = {r: arena_of(manifest, values, r, plan.alignment) for r in plan.ranks}
    placed, counts = carry_out(plan, arenas)
    needed = 0
    for i, value in enumerate(values):
        if needs[i] is None:
            assert placed[i] is None
            continue
        np.testing.assert_array_equal(placed[i], value[slices(needs[i])].reshape(-1))
        assert (counts[i] == 1).all()
        needed += len(placed[i])
    assert plan.nbytes == sum(bucket.nbytes for bucket in plan.buckets) == needed


@settings(max_examples=120, deadline=None)
@given(cases())
def test_a_rank_plans_its_own_buckets_as_the_member_does(case):
    manifest, needs, constants = case
    plan = plan_transfer(manifest, needs, **constants)
    moved = 0
    for rank in range(manifest.mesh.size):
        own = plan_transfer(manifest, needs, ranks=[rank], **constants)
        assert own.buckets == tuple(b for b in plan.buckets if b.rank == rank) == plan.of(rank)
        assert own.ranks == ((rank,) if own.buckets else ())
        assert own.digest == plan.digest
        moved += own.nbytes
    assert moved == plan.nbytes
    assert plan.ranks == tuple(dict.fromkeys(b.rank for b in plan.buckets))
    assert list(plan.ranks) == sorted(plan.ranks)
    half = [rank for rank in range(manifest.mesh.size) if rank % 2]
    some = plan_transfer(manifest, needs, ranks=half, **constants)
    assert some.buckets == tuple(b for b in plan.buckets if b.rank % 2)


@settings(max_examples=120, deadline=None)
@given(cases())
def test_buckets_hold_what_they_may(case):
    manifest, needs, constants = case
    plan = plan_transfer(manifest, needs, **constants)
    limit, unique = plan.bucket_bytes, manifest.unique
    for bucket in plan.buckets:
        assert bucket.pieces
        assert bucket.nbytes == sum(piece.source.nbytes for piece in bucket.pieces)
        for piece in bucket.pieces:
            itemsize = DTYPE_BYTES[unique[piece.tensor].dtype]
            assert piece.rank == bucket.rank
            assert piece.source.nbytes == piece.target.nbytes > 0
            assert piece.source.run % itemsize == piece.target.run % itemsize == 0
            assert piece.target.offset % itemsize == 0
        fusions = {unique[piece.tensor].fusion for piece in bucket.pieces}
        alone = len(bucket.pieces) == 1 or (len(fusions) == 1 and None not in fusions)
        assert bucket.nbytes <= limit or alone
        if bucket.nbytes > limit and None in fusions:
            assert bucket.nbytes == DTYPE_BYTES[unique[bucket.pieces[0].tensor].dtype]


@settings(max_examples=120, deadline=None)
@given(cases())
def test_a_fusion_group_is_in_one_bucket_of_each_rank(case):
    manifest, needs, constants = case
    plan = plan_transfer(manifest, needs, **constants)
    homes: dict[tuple[int, str], set[int]] = {}
    for number, bucket in enumerate(plan.buckets):
        for piece in bucket.pieces:
            fusion = manifest.unique[piece.tensor].fusion
            if fusion is not None:
                homes.setdefault((piece.rank, fusion), set()).add(number)
    assert all(len(numbers) == 1 for numbers in homes.values())


@settings(max_examples=100, deadline=None)
@given(cases())
def test_pieces_follow_the_manifest_and_buckets_are_filled(case):
    manifest, needs, constants = case
    bare = Manifest((attrs.evolve(t, fusion=None) for t in manifest.tensors), manifest.mesh)
    plan = plan_transfer(bare, needs, **constants)
    for rank in plan.ranks:
        buckets = plan.of(rank)
        pieces = [piece for bucket in buckets for piece in bucket.pieces]
        assert [p.tensor for p in pieces] == sorted(p.tensor for p in pieces)
        for one, other in itertools.pairwise(buckets):
            assert one.nbytes + other.pieces[0].source.nbytes > plan.bucket_bytes


@settings(deadline=None)
@given(cases())
def test_a_plan_is_a_function_of_values(case):
    manifest, needs, constants = case
    copies = [attrs.evolve(t, layout=t.layout and attrs.evolve(t.layout)) for t in manifest.tensors]
    again = plan_transfer(
        Manifest(copies, manifest.mesh),
        Needs.from_wire(manifest, *needs.to_wire()),
        **constants,
    )
    plan = plan_transfer(manifest, needs, **constants)
    assert again.buckets == plan.buckets
    assert again.digest == plan.digest
    assert len(plan.digest) == 16


def told(plan):
    """All buckets, with what their pieces are."""
    return tuple(
        (b.rank, tuple((p.tensor, p.rank, p.source, p.target) for p in b.pieces), b.nbytes)
        for b in plan.buckets
    )


def test_a_replicated_model_is_the_arena_of_rank_0():
    manifest = manifest_of(("uint8", (100,)), ("uint8", (2500,)), ("uint8", ()), ("uint8", (0,)))
    plan = plan_transfer(manifest, bucket_bytes=1024)
    assert told(plan) == (
        (0, ((0, 0, Span(0, 100), Span(0, 100)),), 100),
        (0, ((1, 0, Span(256, 1024), Span(0, 1024)),), 1024),
        (0, ((1, 0, Span(1280, 1024), Span(1024, 1024)),), 1024),
        (
            0,
            (
                (1, 0, Span(2304, 452), Span(2048, 452)),
                (2, 0, Span(2816, 1), Span(0, 1)),
            ),
            453,
        ),
    )
    assert plan.names_in(plan.buckets[3]) == ["t1", "t2"]
    assert plan.describe() == "0.0 MB of 0.0 MB from rank 0"


def test_a_column_shard_of_row_shards_is_strided_at_the_source_and_in_runs_at_the_target():
    mesh = Mesh(("data_shard",), (2,))
    manifest = manifest_of(
        ("float32", (4, 6), {"layout": ShardLayout([("data_shard", 0)])}), mesh=mesh
    )
    needs = Needs.sharded(manifest, [ShardLayout([("tensor", 1)])], Mesh(("tensor",), (3,)), 1)
    plan = plan_transfer(manifest, needs)
    assert told(plan) == (
        (0, ((0, 0, Span(8, 8, ((2, 24),)), Span(0, 16)),), 16),
        (1, ((0, 1, Span(8, 8, ((2, 24),)), Span(16, 16)),), 16),
    )
    assert plan.describe() == "0.0 MB of 0.0 MB from 2 ranks"


def test_a_large_piece_is_cut_along_its_slowest_dims():
    manifest = manifest_of(("float32", (4, 6)))
    needs = Needs.of(manifest, [Region((0, 1), (4, 5))])
    assert told(plan_transfer(manifest, needs, bucket_bytes=40)) == (
        (0, ((0, 0, Span(4, 20, ((2, 24),)), Span(0, 40)),), 40),
        (0, ((0, 0, Span(52, 20, ((2, 24),)), Span(40, 40)),), 40),
    )
    # Rows larger than the limit are cut themselves, and elements never.
    buckets = plan_transfer(manifest, needs, bucket_bytes=13).buckets
    assert [b.nbytes for b in buckets] == [12, 8] * 4
    assert {b.nbytes for b in plan_transfer(manifest, needs, bucket_bytes=3).buckets} == {4}


def test_fused_tensors_come_together_where_the_first_is():
    fused = {"fusion": "qkv"}
    manifest = manifest_of(
        ("int8", (10,)),
        ("int8", (30,), fused),
        ("int8", (20,)),
        ("int8", (30,), fused),
        ("int8", (5,), fused),
        ("int8", (10,), {"fusion": "other"}),
    )
    plan = plan_transfer(manifest, bucket_bytes=40)
    tensors = [[piece.tensor for piece in bucket.pieces] for bucket in plan.buckets]
    assert tensors == [[0], [1, 3, 4], [2, 5]]
    assert [bucket.nbytes for bucket in plan.buckets] == [10, 65, 30]


def test_names_are_those_of_owners_each_once():
    w = TensorSpec(name="w", dtype="int8", shape=(4, 4))
    rows = [w, attrs.evolve(w, name="tied", alias_of="w")]
    rows.append(TensorSpec(name="none", dtype="int8", shape=(0,)))
    rows.append(TensorSpec(name="last", dtype="int8", shape=(4,)))
    plan = plan_transfer(Manifest(rows))
    assert [plan.names_in(bucket) for bucket in plan.buckets] == [["w", "last"]]
    assert plan.nbytes == 20


def test_the_digest_differs_by_manifest_needs_and_constants():
    rows = [("float32", (10,)), ("float32", (20,))]
    manifest = manifest_of(*rows)
    layout = {"layout": ShardLayout([("tensor", 0)])}
    two, three = Mesh(("tensor",), (2,)), Mesh(("tensor",), (3,))
    box, other = Region((0,), (5,)), Region((5,), (5,))
    plans = [
        plan_transfer(manifest),
        plan_transfer(manifest, alignment=512),
        plan_transfer(manifest, bucket_bytes=1 << 20),
        plan_transfer(manifest_of(*rows[::-1])),
        plan_transfer(manifest_of(("int32", (10,)), rows[1])),
        plan_transfer(manifest_of(("float32", (2, 5)), rows[1])),
        plan_transfer(manifest_of((*rows[0], {"fusion": "a"}), rows[1])),
        plan_transfer(manifest_of((*rows[0], {"fusion": "b"}), rows[1])),
        plan_transfer(manifest_of(*rows, mesh=two)),
        plan_transfer(manifest_of((*rows[0], layout), rows[1], mesh=two)),
        plan_transfer(manifest_of((*rows[0], layout), rows[1], mesh=three)),
        plan_transfer(manifest, Needs.of(manifest, [box, None])),
        plan_transfer(manifest, Needs.of(manifest, [None, box])),
        plan_transfer(manifest, Needs.of(manifest, [other, None])),
        plan_transfer(manifest, Needs.of(manifest, [None, None])),
    ]
    assert len({plan.digest for plan in plans}) == len(plans)


def test_nothing_kept_moves_nothing():
    manifest = manifest_of(("float32", (10,)))
    plan = plan_transfer(manifest, Needs.of(manifest, [None]))
    assert (plan.buckets, plan.ranks, plan.nbytes) == ((), (), 0)
    assert plan_transfer(manifest, ranks=[]).buckets == ()


def test_what_cannot_be_planned():
    with pytest.raises(ManifestError, match="the manifest is empty"):
        plan_transfer(Manifest([]))
    manifest = manifest_of(("int8", (4,)), mesh=Mesh(("data",), (2,)))
    with pytest.raises(ManifestError, match="rank 2 is not one of the publisher's; .* 0 to 1"):
        plan_transfer(manifest, ranks=[0, 2])
    with pytest.raises(NeedsError, match="regions for 2 tensors; the manifest has 1"):
        plan_transfer(manifest, Needs.whole(manifest_of(("int8", (4,)), ("int8", (4,)))))
    with pytest.raises(NeedsError, match="'t0' a box is kept"):
        plan_transfer(manifest, Needs.whole(manifest_of(("int8", (5,)))))


def test_pieces_follow_what_is_asked_for_not_ranks_times_tensors():
    """Of 100,000 tensors over 1,024 ranks, one member's 1/1,024 is one piece a tensor."""
    mesh, layout = Mesh(("data_shard",), (1024,)), ShardLayout([("data_shard", 0)])
    rows = [("bfloat16", (2048 + 1024 * (i % 3), 2), {"layout": layout}) for i in range(100_000)]
    manifest = manifest_of(*rows, mesh=mesh)
    needs = Needs.sharded(manifest, [layout] * len(rows), mesh, 517)
    plan = plan_transfer(manifest, needs)
    assert plan.ranks == (517,)
    assert sum(len(bucket.pieces) for bucket in plan.buckets) == len(rows)
    assert plan.nbytes == sum((2 + i % 3) * 4 for i in range(len(rows)))
    assert all(bucket.nbytes <= BUCKET_BYTES for bucket in plan.buckets)
    assert plan_transfer(manifest, needs, ranks=[516, 518]).buckets == ()
