"""The transfer plan: properties of the layout, whatever the manifest."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallelkit.errors import ManifestError
from parallelkit.weights.manifest import DTYPE_BYTES, Manifest, TensorSpec
from parallelkit.weights.plan import ALIGNMENT, BLOCK_BYTES, Piece, plan_transfer


def manifest_of(*rows):
    return Manifest(
        TensorSpec(name=f"t{i}", dtype=dtype, shape=shape) for i, (dtype, shape) in enumerate(rows)
    )


@st.composite
def manifests(draw):
    """Tensors of any dtype, scalars and empty ones among them, some tied to an earlier one."""
    shapes = st.lists(st.integers(0, 12), max_size=3)
    rows = draw(
        st.lists(
            st.tuples(st.sampled_from(sorted(DTYPE_BYTES)), shapes, st.integers(-3, 10)),
            min_size=1,
            max_size=12,
        )
    )
    specs = []
    for i, (dtype, shape, alias) in enumerate(rows):
        owners = [s for s in specs if s.alias_of is None]
        if 0 <= alias < len(owners):
            specs.append(attrs.evolve(owners[alias], name=f"t{i}", alias_of=owners[alias].name))
        else:
            specs.append(TensorSpec(name=f"t{i}", dtype=dtype, shape=shape))
    return Manifest(specs)


BLOCKS = st.sampled_from([7, 256, 257, 1000, 4096, 1 << 16, BLOCK_BYTES])


def covered(plan):
    """For each unique tensor, its bytes in the order in which the blocks list them."""
    runs = [[] for _ in plan.sizes]
    for block in range(plan.blocks):
        for piece in plan.pieces(block):
            runs[piece.tensor].append((piece.start, piece.nbytes))
    return runs


@settings(deadline=None)
@given(manifests())
def test_tensors_are_aligned_in_order_and_do_not_overlap(manifest):
    plan = plan_transfer(manifest)
    assert plan.sizes == tuple(t.nbytes for t in manifest.unique)
    assert all(offset % 256 == 0 for offset in plan.offsets)
    ends = [offset + size for offset, size in zip(plan.offsets, plan.sizes, strict=True)]
    assert all(end <= offset for end, offset in zip(ends, plan.offsets[1:], strict=False))
    assert ends[-1] <= plan.nbytes
    assert plan.nbytes % ALIGNMENT == 0
    assert plan.nbytes >= ALIGNMENT
    assert plan.nbytes <= sum(plan.sizes) + ALIGNMENT * len(plan.sizes)


@settings(deadline=None)
@given(manifests(), BLOCKS)
def test_the_blocks_cover_every_tensor_exactly_once_and_in_order(manifest, block_bytes):
    plan = plan_transfer(manifest, block_bytes=block_bytes)
    for size, runs in zip(plan.sizes, covered(plan), strict=True):
        end = 0
        for start, nbytes in runs:
            assert start == end
            assert nbytes > 0
            end = start + nbytes
        assert end == size


@settings(deadline=None)
@given(manifests(), BLOCKS)
def test_pieces_stay_in_their_block_and_ascend(manifest, block_bytes):
    plan = plan_transfer(manifest, block_bytes=block_bytes)
    end = 0
    for block in range(plan.blocks):
        start, stop = plan.block_span(block)
        assert start == block * block_bytes
        assert start < stop <= plan.nbytes
        for piece in plan.pieces(block):
            assert max(end, start) <= piece.offset
            assert piece.offset == plan.offsets[piece.tensor] + piece.start
            end = piece.offset + piece.nbytes
            assert end <= stop
    assert plan.block_span(plan.blocks - 1)[1] == plan.nbytes


@settings(deadline=None)
@given(manifests())
def test_a_plan_is_a_function_of_its_manifest(manifest):
    again = Manifest(attrs.evolve(t) for t in manifest.tensors)
    assert plan_transfer(manifest) == plan_transfer(again)
    assert plan_transfer(manifest).digest == plan_transfer(again).digest


@pytest.mark.parametrize(
    ("rows", "offsets", "nbytes"),
    [
        ([("bfloat16", (1,)), ("float32", (2,))], (0, 256), 512),
        ([("uint8", (3,)), ("bfloat16", (4,))], (0, 256), 512),
        ([("float64", ()), ("float32", (7,))], (0, 256), 512),
        ([("uint8", (256,)), ("uint8", (257,)), ("bool", ())], (0, 256, 768), 1024),
        ([("int8", (0, 4)), ("float32", (1,)), ("int8", (0,))], (0, 0, 256), 256),
        ([("int8", (0,))], (0,), 256),
    ],
    ids=["bf16-f32", "u8-bf16", "scalar-f32", "edges", "empty-among", "only-empty"],
)
def test_layouts_that_went_wrong_elsewhere(rows, offsets, nbytes):
    plan = plan_transfer(manifest_of(*rows))
    assert plan.offsets == offsets
    assert plan.nbytes == nbytes


def test_a_tensor_larger_than_a_block_is_split():
    plan = plan_transfer(manifest_of(("uint8", (100,)), ("uint8", (2500,))), block_bytes=1024)
    assert plan.blocks == 3
    assert list(plan.pieces(0)) == [Piece(0, 0, 0, 100), Piece(1, 0, 256, 768)]
    assert list(plan.pieces(1)) == [Piece(1, 768, 1024, 1024)]
    assert list(plan.pieces(2)) == [Piece(1, 1792, 2048, 708)]
    assert plan.names_in(0) == ["t0", "t1"]
    assert plan.names_in(2) == ["t1"]


def test_names_skip_aliases_and_empty_tensors():
    w = TensorSpec(name="w", dtype="int8", shape=(4,))
    rows = [w, attrs.evolve(w, name="tied", alias_of="w")]
    rows.append(TensorSpec(name="none", dtype="int8", shape=(0,)))
    rows.append(TensorSpec(name="last", dtype="int8", shape=(4,)))
    plan = plan_transfer(Manifest(rows))
    assert plan.names_in(0) == ["w", "last"]


def test_the_digest_differs_by_manifest_and_by_layout():
    rows = [("float32", (10,)), ("float32", (20,))]
    manifest = manifest_of(*rows)
    plans = [
        plan_transfer(manifest),
        plan_transfer(manifest, alignment=512),
        plan_transfer(manifest, block_bytes=1 << 20),
        plan_transfer(manifest_of(*rows[::-1])),
        plan_transfer(manifest_of(("int32", (10,)), ("float32", (20,)))),
        plan_transfer(manifest_of(("float32", (2, 5)), ("float32", (20,)))),
    ]
    assert len({plan.digest for plan in plans}) == len(plans)
    assert {len(plan.digest) for plan in plans} == {16}


def test_nothing_to_move_is_an_error():
    with pytest.raises(ManifestError, match="the manifest is empty"):
        plan_transfer(Manifest([]))


def test_a_hundred_thousand_tensors():
    manifest = manifest_of(*[("bfloat16", (i % 700,)) for i in range(100_000)])
    plan = plan_transfer(manifest)
    assert len(plan.offsets) == 100_000
    assert len(plan.digest) == 16
    pieces = [p for block in range(plan.blocks) for p in plan.pieces(block)]
    assert sum(p.nbytes for p in pieces) == manifest.nbytes
