"""Time of one rank's own transfer plan: which bytes it gets from whom, or gives to whom.

A publisher of many ranks, a manifest of many tensors, members that keep other shards than the
publisher's. The tensors are given; all that follows from them is made anew in each call, the
manifest's checks and digest included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
from common import Goal, Row, Run, Timing, finish, parser, time_calls, wait_idle

from parallelkit.weights.exports import export
from parallelkit.weights.layout import Mesh, ShardLayout
from parallelkit.weights.manifest import Manifest, TensorSpec
from parallelkit.weights.needs import Needs
from parallelkit.weights.plan import TransferPlan, plan_transfer

COLUMNS = ("case", "tensors", "ranks", "plans", "pieces", "buckets", "s", "low s", "high s")
#: Of a layer of a transformer: shape, and the dim that an engine divides over its tensor axis.
SHAPES: tuple[tuple[tuple[int, ...], int | None], ...] = (
    ((4096, 4096), 0),
    ((1024, 4096), 0),
    ((1024, 4096), 0),
    ((4096, 4096), 1),
    ((14336, 4096), 0),
    ((14336, 4096), 0),
    ((4096, 14336), 1),
    ((4096,), None),
    ((4096,), None),
)
#: Seconds that one rank's own plan may take at 100,000 tensors and 1,024 ranks.
TARGET = 2.0
#: A call makes plans, and returns them.
Call = Callable[[Manifest], Sequence[TransferPlan]]


def main() -> None:
    args = parser(__doc__).parse_args()
    wait_idle(args.wait_idle)
    run = Run("transfer_plan", args)
    scale, repeats = (100, 1) if args.quick else (1, 5)
    rows = [
        measure(*own_shard(100_000 // scale), repeats),
        measure(*own_members(100_000 // scale), repeats),
        measure(*tensor_over_fsdp(18_432 // scale), repeats),
        measure(*whole_tensors(100_000 // scale), repeats),
    ]
    goals = [Goal(f"{row['case']}, s", TARGET, row["s"], at_least=False) for row in rows[:2]]
    finish(run.result(rows, goals), COLUMNS, args.output)


def own_shard(tensors: int) -> tuple[str, Manifest, Call]:
    """One of 1,024 members, each of which keeps a 1/1,024 of every tensor."""
    manifest = published(tensors, Mesh(("data_shard",), (1024,)), [("data_shard", 0)])
    layouts, mesh = [ShardLayout([("data_shard", 0)])] * tensors, Mesh(("data_shard",), (1024,))

    def call(manifest: Manifest) -> list[TransferPlan]:
        return [plan_transfer(manifest, Needs.sharded(manifest, layouts, mesh, 517))]

    return "a member's shard, of 1,024", manifest, call


def own_members(tensors: int) -> tuple[str, Manifest, Call]:
    """One of 1,024 publisher ranks, towards the 8 members that keep what it holds."""
    mesh = Mesh(("data_shard", "tensor"), (128, 8))
    manifest = published(tensors, mesh, [("tensor", 0), ("data_shard", 0)])
    engine = Mesh(("tensor",), (8,))

    def call(manifest: Manifest) -> list[TransferPlan]:
        layouts = engine_layouts(tensors)
        needs = [Needs.sharded(manifest, layouts, engine, rank) for rank in range(8)]
        export(manifest, 517).parts()
        return [plan_transfer(manifest, need, ranks=(517,)) for need in needs]

    return "a publisher rank's members", manifest, call


def tensor_over_fsdp(tensors: int) -> tuple[str, Manifest, Call]:
    """One worker of an engine of tensor degree 8, from 64 ranks that divide dim 0."""
    manifest = published(tensors, Mesh(("data_shard",), (64,)), [("data_shard", 0)])
    engine = Mesh(("tensor",), (8,))

    def call(manifest: Manifest) -> list[TransferPlan]:
        return [
            plan_transfer(manifest, Needs.sharded(manifest, engine_layouts(tensors), engine, 3))
        ]

    return "tensor 8 over FSDP 64", manifest, call


def whole_tensors(tensors: int) -> tuple[str, Manifest, Call]:
    """A member that keeps everything, from 8 ranks that divide dim 0."""
    manifest = published(tensors, Mesh(("data_shard",), (8,)), [("data_shard", 0)])
    return "whole tensors over FSDP 8", manifest, lambda manifest: [plan_transfer(manifest)]


def published(tensors: int, mesh: Mesh, shards: Sequence[tuple[str, int]]) -> Manifest:
    """A manifest of bfloat16 tensors of a transformer's shapes, all divided alike."""
    layout = ShardLayout(shards)
    specs = (
        TensorSpec(
            name=f"model.layers.{i // len(SHAPES)}.{i % len(SHAPES)}.weight",
            dtype="bfloat16",
            shape=SHAPES[i % len(SHAPES)][0],
            layout=layout,
        )
        for i in range(tensors)
    )
    return Manifest(specs, mesh)


def engine_layouts(tensors: int) -> list[ShardLayout | None]:
    """How an engine divides the tensors of `published` over its axis `tensor`."""
    each = [None if dim is None else ShardLayout([("tensor", dim)]) for _, dim in SHAPES]
    return [each[i % len(SHAPES)] for i in range(tensors)]


def measure(case: str, manifest: Manifest, call: Call, repeats: int) -> Row:
    """Time a case, plan digests and buckets included, and count what comes out."""
    counts: Row = {}

    def made() -> None:
        plans = call(attrs.evolve(manifest))  # one that has computed nothing yet
        buckets = [bucket for plan in plans for bucket in plan.buckets]
        counts["digests"] = [plan.digest for plan in plans]
        counts["plans"], counts["buckets"] = len(plans), len(buckets)
        counts["pieces"] = sum(len(bucket.pieces) for bucket in buckets)

    took = Timing.of(time_calls(made, warmups=1, repeats=repeats))
    del counts["digests"]
    ranks = 1 if manifest.mesh is None else manifest.mesh.size
    row: Row = {"case": case, "tensors": len(manifest.tensors), "ranks": ranks} | counts
    return row | {"s": took.median, "low s": took.low, "high s": took.high}


if __name__ == "__main__":
    main()
