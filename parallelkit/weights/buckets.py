"""Moving and hashing bytes, bucket by bucket, on a few threads.

numpy's copies and xxhash's updates release the interpreter lock, so two threads move about twice
the bytes until memory is the limit. A bucket's digest is the xxh3 of its pieces' bytes, in order
and without gaps, wherever they lie: both ends get the same from other memory.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import attrs
import numpy as np
import xxhash

from parallelkit.weights.regions import Bytes, Span, view

Digests = np.ndarray[Any, np.dtype[np.uint64]]
#: For each bucket, the spans of one memory that are its bytes.
Table = Sequence[Sequence[Span]]

#: Under this many bytes a second thread costs more than it brings.
PARALLEL_BYTES: Final = 8 << 20
#: Copies are cut to this size; on some x86 parts copies of 64 to 512 KiB are many times slower.
COPY_BYTES: Final = 8 << 20
#: Tensors are held at once for so many buckets.
BATCH_BUCKETS: Final = 64
#: `verify` by which every bucket is hashed.
FULL: Final = ("digest", "readback")
#: How often it is looked whether stopped copies have come to their end.
_LOOK_SECONDS: Final = 0.001


@attrs.frozen
class Load:
    """One bucket, in memory that lies tensor by tensor.

    Attributes:
        pieces: tensor, where in its memory the bytes are, and where in an arena they go to.
        nbytes: of all pieces.
    """

    pieces: tuple[tuple[int, Span, int], ...]
    nbytes: int


class _Batch:
    """Calls that several threads share out, and that can be stopped.

    Nothing of it locks, so that an interrupt may come at any moment.
    """

    def __init__(self, call: Callable[[int], Any]) -> None:
        self._call = call
        self._stopped = False
        self._begun: list[None] = []
        self._ended: list[None] = []

    def run(self, run: range) -> list[Any]:
        """Call for each of some numbers, until it is stopped."""
        self._begun.append(None)
        try:
            return [self._call(i) for i in run if not self._stopped]
        finally:
            self._ended.append(None)

    def stop(self) -> None:
        """Let no call begin any more, and wait for those that have: none may write after this.

        Interrupts meanwhile are lost; the one that led here is raised.
        """
        while True:
            try:
                self._stopped = True
                while len(self._ended) < len(self._begun):
                    time.sleep(_LOOK_SECONDS)
            except BaseException:
                continue
            return


class Workers:
    """A small pool for copies and hashes; threads start at the first large job."""

    def __init__(self, threads: int | None = None) -> None:
        self.threads = threads or max(1, min(4, len(os.sched_getaffinity(0))))
        self._pool: ThreadPoolExecutor | None = None

    def map(self, call: Callable[[int], Any], count: int, nbytes: int) -> list[Any]:
        """Return `[call(0), ..., call(count - 1)]`, in parallel where `nbytes` make it worth it."""
        if self.threads == 1 or nbytes < PARALLEL_BYTES or count < 2:
            return [call(i) for i in range(count)]
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.threads, "parallelkit-copy")
        step = -(-count // (4 * self.threads))
        runs = [range(i, min(i + step, count)) for i in range(0, count, step)]
        batch = _Batch(call)
        try:
            jobs = [self._pool.submit(batch.run, run) for run in runs]
            return [x for job in jobs for x in job.result()]
        except BaseException as error:
            batch.stop()
            if not isinstance(error, Exception):
                self._pool = None  # an interrupt may have left a lock of it locked
            raise

    def close(self) -> None:
        """End the threads; harmless when repeated."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None


def as_bytes(buffer: memoryview | Any) -> Bytes:
    """View a contiguous buffer as bytes, without a copy."""
    return np.frombuffer(buffer, np.uint8)


def shifted(span: Span, by: int) -> Span:
    """The same span, further along in memory."""
    return Span(span.offset + by, span.run, span.steps)


