"""Four ranks publish models that they divided themselves: what they hand out is exact.

No follower: what sources hand out is put together here. Values are counted up, so that every
element says where it belongs, and changed on each rank alone, as an optimiser step does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from parallelkit_torch.sharded_weights import ShardedModuleSource
from sharded_models import collect, step_parts, stepped
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import parallelkit as pk
from parallelkit.errors import (
    ManifestError,
    ParallelKitError,
    RankMismatchError,
    UnsupportedFeatureError,
)
from parallelkit.plan import AXES
from parallelkit.weights.layout import Mesh, ShardLayout

group = pk.init_process_group(device="cpu", timeout=30)
rank, world = group.rank, group.world_size
assert world == 4


def context_mesh(plan: pk.ParallelPlan) -> DeviceMesh:
    groups = [group.partition(plan.groups(axis)).native for axis in AXES]
    ranks = torch.arange(world).reshape([plan.degree(axis) for axis in AXES])
    return DeviceMesh.from_group(groups, "cpu", mesh=ranks, mesh_dim_names=AXES)


def own_mesh(ranks: Sequence[Sequence[int]] | Sequence[int], *names: str) -> DeviceMesh:
    """A user's own mesh."""
    return DeviceMesh("cpu", torch.tensor(ranks), mesh_dim_names=names or None)


class Holder(nn.Module):
    def __init__(self, **given: torch.Tensor) -> None:
        super().__init__()
        for name, tensor in given.items():
            floating = tensor.is_floating_point()
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=floating))


def counted(*shape: int, dtype: torch.dtype = torch.float32, start: int = 1) -> torch.Tensor:
    return torch.arange(start, start + math.prod(shape)).reshape(shape).to(dtype)


def exact(
    model: nn.Module,
    expected: dict[str, torch.Tensor],
    layouts: dict[str, ShardLayout | None] | None = None,
    mesh: Mesh | None = None,
) -> None:
    """Change every part on its own rank, collect, compare; twice."""
    source = ShardedModuleSource(model)
    source.join(group)
    manifest = source.manifest()
    names = [t.name for t in manifest.tensors if t.alias_of is None]
    assert names == list(expected), (names, list(expected))
    if layouts is not None:
        found = {t.name: t.layout for t in manifest.tensors}
        assert found == layouts, found
        assert manifest.mesh == mesh, manifest.mesh
    for _ in range(2):
        step_parts(model)
        expected = {name: stepped(tensor) for name, tensor in expected.items()}
        for name, tensor in collect(source, group).items():
            assert torch.equal(tensor, expected[name]), (name, tensor, expected[name])


def refused(kind: type[ParallelKitError], said: str, model: nn.Module, **options: object) -> None:
    """Publishing is an error, of this kind and with these words on some rank, on every rank."""
    try:
        pk.publish_weights(model, timeout=20, **options).close()
    except ParallelKitError as error:
        found = isinstance(error, kind) and said in str(error)
        if not found:
            print(f"rank {rank}: {type(error).__name__}: {error}")
    else:
        raise AssertionError(f"published although {said}")
    heard = group.all_gather(torch.tensor([int(found)]))
    assert any(int(x) for x in heard), said


def sharded(tensor: torch.Tensor, mesh: DeviceMesh, *placements: object) -> DTensor:
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)


