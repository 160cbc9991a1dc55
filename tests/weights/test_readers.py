"""Reading arenas of several ranks into memory of a member's own."""

from __future__ import annotations

import random

import numpy as np
import pytest

from parallelkit.weights.buckets import Workers
from parallelkit.weights.exports import export
from parallelkit.weights.layout import Mesh, ShardLayout
from parallelkit.weights.manifest import Manifest, TensorSpec
from parallelkit.weights.moves import kept_bytes, laid_out
from parallelkit.weights.plan import plan_transfer
from parallelkit.weights.readers import Readers

ROWS = ShardLayout((("data", 0),))


class Mapped:
    """A transport whose arena is mapped."""

    name = "shm"

    def __init__(self, memory):
        self.memory = memory.data

    def epoch(self, *, deadline):
        return 1

    def close(self):
        pass


def arenas_of(plan, manifest, values):
    for rank in plan.ranks:
        exported = export(manifest, rank)
        arena = np.zeros(max(exported.nbytes, 1), np.uint8)
        for part in exported.parts():
            box = tuple(slice(at, at + size) for at, size in zip(*part.region, strict=True))
            data = np.ascontiguousarray(values[part.tensor][box]).view(np.uint8).reshape(-1)
            arena[part.offset : part.offset + part.nbytes] = data
        yield rank, arena[: exported.nbytes]


@pytest.mark.parametrize("seed", range(120))
def test_ranks_do_not_write_over_each_other_s_parts_of_small_tensors(seed):
    rnd = random.Random(seed)
    world = rnd.choice([2, 3, 4])
    shapes = [
        (rnd.randint(1, 150),) if rnd.random() < 0.6 else (rnd.randint(1, 12), rnd.randint(1, 12))
        for _ in range(rnd.randint(1, 5))
    ]
    layouts = [ROWS if rnd.random() < 0.8 else None for _ in shapes]
    manifest = Manifest(
        [
            TensorSpec(name=f"t{i}", dtype="float32", shape=shape, layout=layout)
            for i, (shape, layout) in enumerate(zip(shapes, layouts, strict=True))
        ],
        Mesh(("data",), (world,)) if any(layouts) else None,
    )
    draw = np.random.default_rng(seed)
    values = [draw.random(shape, dtype=np.float32) for shape in shapes]
    plan = plan_transfer(manifest)
    arenas = dict(arenas_of(plan, manifest, values))
    sizes = {rank: arena.nbytes for rank, arena in arenas.items()}
    readers = Readers(plan, {rank: Mapped(arena) for rank, arena in arenas.items()}, sizes)
    starts, room = laid_out(kept_bytes(plan))
    memory = np.full(room, 0xEE, np.uint8)
    readers.fill(memory, starts, Workers(1), slot=0, epoch=1, deadline=0.0)
    for start, value in zip(starts, values, strict=True):
        got = memory[start : start + value.nbytes].view(np.float32).reshape(value.shape)
        np.testing.assert_array_equal(got, value)
    readers.close()
