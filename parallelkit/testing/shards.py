"""Random sharded models, and plans carried out on them with plain numpy, for tests to compare."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np

from parallelkit.weights.exports import export
from parallelkit.weights.layout import Mesh, Region, ShardLayout, region
from parallelkit.weights.manifest import DTYPE_BYTES, Manifest, TensorSpec
from parallelkit.weights.needs import Needs
from parallelkit.weights.plan import TransferPlan
from parallelkit.weights.regions import Bytes, view, whole

AXES = ("pipeline", "data", "data_shard", "tensor")
DTYPES = sorted(DTYPE_BYTES)


def random_mesh(rng: random.Random) -> Mesh:
    """One to four axes of degrees 1 to 4."""
    count = rng.randint(1, len(AXES))
    return Mesh(AXES[:count], [rng.choice((1, 2, 2, 3, 4)) for _ in range(count)])


def random_layout(rng: random.Random, mesh: Mesh, shape: tuple[int, ...]) -> ShardLayout | None:
    """None, or any axes in any order, some dividing a dim and some naming a coordinate."""
    if rng.randrange(4) == 0:
        return None
    named = rng.sample(mesh.axes, rng.randint(0, len(mesh.axes)))
    split = rng.randint(0, len(named)) if shape else 0
    shards = [(axis, rng.randrange(len(shape))) for axis in named[:split]]
    at = [(axis, rng.randrange(mesh.degree(axis))) for axis in named[split:]]
    return ShardLayout(shards, at)


def random_manifest(rng: random.Random, *, largest: int = 9) -> Manifest:
    """Tensors of any dtype, scalars and empty ones among them, some tied, some to be fused.

    Args:
        rng: all choices come from it.
        largest: most elements on a dim.
    """
    mesh, specs = random_mesh(rng), list[TensorSpec]()
    for i in range(rng.randint(1, 7)):
        owners = [s for s in specs if s.alias_of is None]
        if owners and rng.randrange(5) == 0:
            owner = rng.choice(owners)
            specs.append(attrs.evolve(owner, name=f"t{i}", alias_of=owner.name))
            continue
        shape = tuple(rng.randint(0, largest) for _ in range(rng.randint(0, 3)))
        specs.append(
            TensorSpec(
                name=f"t{i}",
                dtype=rng.choice(DTYPES),
                shape=shape,
                layout=random_layout(rng, mesh, shape),
                fusion=rng.choice((None, None, None, "qkv", "gate_up")),
            )
        )
    return Manifest(specs, mesh)


def random_needs(rng: random.Random, manifest: Manifest) -> Needs:
    """Everything, shards of another mesh, or any regions; some tensors not at all."""
    how = rng.choice(("whole", "sharded", "regions"))
    if how == "whole":
        return Needs.whole(manifest)
    shapes = [t.shape for t in manifest.unique]
    if how == "sharded":
        mesh = random_mesh(rng)
        kept = [random_layout(rng, mesh, shape) for shape in shapes]
        return Needs.sharded(manifest, kept, mesh, rng.randrange(mesh.size))
    regions: list[Region | None] = []
    for shape in shapes:
        low = tuple(rng.randint(0, n) for n in shape)
        size = tuple(rng.randint(0, n - first) for n, first in zip(shape, low, strict=True))
        regions.append(rng.choice((None, whole(shape), Region(low, size))))
    return Needs.of(manifest, regions)


def slices(box: Region) -> tuple[slice, ...]:
    """A box as an index of a numpy array."""
    return tuple(slice(low, low + n) for low, n in zip(*box, strict=True))


def random_values(manifest: Manifest, seed: int = 0) -> list[Bytes]:
    """Random bytes for each unique tensor: an array of its shape, with one more dim of bytes."""
    rng = np.random.default_rng(seed)
    return [
        rng.integers(0, 256, (*t.shape, DTYPE_BYTES[t.dtype]), np.uint8) for t in manifest.unique
    ]


def held(manifest: Manifest, values: list[Bytes], rank: int) -> list[Bytes | None]:
    """What a rank holds of each unique tensor, by layout alone; None where it holds nothing."""
    found: list[Bytes | None] = []
    for tensor, value in zip(manifest.unique, values, strict=True):
        box: Region | None = whole(tensor.shape)
        if tensor.layout is not None and manifest.mesh is not None:
            box = region(tensor.layout, manifest.mesh, tensor.shape, rank)
        found.append(None if box is None else value[slices(box)])
    return found


def arena_of(manifest: Manifest, values: list[Bytes], rank: int, alignment: int) -> Bytes:
    """The arena of a rank, filled from what it holds."""
    made = export(manifest, rank, alignment=alignment)
    arena, mine = np.zeros(made.nbytes, np.uint8), held(manifest, values, rank)
    for part in made.parts():
        value = mine[part.tensor]
        assert value is not None, f"rank {rank} hands out what it does not hold: {part}"
        arena[part.offset : part.offset + part.nbytes] = value.reshape(-1)
    return arena


def carry_out(
    plan: TransferPlan, arenas: Mapping[int, Bytes]
) -> tuple[list[Bytes | None], list[np.ndarray[Any, np.dtype[np.int64]] | None]]:
    """Place a plan's pieces one by one.

    Returns:
        For each unique tensor the member's bytes, and how often each was written; None where
        nothing is kept.
    """
    placed: list[Bytes | None] = []
    counts: list[np.ndarray[Any, np.dtype[np.int64]] | None] = []
    for i, tensor in enumerate(plan.manifest.unique):
        box = plan.needs[i]
        nbytes = None if box is None else box.elements * DTYPE_BYTES[tensor.dtype]
        placed.append(None if nbytes is None else np.zeros(nbytes, np.uint8))
        counts.append(None if nbytes is None else np.zeros(nbytes, np.int64))
    for piece in (piece for bucket in plan.buckets for piece in bucket.pieces):
        memory, count = placed[piece.tensor], counts[piece.tensor]
        assert memory is not None, f"nothing is kept of tensor {piece.tensor}, and a piece comes"
        assert count is not None
        packed = view(arenas[piece.rank], piece.source).reshape(-1)
        target = view(memory, piece.target)
        target[...] = packed.reshape(target.shape)
        once = np.zeros(len(memory), np.uint8)
        view(once, piece.target)[...] = 1
        count += once
    return placed, counts
