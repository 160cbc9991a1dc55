"""Bytes that are moved and hashed: the same whatever the blocks, threads and strides."""

from __future__ import annotations

import threading

import attrs
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from parallelkit.errors import ManifestError
from parallelkit.testing.arrays import Arrays
from parallelkit.weights import blocks as blocks_module
from parallelkit.weights.blocks import (
    COPY_BYTES,
    PARALLEL_BYTES,
    Workers,
    as_bytes,
    copy_all,
    hash_arena,
    stage,
    wanted_blocks,
)
from parallelkit.weights.manifest import Manifest, TensorSpec
from parallelkit.weights.plan import plan_transfer

RUN = b"0123456789abcdef"
DTYPES = ("bool", "uint8", "int16", "float16", "float32", "float64", "complex128")


@st.composite
def models(draw):
    """Arrays of any dtype and shape, some strided, some scalars, some empty, filled at random."""
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    arrays = {}
    for i in range(draw(st.integers(1, 8))):
        dtype = draw(st.sampled_from(DTYPES))
        shape = tuple(draw(st.lists(st.integers(0, 12), max_size=3)))
        kind = draw(st.sampled_from(["plain", "reversed", "transposed", "every-second"]))
        if kind == "every-second":
            shape = tuple(2 * n for n in shape)
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        raw = rng.integers(0, 2 if dtype == "bool" else 256, size, np.uint8)
        array = raw.view(dtype).reshape(shape)
        if kind == "transposed":
            array = array.T
        elif kind != "plain":
            step = 2 if kind == "every-second" else -1
            array = array[(..., *[slice(None, None, step)] * array.ndim)]
        arrays[f"t{i}"] = array
    return Arrays(arrays)


def model_of(**arrays):
    return Arrays(arrays)


def placed(model, arena, plan):
    """The bytes of each unique tensor in an arena."""
    spans = zip(plan.offsets, plan.sizes, strict=True)
    return [bytes(arena[offset : offset + size]) for offset, size in spans]


def all_of(plan):
    return [True] * plan.blocks


BLOCKS = st.sampled_from([64, 256, 1000, 4096, 4 << 20])


@settings(deadline=None, max_examples=40)
@given(models(), BLOCKS, st.integers(1, 3), st.sampled_from([256, 512, 4096]))
def test_what_is_staged_hashes_like_the_arena(model, block_bytes, threads, alignment):
    plan = plan_transfer(model.manifest(), block_bytes=block_bytes, alignment=alignment)
    arena = np.zeros(plan.nbytes, np.uint8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks_module, "PARALLEL_BYTES", 0)
        patch.setattr(blocks_module, "BATCH_BLOCKS", 3)
        workers = Workers(threads)
        try:
            digests = stage(model.host_bytes, plan, arena, workers, all_of(plan))
            alone = stage(model.host_bytes, plan, None, workers, all_of(plan))
            hashed = hash_arena(arena, plan, workers, all_of(plan))
        finally:
            workers.close()
    assert digests.tolist() == hashed.tolist() == alone.tolist()
    expected = [np.ascontiguousarray(a).tobytes() for a in model.arrays.values()]
    assert placed(model, arena, plan) == expected
    assert int(arena.sum(dtype=np.int64)) == sum(sum(b) for b in expected), "padding is zero"


@settings(deadline=None)
@given(models(), BLOCKS, BLOCKS)
def test_placed_bytes_do_not_depend_on_the_block_size(model, one, other):
    arenas = []
    for block_bytes in (one, other):
        plan = plan_transfer(model.manifest(), block_bytes=block_bytes)
        arenas.append(np.zeros(plan.nbytes, np.uint8))
        stage(model.host_bytes, plan, arenas[-1], Workers(1), None)
    assert np.array_equal(*arenas)


@settings(deadline=None)
@given(models(), BLOCKS, st.data())
def test_only_wanted_blocks_are_hashed_and_all_are_written(model, block_bytes, data):
    plan = plan_transfer(model.manifest(), block_bytes=block_bytes)
    wanted = data.draw(st.lists(st.booleans(), min_size=plan.blocks, max_size=plan.blocks))
    arena, full = np.zeros(plan.nbytes, np.uint8), np.zeros(plan.nbytes, np.uint8)
    workers = Workers(1)
    everything = stage(model.host_bytes, plan, full, workers, all_of(plan))
    some = stage(model.host_bytes, plan, arena, workers, wanted)
    assert some.tolist() == np.where(wanted, everything, 0).tolist()
    assert hash_arena(arena, plan, workers, wanted).tolist() == some.tolist()
    assert stage(model.host_bytes, plan, None, workers, wanted).tolist() == some.tolist()
    assert not stage(model.host_bytes, plan, None, workers, None).any()
    assert np.array_equal(arena, full)


