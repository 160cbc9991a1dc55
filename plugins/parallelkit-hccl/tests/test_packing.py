"""Which tensors share a buffer: nothing lost, nothing cut, and the bytes do not depend on it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parallelkit_hccl.errors import HcclArgumentError
from parallelkit_hccl.packing import (
    BUFFER_BYTES,
    BUFFERS,
    Chunk,
    Packing,
    Piece,
    misaligned,
    plan_chunks,
    staging_bytes,
)

from parallelkit.weights.manifest import DTYPE_BYTES, TensorSpec

sizes_of_tensors = st.lists(st.integers(0, 300), max_size=60)
buffer_sizes = st.integers(1, 400)


def theirs(sizes: list[int], limit: int) -> list[list[int]]:
    """vllm-ascend's rule, as its two loops have it: take until the buffer exceeds its size."""
    buffers, left, done = [], iter(sizes), False
    while not done:
        taken: list[int] = []
        while True:
            size = next(left, None)
            if size is None:
                done = True
                break
            taken.append(size)
            if sum(taken) > limit:
                break
        if not taken:
            break
        buffers.append(taken)
    return buffers


@given(sizes_of_tensors, buffer_sizes)
def test_the_rule_is_vllm_ascends(sizes, limit):
    ours = [[piece.nbytes for piece in chunk.pieces] for chunk in plan_chunks(sizes, limit)]
    assert ours == theirs(sizes, limit)


@given(sizes_of_tensors, buffer_sizes)
def test_every_tensor_once_in_order_without_gaps(sizes, limit):
    chunks = plan_chunks(sizes, limit)
    pieces = [piece for chunk in chunks for piece in chunk.pieces]
    assert [(p.index, p.nbytes) for p in pieces] == list(enumerate(sizes))
    for chunk in chunks:
        end = 0
        for piece in chunk.pieces:
            assert piece.offset == end
            end += piece.nbytes
        assert end == chunk.nbytes


@given(sizes_of_tensors, buffer_sizes)
def test_a_buffer_exceeds_its_size_by_its_last_tensor_only(sizes, limit):
    chunks = plan_chunks(sizes, limit)
    for chunk in chunks:
        assert chunk.nbytes - chunk.pieces[-1].nbytes <= limit
    assert all(chunk.nbytes > limit for chunk in chunks[:-1])
    assert staging_bytes(chunks) <= limit + max(sizes, default=0)


@settings(max_examples=60)
@given(st.lists(st.binary(max_size=40), max_size=20), buffer_sizes, buffer_sizes)
def test_what_arrives_does_not_depend_on_the_buffer(tensors, one, other):
    def through(limit: int) -> list[bytes]:
        arrived = []
        for chunk in plan_chunks([len(t) for t in tensors], limit):
            buffer = bytearray(chunk.nbytes)
            for p in chunk.pieces:
                buffer[p.offset : p.offset + p.nbytes] = tensors[p.index]
            arrived += [bytes(buffer[p.offset : p.offset + p.nbytes]) for p in chunk.pieces]
        return arrived

    assert through(one) == through(other) == tensors


def test_a_tensor_larger_than_the_buffer_ends_the_buffer_it_is_in():
    assert plan_chunks([10, 500, 10], 100) == (
        Chunk((Piece(0, 0, 10), Piece(1, 10, 500)), 510),
        Chunk((Piece(2, 0, 10),), 10),
    )


def test_a_buffer_that_is_just_full_takes_one_more():
    assert [chunk.nbytes for chunk in plan_chunks([50, 50, 1, 7], 100)] == [101, 7]


def test_empty_tensors_have_their_place():
    assert plan_chunks([0, 0], 1) == (Chunk((Piece(0, 0, 0), Piece(1, 0, 0)), 0),)
    assert plan_chunks([], 1) == ()


def test_a_tensor_alone_is_not_copied():
    assert staging_bytes(plan_chunks([500, 600], 100)) == 0
    assert staging_bytes(plan_chunks([500, 30, 40], 100)) == 70
    assert staging_bytes(()) == 0


@given(st.lists(st.tuples(st.sampled_from(sorted(DTYPE_BYTES)), st.integers(0, 5)), max_size=20))
def test_widest_dtypes_first_are_aligned(kinds):
    kinds.sort(key=lambda kind: -DTYPE_BYTES[kind[0]])
    specs = [
        TensorSpec(name=f"t{i}", dtype=dtype, shape=(n,)) for i, (dtype, n) in enumerate(kinds)
    ]
    assert misaligned(specs, plan_chunks([s.nbytes for s in specs], 30)) == []


def test_a_wide_dtype_after_an_odd_size_is_not():
    specs = [
        TensorSpec(name="a", dtype="uint8", shape=(3,)),
        TensorSpec(name="b", dtype="float32", shape=(2,)),
        TensorSpec(name="c", dtype="uint8", shape=(1,)),
    ]
    sizes = [s.nbytes for s in specs]
    assert misaligned(specs, plan_chunks(sizes, 100)) == ["b"]
    assert misaligned(specs, plan_chunks(sizes, 2)) == []


def test_defaults_and_limits():
    assert (BUFFER_BYTES, BUFFERS) == (1024**3, 2)
    assert Packing() == Packing(buffer_bytes=BUFFER_BYTES, buffers=BUFFERS)
    for bad in (0, -1, 1.5, "1", True, None, 1 << 60):
        with pytest.raises(HcclArgumentError, match="buffer_bytes is"):
            Packing(buffer_bytes=bad)
        with pytest.raises(HcclArgumentError, match="buffers is"):
            Packing(buffers=bad)