def merged(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Spans of one memory, with those that follow each other without a gap made one.

    Example:
        >>> merged([Span(0, 4), Span(4, 2), Span(8, 1)])
        (Span(offset=0, run=6, steps=()), Span(offset=8, run=1, steps=()))
    """
    out: list[Span] = []
    for span in spans:
        last = out[-1] if out else None
        if last and not last.steps and not span.steps and last.offset + last.run == span.offset:
            out[-1] = Span(last.offset, last.run + span.run)
        else:
            out.append(span)
    return tuple(out)


def packed(memory: Bytes, span: Span) -> Bytes:
    """The bytes of a span one after another; a view where they lie so, else a copy."""
    if not span.steps:
        return memory[span.offset : span.offset + span.run]
    return np.ascontiguousarray(view(memory, span)).reshape(-1)


def hash_spans(memory: Bytes, spans: Sequence[Span]) -> int:
    """The digest of a bucket whose bytes are these spans, in order."""
    if len(spans) == 1:
        return xxhash.xxh3_64_intdigest(packed(memory, spans[0]).data)
    h = xxhash.xxh3_64()
    for span in spans:
        h.update(packed(memory, span).data)
    return h.intdigest()


def hash_table(memory: Bytes, table: Table, workers: Workers, wanted: Sequence[bool]) -> Digests:
    """Hash the wanted buckets of a memory; 0 where none was wanted."""
    digests = np.zeros(len(table), np.uint64)

    def one(bucket: int) -> None:
        if wanted[bucket]:
            digests[bucket] = hash_spans(memory, table[bucket])

    workers.map(one, len(table), len(memory) if any(wanted) else 0)
    return digests


def pass_over(
    fetch: Callable[[int], Bytes],
    loads: Sequence[Load],
    memory: Bytes | None,
    workers: Workers,
    wanted: Sequence[bool],
) -> Digests:
    """Hash tensors one by one, and write them into an arena where one is given.

    Args:
        fetch: gives the bytes of a unique tensor, or of the part that is here; called in the
            calling thread, once or a few times a tensor. They may be valid until its next call
            only, where that gives the same memory.
        loads: the buckets.
        memory: the arena, where each piece is one run; or None to hash alone.
        workers: threads for the copies.
        wanted: which buckets to hash.

    Returns:
        One digest a bucket; 0 where none was wanted.
    """
    digests = np.zeros(len(loads), np.uint64)
    views: dict[int, Bytes] = {}

    def one(bucket: int) -> None:
        h = xxhash.xxh3_64() if wanted[bucket] else None
        for tensor, span, at in loads[bucket].pieces:
            data = packed(views[tensor], span)
            if memory is not None:
                np.copyto(memory[at : at + len(data)], data)
            if h is not None:
                h.update(data.data)
        if h is not None:
            digests[bucket] = h.intdigest()

    todo = [b for b in range(len(loads)) if memory is not None or wanted[b]]
    for first in range(0, len(todo), BATCH_BUCKETS):
        batch = todo[first : first + BATCH_BUCKETS]
        needed = {tensor for b in batch for tensor, _, _ in loads[b].pieces}
        views = {i: views[i] if i in views else fetch(i) for i in sorted(needed)}
        if overlapping(views.values()):  # such as one scratch buffer for all that is copied
            views = {i: fetch(i).copy() for i in views}
        nbytes = sum(loads[b].nbytes for b in batch)
        workers.map(lambda k, batch=batch: one(batch[k]), len(batch), nbytes)  # type: ignore[misc]
    return digests


def overlapping(views: Iterable[Bytes]) -> bool:
    """Whether two of these contiguous bytes have memory in common."""
    reached = 0
    for start, size in sorted((v.__array_interface__["data"][0], len(v)) for v in views):
        if size and start < reached:
            return True
        reached = max(reached, start + size)
    return False


def copy_span(to: Bytes, target: Span, source: Bytes, span: Span) -> None:
    """Copy the bytes of one span to those of another of as many."""
    out, data = view(to, target), view(source, span)
    if not target.steps:
        out = out.reshape(data.shape)
    elif out.shape != data.shape:  # as packed bytes they are the same
        data = np.ascontiguousarray(data).reshape(out.shape)
    np.copyto(out, data)


def copy_all(pairs: Iterable[tuple[Bytes, Bytes]], workers: Workers) -> None:
    """Copy each (target, source) pair of contiguous bytes of equal length."""
    jobs = [
        (target[i : i + COPY_BYTES], source[i : i + COPY_BYTES])
        for target, source in pairs
        for i in range(0, len(source), COPY_BYTES)
    ]
    total = sum(len(source) for _, source in jobs)
    workers.map(lambda i: np.copyto(*jobs[i]), len(jobs), total)


def wanted_buckets(
    verify: str, count: int, run_id: bytes, version: int, rank: int = 0
) -> list[bool]:
    """Which of a publisher rank's buckets are hashed: all, none, or a sixteenth.

    Both ends compute it; a sample differs from version to version, so that over sixteen updates
    or so every bucket is likely to have been looked at.
    """
    if verify in FULL:
        return [True] * count
    chosen = [False] * count
    if verify == "sample":
        text = run_id + version.to_bytes(8, "big") + rank.to_bytes(4, "big")
        seed = hashlib.blake2b(text, digest_size=8).digest()
        least = max(min(4, count), count // 16)
        # The raw stream, since both ends need not have the same numpy: it never changes, while
        # what a Generator makes of it may.
        raw = np.random.PCG64(int.from_bytes(seed, "big")).random_raw(count)
        for bucket in np.argsort(raw, kind="stable")[:least]:
            chosen[int(bucket)] = True
    return chosen


def to_wire(digests: Digests, wanted: Sequence[bool]) -> bytes:
    """Digests as 8 bytes a bucket, little endian; nothing where none was wanted."""
    return digests.astype("<u8").tobytes() if any(wanted) else b""


def from_wire(data: bytes) -> Digests | None:
    """What `to_wire` was given; None if the bytes are not that."""
    if len(data) % 8:
        return None
    return np.frombuffer(data, "<u8").astype(np.uint64)