# --- any dims, uneven and empty parts, every kind of dtype
mesh = context_mesh(pk.plan(4, data_shard=2, tensor=2))[("data_shard", "tensor")]
given = {
    "rows": counted(7, 3),
    "columns": counted(3, 5, dtype=torch.bfloat16),
    "both": counted(5, 3, dtype=torch.int16),
    "nested": counted(3, 4, 5, dtype=torch.float64),
    "few": counted(1, 2),
    "wide": counted(2, 3, 2, dtype=torch.complex64),
    "flags": torch.tensor([True, False, True]),
    "bytes": counted(9, dtype=torch.uint8),
    "scalar": torch.tensor(5.0),
    "empty": torch.zeros(0, 4),
    "plain": counted(3),
}
places = {
    "rows": (Shard(0), Replicate()),
    "columns": (Replicate(), Shard(1)),
    "both": (Shard(1), Shard(0)),
    "nested": (Shard(2), Shard(2)),
    "few": (Shard(0), Shard(0)),
    "wide": (Replicate(), Shard(1)),
    "flags": (Shard(0), Replicate()),
    "bytes": (_StridedShard(0, split_factor=2), Shard(0)),
    "scalar": (Replicate(), Replicate()),
    "empty": (Replicate(), Shard(1)),
}
exact(
    Holder(**{n: sharded(t, mesh, *places[n]) if n in places else t for n, t in given.items()}),
    {n: t.clone() for n, t in given.items()},
    {
        "rows": ShardLayout([("data_shard", 0)]),
        "columns": ShardLayout([("tensor", 1)]),
        "both": ShardLayout([("tensor", 0), ("data_shard", 1)]),
        "nested": ShardLayout([("data_shard", 2), ("tensor", 2)]),
        "few": ShardLayout([("data_shard", 0), ("tensor", 0)]),
        "wide": ShardLayout([("tensor", 1)]),
        "flags": ShardLayout([("data_shard", 0)]),
        "bytes": ShardLayout([("tensor", 0), ("data_shard", 0)]),
        "scalar": None,
        "empty": ShardLayout([("tensor", 1)]),
        "plain": None,
    },
    Mesh(("data_shard", "tensor"), (2, 2)),
)

# --- fully_shard over tensor parallel divides the tensor axis first, evenly or not
whole = counted(7, 2)
model = Holder(
    w=sharded(whole, mesh["tensor"], Shard(0)), v=sharded(whole, mesh["tensor"], Shard(1))
)
fully_shard(model, mesh=mesh["data_shard"])
exact(
    model,
    {"w": whole, "v": whole},
    {
        "w": ShardLayout([("tensor", 0), ("data_shard", 0)]),
        "v": ShardLayout([("tensor", 1), ("data_shard", 0)]),
    },
    Mesh(("data_shard", "tensor"), (2, 2)),
)

# --- ties stay ties, also where a rank has nothing of them
tied = sharded(counted(2, 3), own_mesh(range(4), "shard"), Shard(0))
model = Holder(embed=tied, other=counted(2))
model.register_parameter("head", model.embed)
with pk.publish_weights(model, timeout=20) as publisher:
    aliases = {t.name: t.alias_of for t in publisher.plan.manifest.tensors}
    assert aliases == {"embed": None, "other": None, "head": "embed"}, aliases
    assert "2 tensors sharded over shard 4, 1 replicated" in publisher.explain()
exact(model, {"embed": counted(2, 3), "other": counted(2)})