def test_a_tensor_of_no_wanted_block_is_not_fetched():
    model = model_of(a=np.ones(1024, np.uint8), b=np.ones(1024, np.uint8))
    plan = plan_transfer(model.manifest(), block_bytes=1024)
    fetched = []

    def fetch(i):
        fetched.append(i)
        return model.host_bytes(i)

    stage(fetch, plan, None, Workers(1), [False, True])
    assert fetched == [1]


def test_tensors_are_fetched_in_order_at_most_twice_and_in_the_calling_thread(monkeypatch):
    monkeypatch.setattr(blocks_module, "BATCH_BLOCKS", 2)
    monkeypatch.setattr(blocks_module, "PARALLEL_BYTES", 0)
    model = model_of(**{f"t{i}": np.full(700 * (i % 7), i, np.uint8) for i in range(30)})
    plan = plan_transfer(model.manifest(), block_bytes=512)
    fetched = []

    def fetch(i):
        fetched.append((i, threading.current_thread()))
        return model.host_bytes(i)

    workers = Workers(3)
    stage(fetch, plan, np.zeros(plan.nbytes, np.uint8), workers, all_of(plan))
    workers.close()
    order = [i for i, _ in fetched]
    assert order == sorted(order)
    assert max(order.count(i) for i in order) <= 2
    assert {thread for _, thread in fetched} == {threading.current_thread()}


