"""Moving and hashing bytes, block by block, on a few threads.

numpy's copies and xxhash's updates release the interpreter lock, so two threads move about twice
the bytes until memory is the limit. A block's digest is the xxh3 of its arena bytes, zero padding
included; the source computes the same from its own tensors, before the arena is involved.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np
import xxhash

from parallelkit.errors import ManifestError
from parallelkit.weights.plan import TransferPlan

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Digests = np.ndarray[Any, np.dtype[np.uint64]]

#: Under this many bytes a second thread costs more than it brings.
PARALLEL_BYTES: Final = 8 << 20
#: Copies are cut to this size; on some x86 parts copies of 64 to 512 KiB are many times slower.
COPY_BYTES: Final = 8 << 20
#: Source tensors held at once while a batch of blocks is written, in blocks.
BATCH_BLOCKS: Final = 64


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
        done = self._pool.map(lambda run: [call(i) for i in run], runs)
        return [x for run in done for x in run]

    def close(self) -> None:
        """End the threads; harmless when repeated."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None


def as_bytes(buffer: memoryview | Any) -> Bytes:
    """View a contiguous buffer as bytes, without a copy."""
    return np.frombuffer(buffer, np.uint8)


def stage(
    fetch: Callable[[int], memoryview],
    plan: TransferPlan,
    arena: Bytes | None,
    workers: Workers,
    wanted: Sequence[bool] | None,
) -> Digests:
    """Hash source tensors, and write them into the arena where one is given.

    Args:
        fetch: gives the row-major bytes of unique tensor i; called in the calling thread, at most
            once or twice a tensor, in order.
        plan: the layout.
        arena: where to write, or None to hash alone.
        workers: threads for the copies.
        wanted: which blocks to hash; None hashes none.

    Returns:
        One digest a block; 0 where none was wanted.
    """
    digests = np.zeros(plan.blocks, np.uint64)
    views: dict[int, Bytes] = {}

    def one(block: int) -> None:
        h = xxhash.xxh3_64() if wanted is not None and wanted[block] else None
        end, stop = plan.block_span(block)
        for p in plan.pieces(block):
            source = views[p.tensor][p.start : p.start + p.nbytes]
            if arena is not None:
                np.copyto(arena[p.offset : p.offset + p.nbytes], source)
            if h is not None:
                if p.offset > end:
                    h.update(bytes(p.offset - end))
                h.update(source.data)
            end = p.offset + p.nbytes
        if h is not None:
            h.update(bytes(stop - end))
            digests[block] = h.intdigest()

    for first in range(0, plan.blocks, BATCH_BLOCKS):
        batch = range(first, min(first + BATCH_BLOCKS, plan.blocks))
        needed = {
            p.tensor
            for block in batch
            if arena is not None or (wanted is not None and wanted[block])
            for p in plan.pieces(block)
        }
        views = {i: views[i] if i in views else _sized(fetch(i), plan, i) for i in sorted(needed)}
        todo = [b for b in batch if arena is not None or (wanted is not None and wanted[b])]
        workers.map(lambda k, todo=todo: one(todo[k]), len(todo), len(todo) * plan.block_bytes)  # type: ignore[misc]
    return digests


def hash_arena(
    arena: Bytes, plan: TransferPlan, workers: Workers, wanted: Sequence[bool]
) -> Digests:
    """Hash the wanted blocks of an arena; 0 where none was wanted."""
    digests = np.zeros(plan.blocks, np.uint64)

    def one(block: int) -> None:
        if wanted[block]:
            start, stop = plan.block_span(block)
            digests[block] = xxhash.xxh3_64_intdigest(arena[start:stop].data)

    workers.map(one, plan.blocks, plan.nbytes)
    return digests


def copy_all(pairs: Iterable[tuple[Bytes, Bytes]], workers: Workers) -> None:
    """Copy each (target, source) pair of equal length."""
    jobs = [
        (target[i : i + COPY_BYTES], source[i : i + COPY_BYTES])
        for target, source in pairs
        for i in range(0, len(source), COPY_BYTES)
    ]
    total = sum(len(source) for _, source in jobs)
    workers.map(lambda i: np.copyto(*jobs[i]), len(jobs), total)


def wanted_blocks(verify: str, plan: TransferPlan, run_id: bytes, version: int) -> list[bool]:
    """Which blocks are hashed: all, none, or a sixteenth chosen by run and version.

    Both ends compute it; a sample differs from version to version, so that over sixteen updates
    or so every block is likely to have been looked at.
    """
    if verify in ("digest", "readback"):
        return [True] * plan.blocks
    chosen = [False] * plan.blocks
    if verify == "sample":
        seed = hashlib.blake2b(run_id + version.to_bytes(8, "big"), digest_size=8).digest()
        count = max(min(4, plan.blocks), plan.blocks // 16)
        # The raw stream, since both ends need not have the same numpy: it never changes, while
        # what a Generator makes of it may.
        raw = np.random.PCG64(int.from_bytes(seed, "big")).random_raw(plan.blocks)
        for block in np.argsort(raw, kind="stable")[:count]:
            chosen[int(block)] = True
    return chosen


def _sized(view: memoryview, plan: TransferPlan, tensor: int) -> Bytes:
    data = as_bytes(view) if plan.sizes[tensor] else np.empty(0, np.uint8)
    if len(data) != plan.sizes[tensor]:
        name = plan.manifest.unique[tensor].name
        raise ManifestError(
            f"the source gave {len(data)} bytes for {name!r}, the manifest says "
            f"{plan.sizes[tensor]}: its shape or dtype changed after publish_weights"
        )
    return data