# --- a user's own meshes: names, none, and some of the ranks only
exact(
    Holder(
        a=sharded(counted(5), own_mesh([[0, 1], [2, 3]], "dp", "tp"), Replicate(), Shard(0)),
        b=sharded(counted(5), own_mesh([[0, 1], [2, 3]]), Shard(0), Replicate()),
    ),
    {"a": counted(5), "b": counted(5)},
    {"a": ShardLayout([("tp", 0)]), "b": ShardLayout([("dp", 0)])},
    Mesh(("dp", "tp"), (2, 2)),
)
# Torch numbers a process' groups, and the number names one in the store: all ranks make them all.
halves = own_mesh([0, 1], "tp"), own_mesh([2, 3], "tp")
half = halves[rank // 2]
upper = own_mesh([2, 3], "upper")
exact(
    Holder(
        a=sharded(counted(5), half, Shard(0)),
        b=DTensor.from_local(
            counted(3, start=rank) if rank > 1 else torch.empty(0),
            upper,
            [Shard(0)],
            run_check=False,
            shape=torch.Size([6]),
            stride=(1,),
        ),
    ),
    {"a": counted(5), "b": torch.cat([counted(3, start=2), counted(3, start=3)])},
    {"a": ShardLayout([("tp", 0)]), "b": ShardLayout([("tp", 0)], [("replica", 1)])},
    Mesh(("replica", "tp"), (2, 2)),
)


# --- a pipeline by hand: each rank has its stages' names only
class Staged(nn.Module):
    """As `PipelineModule`: stages with the names of the whole model."""

    def __init__(self, stages: dict[int, nn.Module]) -> None:
        super().__init__()
        self.indices, self.stage_modules = tuple(stages), tuple(stages.values())


def stage(number: int, tensor: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    layer = nn.Module()
    layer.layers = nn.ModuleDict({str(number): Holder(w=tensor(counted(4, 3, start=number)))})
    if number in (0, 3):
        layer.shared = nn.Parameter(counted(2))  # the same values at both ends
    return layer


wide = context_mesh(pk.plan(4, pipeline=2, tensor=2))
first = rank // 2
stages = {s: stage(s, lambda t: sharded(t, wide["tensor"], Shard(1))) for s in (first, first + 2)}
whole = {f"layers.{s}.w": counted(4, 3, start=s) for s in range(4)}
cut = [ShardLayout([("tensor", 1)], [("pipeline", place)]) for place in (0, 1)]
exact(
    Staged(stages),
    {"shared": counted(2)} | whole,
    {"shared": None} | {f"layers.{s}.w": cut[s % 2] for s in range(4)},
    Mesh(("pipeline", "tensor"), (2, 2)),
)
exact(
    Staged({rank: stage(rank, lambda t: t)}),
    {"shared": counted(2)} | whole,
    {"shared": ShardLayout(at=[("pipeline", 0)])}
    | {f"layers.{s}.w": ShardLayout(at=[("pipeline", s)]) for s in range(4)},
    Mesh(("pipeline",), (4,)),
)

# --- what cannot be published is refused by name, on every rank
line = own_mesh(range(4), "shard")
fine = sharded(counted(8), line, Shard(0))
partial = DTensor.from_local(torch.ones(3), line, [Partial()], run_check=False)
refused(
    UnsupportedFeatureError, "tensor 'sums' has the placement Partial(sum)", Holder(sums=partial)
)
strided = DTensor.from_local(
    torch.ones(2), line, [_StridedShard(0, split_factor=2)], run_check=False
)
refused(UnsupportedFeatureError, "no intervals of dim 0", Holder(qkv=strided))
turned = sharded(counted(8), own_mesh([1, 0, 3, 2], "shard"), Shard(0))
refused(UnsupportedFeatureError, "no slice of a mesh in rank order", Holder(turned=turned))
flat = sharded(counted(8), own_mesh([[0, 1], [2, 3]], "dp", "tp"), Shard(0), Replicate())
refused(UnsupportedFeatureError, "do not make up one mesh", Holder(fine=fine, flat=flat))
uneven = DTensor.from_local(
    torch.ones(rank + 1), line, [Shard(0)], run_check=False, shape=torch.Size([10]), stride=(1,)
)
refused(UnsupportedFeatureError, "'uneven' [10] has a part of shape", Holder(uneven=uneven))
refused(
    UnsupportedFeatureError,
    "aliased=True with a model that is spread",
    Holder(fine=fine),
    aliased=True,
)
refused(RankMismatchError, "a model in parts", Holder(fine=fine) if rank else Holder(w=counted(8)))
refused(RankMismatchError, "hold different models", Holder(**{f"fine{rank // 3}": fine}))
sparse = torch.eye(3).to_sparse()
refused(ManifestError, "tensor 'odd'", Holder(fine=fine, odd=sparse if rank == 3 else torch.eye(3)))
small = group.subgroup([0, 1])
if small is not None:
    try:
        pk.publish_weights(Holder(fine=fine), timeout=20, group=small)
    except UnsupportedFeatureError as error:
        assert "rank(s) [2, 3], which are not in the group" in str(error)
    else:
        raise AssertionError("published without half of the ranks")

# --- a change on one rank is every rank's error, and the next update works
model = Holder(fine=sharded(counted(8), line, Shard(0)), plain=counted(2))
with pk.publish_weights(model, timeout=20) as publisher:
    kept = model.plain
    if rank == 2:
        model.plain = nn.Parameter(counted(3))
    try:
        publisher.update()
    except ManifestError as error:
        assert "tensor 'plain' was float32[2] and is now float32[3]" in str(error), error
        assert (rank == 2) != ("as rank 2 reports" in str(error)), error
    else:
        raise AssertionError("the change went unseen")
    model.plain = kept
    assert publisher.update().version == 1

group.close()
