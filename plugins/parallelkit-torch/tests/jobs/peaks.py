"""Two ranks: the memory model of mode auto against the peak of real training steps."""

from __future__ import annotations

import gc
import json
import sys
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from models import decoder
from parallelkit_torch.parallel import pipeline, tensor
from parallelkit_torch.parallel.shape import describe_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import parallelkit as pk
from parallelkit import costs
from parallelkit.shapes import Training

SIZES = {"vocab": 512, "dim": 64, "heads": 4, "kv_heads": 2, "layers": 3}
SHORT, LONG = 4, 32
TOLERANCE = 0.15


class Alive(TorchDispatchMode):
    """Looks, at every operation, at all storages seen so far that are alive, and what they hold.

    Unlike the counting of `parallelkit_torch.parallel.measure`, which it checks: storages that
    are resized, as FSDP2 does, and those that C++ made, as DDP's buckets are, count as they are.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.peak = 0

    def see(self, tree: Any) -> None:
        for leaf in tree_leaves(tree):
            if isinstance(leaf, torch.Tensor):
                local = leaf._local_tensor if isinstance(leaf, DTensor) else leaf
                storage = local.untyped_storage()
                key = storage._cdata
                if key not in self.seen:
                    self.seen[key] = weakref.ref(storage, lambda _, key=key: self.seen.pop(key))

    def look(self) -> None:
        refs = list(self.seen.values())  # storages may go meanwhile
        alive = [storage for ref in refs if (storage := ref()) is not None]
        self.peak = max(self.peak, sum(storage.nbytes() for storage in alive))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.see((args, kwargs))
        out = func(*args, **(kwargs or {}))
        self.see(out)
        self.look()
        return out


def loss_of(scores: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(scores.flatten(0, 1), tokens.flatten())


def measured(model: nn.Module, tokens: torch.Tensor, microbatches: int) -> int:
    """Peak bytes of the second step, when the optimizer has its state, on the rank with most."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    alive = Alive()
    gc.collect()  # cycles of an earlier case would die at any moment
    for _ in range(2):
        alive.peak = 0
        with alive:
            alive.see([*model.parameters(), *model.buffers(), tokens])
            if isinstance(model, pipeline.PipelineModule):
                pipeline.step(model, tokens, tokens, loss=loss_of, microbatches=microbatches)
            else:
                for part in tokens.chunk(microbatches):
                    output = model(part)
                    loss_of(output, part).backward()
                    del output
            optimizer.step()
            optimizer.zero_grad()
    return int(group.all_reduce(torch.tensor([alive.peak]), "max"))


def parts(model: nn.Module) -> nn.Module:
    tensor.apply(model, init_device_mesh("cpu", (2,)), tensor.styles(model))
    return model


def stages(model: nn.Module) -> nn.Module:
    cut = costs.stages(shape[LONG], 2)
    return pipeline.cut_for(model, [[unit.name for unit in stage] for stage in cut], group=group)


def shards(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (group.world_size,), mesh_dim_names=("data_shard",))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


WAYS: dict[str, tuple[Callable[[nn.Module], nn.Module], dict[str, int]]] = {
    "standalone": (lambda model: model, {"data": 1}),
    "replicas": (DistributedDataParallel, {"data": 2}),
    "shards": (shards, {"data_shard": 2}),
    "parts": (parts, {"tensor": 2}),
    "stages": (stages, {"pipeline": 2}),
}

group = pk.init_process_group(device="cpu", timeout=60)
shape = {
    length: describe_model(decoder(**SIZES), torch.zeros(2, length, dtype=torch.long))
    for length in (SHORT, LONG)
}
found = []
for name in [way for way in WAYS if way in sys.argv] or list(WAYS):
    spread, degrees = WAYS[name]
    plan = pk.plan(1 if name == "standalone" else 2, "auto", **degrees)
    for items, length, microbatches in ((2, SHORT, 2), (8, LONG, 2), (8, LONG, 1)):
        if microbatches == 1 and name == "stages":  # 1F1B needs two
            continue
        if microbatches == 2 and length == LONG and name in ("standalone", "replicas"):
            continue  # the same formula as for parts
        training = Training(batch=items * plan.data_shard_count, state=2.0)
        cut = costs.stages(shape[length], plan.pipeline)
        reckoned = costs.memory(cut, plan, training, microbatches)
        tokens = torch.randint(0, SIZES["vocab"], (items, length))
        peak = measured(spread(decoder(**SIZES)), tokens, microbatches)
        found.append([name, items, length, microbatches, reckoned.total, peak])
        if "--verbose" in sys.argv and group.rank == 0:
            print(found[-1], round(reckoned.total / peak, 3), reckoned, file=sys.stderr)
for name, *case, reckoned_total, peak in found:
    assert abs(reckoned_total / peak - 1) < TOLERANCE, (name, case, reckoned_total, peak)

# mode auto itself: what was reckoned runs, and all ranks agree although one has less memory
example = torch.zeros(2, SHORT, dtype=torch.long)
for memory in (10**8, 3 * 10**6):
    context = pk.parallel_context(
        "auto",
        model=decoder(**SIZES),
        example=example,
        memory=memory - group.rank * 10**5,
        reserve=0.0,
        global_batch=16,
    )
    assert context.mode == "auto"
    assert "reckoned, not measured" in context.explain()
    assert (context.plan.data == 2) == (memory == 10**8)
    tokens = torch.randint(0, SIZES["vocab"], (16 // context.plan.data_shard_count, SHORT))
    spread_out = context.parallelize(decoder(**SIZES))
    value = context.train_step(spread_out, tokens, tokens, loss=loss_of, microbatches=4)
    assert torch.isfinite(value)
print(json.dumps(found))
group.close()