def test_one_changed_byte_changes_the_digest_of_exactly_its_block():
    model = model_of(a=np.zeros(3000, np.uint8), b=np.zeros(500, np.float32))
    plan = plan_transfer(model.manifest(), block_bytes=512)
    arena = np.zeros(plan.nbytes, np.uint8)
    before = stage(model.host_bytes, plan, arena, Workers(1), all_of(plan))
    for at in range(0, plan.nbytes, 127):
        arena[at] ^= 0x10
        now = hash_arena(arena, plan, Workers(1), all_of(plan))
        assert np.flatnonzero(now != before).tolist() == [at // 512]
        arena[at] ^= 0x10
    model.arrays["b"][300] = 1
    now = stage(model.host_bytes, plan, None, Workers(1), all_of(plan))
    assert np.flatnonzero(now != before).tolist() == [(plan.offsets[1] + 1203) // 512]


def test_a_digest_is_the_xxh3_of_the_block_with_its_padding():
    model = model_of(a=np.arange(10, dtype=np.uint8), b=np.arange(5, dtype=np.uint8))
    plan = plan_transfer(model.manifest())
    text = bytes(range(10)) + bytes(246) + bytes(range(5)) + bytes(251)
    digests = stage(model.host_bytes, plan, None, Workers(1), [True])
    assert digests.tolist() == [xxhash.xxh3_64_intdigest(text)]


def test_bytes_that_wait_in_a_larger_tensor_of_many_batches(monkeypatch):
    monkeypatch.setattr(blocks_module, "BATCH_BLOCKS", 2)
    rng = np.random.default_rng(3)
    model = model_of(
        big=rng.integers(0, 256, 100_000, np.uint8), small=rng.integers(0, 256, 9, np.uint8)
    )
    plan = plan_transfer(model.manifest(), block_bytes=1000)
    arena = np.zeros(plan.nbytes, np.uint8)
    stage(model.host_bytes, plan, arena, Workers(1), None)
    assert placed(model, arena, plan) == [a.tobytes() for a in model.arrays.values()]


@pytest.mark.parametrize("given", [b"", b"12345678901", b"1234567890123"])
def test_a_wrong_number_of_bytes_names_the_tensor(given):
    manifest = Manifest(
        [
            TensorSpec(name="first", dtype="uint8", shape=(4,)),
            TensorSpec(name="layer.weight", dtype="float32", shape=(3,)),
        ]
    )
    plan = plan_transfer(manifest)
    source = [b"1234", given]
    with pytest.raises(ManifestError, match=f"gave {len(given)} bytes for 'layer.weight'.* 12:"):
        stage(lambda i: memoryview(source[i]), plan, None, Workers(1), [True])


# --- copies ------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 3])
def test_copy_all_of_any_size(threads):
    sizes = [0, 1, 255, COPY_BYTES - 1, COPY_BYTES, COPY_BYTES + 1, 2 * COPY_BYTES + 13]
    rng = np.random.default_rng(1)
    sources = [rng.integers(0, 256, size, np.uint8) for size in sizes]
    targets = [np.zeros(size, np.uint8) for size in sizes]
    workers = Workers(threads)
    try:
        copy_all(zip(targets, sources, strict=True), workers)
    finally:
        workers.close()
    for target, source in zip(targets, sources, strict=True):
        assert np.array_equal(target, source)
    copy_all([], workers)


def test_copies_start_no_thread_for_little():
    workers = Workers(4)
    copy_all([(np.zeros(1 << 20, np.uint8), np.ones(1 << 20, np.uint8))], workers)
    assert workers._pool is None


def test_as_bytes_is_a_view():
    data = np.zeros(4, np.float32)
    view = as_bytes(memoryview(data))
    assert view.dtype == np.uint8
    assert len(view) == 16
    view[3] = 0x3F
    assert data[0] == 0.5


# --- workers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 2, 7, 100])
def test_map_keeps_the_order(count):
    workers = Workers(3)
    try:
        assert workers.map(lambda i: i * i, count, PARALLEL_BYTES) == [i * i for i in range(count)]
    finally:
        workers.close()


def test_an_error_in_a_thread_is_raised_in_the_caller():
    workers = Workers(2)

    def call(i):
        if i == 5:
            raise ZeroDivisionError
        return i

    try:
        with pytest.raises(ZeroDivisionError):
            workers.map(call, 10, PARALLEL_BYTES)
        assert workers.map(lambda i: i, 3, PARALLEL_BYTES) == [0, 1, 2]
    finally:
        workers.close()


def test_close_ends_every_thread_and_may_be_repeated():
    before = threading.active_count()
    workers = Workers(4)
    workers.close()
    names = set(workers.map(lambda i: threading.current_thread().name, 64, PARALLEL_BYTES))
    assert all(name.startswith("parallelkit-copy") for name in names)
    workers.close()
    workers.close()
    assert threading.active_count() == before


def test_the_default_number_of_threads_is_small():
    assert 1 <= Workers().threads <= 4


# --- which blocks are hashed -------------------------------------------------------------------


def plan_with(blocks):
    manifest = Manifest([TensorSpec(name="w", dtype="uint8", shape=(256 * blocks,))])
    plan = plan_transfer(manifest, block_bytes=256)
    assert plan.blocks == blocks
    return plan


@pytest.mark.parametrize(
    ("verify", "expected"), [("digest", True), ("readback", True), ("off", False)]
)
@pytest.mark.parametrize("blocks", [1, 2, 100])
def test_all_or_none(verify, expected, blocks):
    assert wanted_blocks(verify, plan_with(blocks), RUN, 7) == [expected] * blocks


@pytest.mark.parametrize("blocks", [1, 2, 3, 4, 5, 16, 63, 64, 80, 100, 1600])
def test_a_sample_has_a_sixteenth_and_at_least_four(blocks):
    for version in (1, 2, 2**62):
        count = sum(wanted_blocks("sample", plan_with(blocks), RUN, version))
        assert count == max(min(4, blocks), blocks // 16)


def test_a_sample_is_the_same_at_both_ends_and_another_each_version_and_run():
    plan = plan_with(160)
    assert wanted_blocks("sample", plan, RUN, 3) == wanted_blocks("sample", plan_with(160), RUN, 3)
    by_version = {tuple(wanted_blocks("sample", plan, RUN, v)) for v in range(1, 51)}
    by_run = {tuple(wanted_blocks("sample", plan, bytes([r]) * 16, 1)) for r in range(50)}
    assert len(by_version) == len(by_run) == 50


def test_samples_come_to_every_block():
    plan = plan_with(64)
    seen = np.any([wanted_blocks("sample", plan, RUN, v) for v in range(1, 300)], axis=0)
    assert seen.all()


def test_the_sample_is_the_same_with_every_numpy():
    chosen = np.flatnonzero(wanted_blocks("sample", plan_with(64), RUN, 1))
    assert chosen.tolist() == [3, 21, 38, 43]


def test_ties_are_staged_once():
    tied = np.arange(6, dtype=np.float32)
    model = Arrays({"embed": tied, "head": tied})
    plan = plan_transfer(model.manifest())
    assert plan.sizes == (24,)
    arena = np.zeros(plan.nbytes, np.uint8)
    digests = stage(model.host_bytes, plan, arena, Workers(1), [True])
    alone = plan_transfer(Manifest([attrs.evolve(model.manifest().tensors[0])]))
    assert digests.tolist() == hash_arena(arena, alone, Workers(1), [True]).tolist()
