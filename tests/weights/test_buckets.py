"""Bytes that are moved and hashed: the same whatever the buckets, threads and strides."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import attrs
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from parallelkit.errors import ManifestError
from parallelkit.testing.arrays import Arrays
from parallelkit.testing.shards import random_manifest, random_needs, random_values
from parallelkit.weights import buckets as buckets_module
from parallelkit.weights.buckets import (
    COPY_BYTES,
    PARALLEL_BYTES,
    Workers,
    as_bytes,
    copy_all,
    copy_span,
    from_wire,
    hash_spans,
    hash_table,
    merged,
    packed,
    pass_over,
    to_wire,
    wanted_buckets,
)
from parallelkit.weights.exporter import Exporter, Side
from parallelkit.weights.exports import export
from parallelkit.weights.manifest import Manifest, TensorSpec
from parallelkit.weights.needs import Needs
from parallelkit.weights.plan import plan_transfer
from parallelkit.weights.regions import Span, view

RUN = b"0123456789abcdef"
DTYPES = ("bool", "uint8", "int16", "float16", "float32", "float64", "complex128")


class Memory:
    """An arena without a transport."""

    def __init__(self, nbytes):
        self.bytes = np.zeros(max(nbytes, 256), np.uint8)

    def slot(self, number):
        return self.bytes

    def close(self):
        pass


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


def exporter_of(model, workers=None):
    mine = export(model.manifest(), 0)
    exporter = Exporter(model, mine, Memory(mine.nbytes), RUN)
    exporter.workers = workers or Workers(1)
    return exporter


def expected_digests(manifest, values, needs, rank=0):
    """Of each bucket, from the tensors alone: packed bytes of its pieces, in order."""
    plan = plan_transfer(manifest, needs, ranks=(rank,))
    mine, digests = export(manifest, rank), []
    arena = np.zeros(mine.nbytes, np.uint8)
    for part in mine.parts():
        arena[part.offset : part.offset + part.nbytes] = values[part.tensor]
    for bucket in plan.of(rank):
        text = b"".join(view(arena, piece.source).tobytes() for piece in bucket.pieces)
        assert len(text) == bucket.nbytes
        digests.append(xxhash.xxh3_64_intdigest(text))
    return digests


@settings(deadline=None, max_examples=40)
@given(models(), st.integers(1, 3))
def test_what_is_staged_hashes_like_the_arena_and_like_packed_bytes(model, threads):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets_module, "PARALLEL_BYTES", 0)
        patch.setattr(buckets_module, "BATCH_BUCKETS", 3)
        exporter = exporter_of(model, Workers(threads))
        needs = Needs.whole(model.manifest())
        try:
            (hashed,) = exporter.stage([needs], 0, "digest", 1)
            (again,) = exporter.hash_arena([needs], "digest", 1)
        finally:
            exporter.workers.close()
    values = [np.ascontiguousarray(a).reshape(-1).view(np.uint8) for a in model.arrays.values()]
    assert hashed.digests.tolist() == again.digests.tolist()
    assert hashed.digests.tolist() == expected_digests(model.manifest(), values, needs)
    assert hashed.nbytes == model.manifest().nbytes
    arena = exporter.arena.bytes
    for part in exporter.export.parts():
        placed = arena[part.offset : part.offset + part.nbytes]
        assert placed.tolist() == values[part.tensor].tolist()
    assert int(arena.sum(dtype=np.int64)) == sum(int(v.sum()) for v in values), "padding is zero"


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32 - 1))
def test_any_regions_hash_like_their_packed_bytes(seed):
    rng = random.Random(seed)
    manifest = random_manifest(rng)
    manifest = Manifest(attrs.evolve(t, layout=None) for t in manifest.tensors)
    values = [v.reshape(-1) for v in random_values(manifest, seed)]

    class Source:
        def host_bytes(self, index):
            return values[index].data

    needs = [random_needs(rng, manifest) for _ in range(3)]
    mine = export(manifest, 0)
    exporter = Exporter(Source(), mine, Memory(mine.nbytes), RUN)
    for kind, hashed in zip(needs, exporter.stage(needs, 0, "digest", 1), strict=True):
        assert hashed.digests.tolist() == expected_digests(manifest, values, kind)
        assert hashed.nbytes == plan_transfer(manifest, kind).nbytes
    for kind, hashed in zip(needs, exporter.hash_arena(needs, "digest", 1), strict=True):
        assert hashed.digests.tolist() == expected_digests(manifest, values, kind)


def test_changed_bytes_are_counted_by_bucket_against_the_last_committed_version():
    model = model_of(a=np.zeros(5 << 20, np.uint8), b=np.zeros(100, np.uint8))
    exporter = exporter_of(model)
    needs = Needs.whole(model.manifest())

    def changed():
        return exporter.stage([needs], 0, "digest", 1)[0].changed

    assert changed() is None
    assert changed() is None, "nothing was committed yet"
    exporter.committed()
    assert changed() == 0
    model.arrays["a"][3] = 1
    assert changed() == 4 << 20
    assert changed() == 4 << 20, "what was not committed is not what is compared with"
    exporter.committed()
    assert changed() == 0
    model.arrays["b"][0] = 1
    assert changed() == (1 << 20) + 100
    exporter.committed()
    other = Needs.of(model.manifest(), [None, needs[1]])
    assert exporter.stage([other], 0, "digest", 1)[0].changed is None
    exporter.committed()
    assert changed() is None, "it is not known of the version before"


def loads_of(model):
    return Side(export(model.manifest(), 0), Needs.whole(model.manifest())).loads


def fetch_of(model):
    return lambda i: as_bytes(model.host_bytes(i))


def test_only_wanted_buckets_are_hashed_and_all_are_written():
    model = model_of(**{f"t{i}": np.full(3 << 20, i, np.uint8) for i in range(5)})
    loads = loads_of(model)
    wanted = [True, False, True, False, True]
    memory = np.zeros(15 << 20, np.uint8)
    everything = pass_over(fetch_of(model), loads, None, Workers(1), [True] * 5)
    some = pass_over(fetch_of(model), loads, memory, Workers(1), wanted)
    assert some.tolist() == np.where(wanted, everything, 0).tolist()
    assert memory[:: 3 << 20].tolist() == [0, 1, 2, 3, 4]


def test_a_tensor_of_no_wanted_bucket_is_not_fetched():
    model = model_of(a=np.ones(4 << 20, np.uint8), b=np.ones(1024, np.uint8))
    fetched = []

    def fetch(i):
        fetched.append(i)
        return as_bytes(model.host_bytes(i))

    pass_over(fetch, loads_of(model), None, Workers(1), [False, True])
    assert fetched == [1]


def test_tensors_are_fetched_in_order_at_most_twice_and_in_the_calling_thread(monkeypatch):
    monkeypatch.setattr(buckets_module, "BATCH_BUCKETS", 2)
    monkeypatch.setattr(buckets_module, "PARALLEL_BYTES", 0)
    model = model_of(**{f"t{i}": np.full((1 << 19) * (i % 7), i, np.uint8) for i in range(30)})
    fetched = []

    def fetch(i):
        fetched.append((i, threading.current_thread()))
        return as_bytes(model.host_bytes(i))

    workers = Workers(3)
    memory = np.zeros(export(model.manifest(), 0).nbytes, np.uint8)
    pass_over(fetch, loads_of(model), memory, workers, [True] * len(loads_of(model)))
    workers.close()
    order = [i for i, _ in fetched]
    assert order == sorted(order)
    assert max(order.count(i) for i in order) <= 2
    assert {thread for _, thread in fetched} == {threading.current_thread()}


def test_one_changed_byte_changes_the_digest_of_exactly_its_bucket():
    model = model_of(a=np.zeros(9 << 20, np.uint8), b=np.zeros(500, np.float32))
    exporter = exporter_of(model)
    needs = Needs.whole(model.manifest())
    before = exporter.stage([needs], 0, "digest", 1)[0].digests
    arena = exporter.arena.bytes
    for at in range(0, 9 << 20, (1 << 20) - 7):
        arena[at] ^= 0x10
        now = exporter.hash_arena([needs], "digest", 1)[0].digests
        assert np.flatnonzero(now != before).tolist() == [at >> 22]
        arena[at] ^= 0x10
    model.arrays["b"][300] = 1
    now = exporter.stage([needs], 0, "digest", 1)[0].digests
    assert np.flatnonzero(now != before).tolist() == [2]


@pytest.mark.parametrize("given", [b"", b"12345678901", b"1234567890123"])
def test_a_wrong_number_of_bytes_names_the_tensor(given):
    manifest = Manifest(
        [
            TensorSpec(name="first", dtype="uint8", shape=(4,)),
            TensorSpec(name="layer.weight", dtype="float32", shape=(3,)),
        ]
    )
    data = [b"1234", given]

    class Source:
        def host_bytes(self, index):
            return memoryview(data[index])

    mine = export(manifest, 0)
    exporter = Exporter(Source(), mine, Memory(mine.nbytes), RUN)
    with pytest.raises(ManifestError, match=f"gave {len(given)} bytes for 'layer.weight'.* 12:"):
        exporter.stage([Needs.whole(manifest)], 0, "digest", 1)


def test_ties_are_staged_once():
    tied = np.arange(6, dtype=np.float32)
    exporter = exporter_of(Arrays({"embed": tied, "head": tied}))
    assert exporter.export.nbytes == 256
    (hashed,) = exporter.stage([Needs.whole(exporter.export.manifest)], 0, "digest", 1)
    assert hashed.digests.tolist() == [xxhash.xxh3_64_intdigest(tied.tobytes())]


# --- spans -------------------------------------------------------------------------------------


def test_spans_that_follow_each_other_are_made_one():
    gapless = [Span(10, 5), Span(15, 5), Span(20, 0), Span(20, 1)]
    assert merged(gapless) == (Span(10, 11),)
    steps = Span(21, 2, ((2, 4),))
    assert merged([Span(0, 4), Span(5, 1), steps, Span(29, 1)]) == (
        Span(0, 4),
        Span(5, 1),
        steps,
        Span(29, 1),
    )
    assert merged([]) == ()


def test_packed_is_a_view_of_one_run_and_a_copy_of_several():
    memory = np.arange(64, dtype=np.uint8)
    assert packed(memory, Span(3, 4)).base is not None
    strided = Span(1, 2, ((3, 10),))
    assert packed(memory, strided).tolist() == [1, 2, 11, 12, 21, 22]
    assert hash_spans(memory, [Span(3, 4), strided]) == xxhash.xxh3_64_intdigest(
        bytes([3, 4, 5, 6, 1, 2, 11, 12, 21, 22])
    )


@pytest.mark.parametrize(
    ("target", "source"),
    [
        (Span(2, 12), Span(5, 12)),
        (Span(2, 12), Span(5, 3, ((4, 7),))),
        (Span(1, 3, ((4, 7),)), Span(5, 12)),
        (Span(1, 3, ((4, 7),)), Span(2, 3, ((4, 9),))),
        (Span(1, 6, ((2, 30),)), Span(2, 3, ((4, 9),))),
        (Span(1, 2, ((2, 30), (3, 5))), Span(0, 4, ((3, 11),))),
        (Span(0, 1, ((12, 3),)), Span(0, 1, ((2, 30), (6, 2)))),
    ],
)
def test_bytes_go_from_span_to_span_in_order(target, source):
    data = np.random.default_rng(0).integers(1, 256, 64, np.uint8)
    out = np.zeros(64, np.uint8)
    copy_span(out, target, data, source)
    assert packed(out, target).tolist() == packed(data, source).tolist()
    view(out, target)[...] = 0
    assert not out.any(), "bytes beside the span were written"


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


def test_hashing_nothing_starts_no_thread():
    workers = Workers(4)
    memory = np.zeros(16 << 20, np.uint8)
    table = [[Span(0, 8 << 20)], [Span(8 << 20, 8 << 20)]]
    assert not hash_table(memory, table, workers, [False, False]).any()
    assert workers._pool is None


def test_as_bytes_is_a_view():
    data = np.zeros(4, np.float32)
    seen = as_bytes(memoryview(data))
    assert seen.dtype == np.uint8
    assert len(seen) == 16
    seen[3] = 0x3F
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


def test_no_thread_writes_any_more_once_a_job_has_failed():
    workers, begun, written = Workers(2), threading.Event(), []

    def call(i: int) -> None:
        if i == 0:
            assert begun.wait(30)
            raise ZeroDivisionError
        begun.set()
        time.sleep(0.1)
        written.append(i)

    try:
        with pytest.raises(ZeroDivisionError):
            workers.map(call, 2, PARALLEL_BYTES)
        assert written == [1]
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


# --- which buckets are hashed ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verify", "expected"), [("digest", True), ("readback", True), ("off", False)]
)
@pytest.mark.parametrize("count", [0, 1, 2, 100])
def test_all_or_none(verify, expected, count):
    assert wanted_buckets(verify, count, RUN, 7) == [expected] * count


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 16, 63, 64, 80, 100, 1600])
def test_a_sample_has_a_sixteenth_and_at_least_four(count):
    for version in (1, 2, 2**62):
        chosen = wanted_buckets("sample", count, RUN, version)
        assert len(chosen) == count
        assert sum(chosen) == max(min(4, count), count // 16)


def test_a_sample_is_the_same_at_both_ends_and_another_each_version_run_and_rank():
    assert wanted_buckets("sample", 160, RUN, 3) == wanted_buckets("sample", 160, RUN, 3)
    by_version = {tuple(wanted_buckets("sample", 160, RUN, v)) for v in range(1, 51)}
    by_run = {tuple(wanted_buckets("sample", 160, bytes([r]) * 16, 1)) for r in range(50)}
    by_rank = {tuple(wanted_buckets("sample", 160, RUN, 1, rank)) for rank in range(50)}
    assert len(by_version) == len(by_run) == len(by_rank) == 50


def test_samples_come_to_every_bucket():
    seen = np.any([wanted_buckets("sample", 64, RUN, v) for v in range(1, 300)], axis=0)
    assert seen.all()


def test_the_sample_is_the_same_with_every_numpy():
    chosen = np.flatnonzero(wanted_buckets("sample", 64, RUN, 1))
    assert chosen.tolist() == [10, 33, 37, 56]


# --- on the wire -------------------------------------------------------------------------------


def test_digests_on_the_wire():
    digests = np.array([1, 2**64 - 1, 0], np.uint64)
    data = to_wire(digests, [True, True, False])
    assert data == b"\1" + bytes(7) + b"\xff" * 8 + bytes(8)
    assert from_wire(data).tolist() == digests.tolist()
    assert to_wire(digests, [False] * 3) == b""
    assert from_wire(b"").tolist() == []
    for length in (1, 7, 9):
        assert from_wire(bytes(length)) is None


def test_a_source_may_copy_every_tensor_into_one_scratch_buffer():
    """What `host_bytes` gave is valid until the next call, and not longer."""
    model = model_of(a=np.full(5, 1.0), b=np.full(9, 2.0), c=np.full(3, 3.0))
    plain, scratch = exporter_of(model), bytearray(200)

    class Copying:
        def host_bytes(self, index):
            data = model.host_bytes(index).cast("B")
            scratch[: len(data)] = data
            return memoryview(scratch)[: len(data)]

    mine = export(model.manifest(), 0)
    copying = Exporter(Copying(), mine, Memory(mine.nbytes), RUN)
    whole = [Needs.whole(model.manifest())]
    one, other = (x.stage(whole, 0, "digest", 1)[0].digests for x in (plain, copying))
    assert one.tolist() == other.tolist()
    assert np.array_equal(plain.arena.bytes, copying.arena.bytes)


@pytest.mark.parametrize("count", [8, 64])
def test_an_interrupt_while_jobs_are_handed_out_leaves_none_behind(monkeypatch, count):
    workers, written = Workers(2), []
    submit, calls = ThreadPoolExecutor.submit, []

    def interrupted(self, *args):
        job = submit(self, *args)
        calls.append(job)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return job

    def write(i):
        time.sleep(0.05)
        written.append(i)

    monkeypatch.setattr(ThreadPoolExecutor, "submit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        workers.map(write, count, PARALLEL_BYTES)
    before = list(written)
    assert len(before) < count
    time.sleep(0.2)
    assert written == before, "nothing is written once the call has ended"
    monkeypatch.undo()
    assert workers.map(lambda i: i, 5, PARALLEL_BYTES) == list(range(5))
    workers.close()
