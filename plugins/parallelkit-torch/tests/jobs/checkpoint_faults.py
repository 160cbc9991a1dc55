"""Two ranks: what fails on one fails on both, with nothing written or loaded; and odd models.

Argument: a folder.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from models import mlp
from parallelkit_torch.parallel import checkpoint
from parallelkit_torch.parallel.checkpoint_state import model_state
from torch import nn
from torch.distributed.tensor import DTensor

import parallelkit as pk
from parallelkit.errors import CheckpointError, NotPlainError, PlanError, RankMismatchError

folder = Path(sys.argv[1])
group: Any = pk.init_process_group(device="cpu", timeout=30)
rank, world = group.rank, group.world_size
assert world == 2
plan = pk.plan(2)


def fails(kind: type[Exception], call: Callable[[], object], *said: str) -> None:
    try:
        call()
    except kind as error:
        assert all(part in str(error) for part in said), str(error)
    else:
        raise AssertionError(f"no {kind.__name__}")


def inputs(seed: int, width: int = 6) -> torch.Tensor:
    return torch.randn(4, width, generator=torch.Generator().manual_seed(seed))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 0, width: int = 6) -> None:
    model(inputs(seed, width)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    tensors = model_state(model).tensors
    return {
        n: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()
        for n, t in tensors.items()
    }


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def save(name: str, model: nn.Module, optimizer: Any = None, **options: Any) -> None:
    checkpoint.save(folder / name, model, optimizer, group=group, plan=plan, **options)


def load(name: str, model: nn.Module, optimizer: Any = None) -> dict[str, Any]:
    return checkpoint.load(folder / name, model, optimizer, group=group)


def left() -> list[str]:
    group.barrier()
    return sorted(path.name for path in folder.iterdir())


# --- arguments that one rank alone has: refused on both before anything is written

model = mlp()
fails(PlanError, lambda: checkpoint.save(folder / "x", model, group=group, plan=pk.plan(4)))
odd = {"x": object()} if rank == 1 else {"x": 1}
refused = (NotPlainError, "extra['x']") if rank == 1 else (CheckpointError, "rank 1", "extra['x']")
fails(refused[0], lambda: save("x", model, extra=odd), *refused[1:])
fails(RankMismatchError, lambda: save("x", model, extra={"x": rank}), "extra", "rank 1")
fails(RankMismatchError, lambda: save(f"x{rank}", model), "path")
fails(RankMismatchError, lambda: save("x", model, overwrite=rank == 0), "overwrite")
adam = torch.optim.Adam(model.parameters())
fails(RankMismatchError, lambda: save("x", model, adam if rank else None), "optimizer")
adam = torch.optim.Adam(model.parameters(), lr=0.1 + rank)
fails(RankMismatchError, lambda: save("x", model, adam), "options", "lr")
fails(RankMismatchError, lambda: save("x", mlp(hidden=8 + rank)), "0.weight", "rank 1")
assert left() == []

# --- a checkpoint, and one rank whose disk is full while it is replaced

adam = torch.optim.Adam(model.parameters(), lr=0.1)
step(model, adam)
first = values(model)
save("good", model, adam, extra={"step": 1} if rank == 0 else None)
fails(CheckpointError, lambda: save("good", model, adam), "overwrite=True")
step(model, adam)
if rank == 1:
    resource.setrlimit(resource.RLIMIT_FSIZE, (3_000, resource.RLIM_INFINITY))
said = ("File too large",) if rank == 1 else ("rank 1", "File too large")
fails(CheckpointError, lambda: save("good", model, adam, overwrite=True), *said)
fails(CheckpointError, lambda: save("other", model, adam), *said)
if rank == 1:
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert left() == ["good"], left()

# --- what one rank cannot load, none loads

target = mlp(seed=5)
before = values(target)
fails(CheckpointError, lambda: load("good", mlp(seed=5, hidden=9) if rank else target), "0.weight")
fails(CheckpointError, lambda: load("nothing" if rank else "good", target), "nothing")
fails(
    CheckpointError,
    lambda: load("good", target, torch.optim.Adam(target.parameters()) if rank else None),
    "some ranks load an optimizer",
)
assert same(values(target), before)
assert load("good", target) == {"step": 1}
assert same(values(target), first), "the first one is still there"

# --- sharded: uneven sizes, replaced, damaged in the part of one rank

context: Any = pk.parallel_context(data_shard=2)
sizes = {"width": 5, "hidden": 7, "classes": 1}  # a bias of one element: rank 1 has none of it
model = context.parallelize(mlp(**sizes))
sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
step(model, sgd, width=5)
first = values(model)
context.save(folder / "shards", model, sgd)
step(model, sgd, seed=1, width=5)
expected = values(model)
with torch.no_grad():
    model(inputs(0, 5))  # leaves the root's parameters gathered
context.save(folder / "shards", model, sgd, overwrite=True)
assert left() == ["good", "shards"]
other = context.parallelize(mlp(seed=5, **sizes))
with torch.no_grad():
    other(inputs(0, 5))
fresh = torch.optim.SGD(other.parameters(), lr=0.5)
context.load(folder / "shards", other, fresh)
assert same(values(other), expected)
assert fresh.param_groups[0]["momentum"] == 0.9
step(model, sgd, seed=2, width=5)
step(other, fresh, seed=2, width=5)
assert same(values(other), values(model)), "training goes on as if nothing was"

before = values(other)
group.barrier()
if rank == 0:
    file = folder / "shards" / "__1_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
    file.write_bytes(data)
group.barrier()
again = torch.optim.SGD(other.parameters(), lr=0.5)
said = ("not those that were written",) if rank == 1 else ("rank 1", "not those")
fails(CheckpointError, lambda: context.load(folder / "shards", other, again), *said)
assert same(values(other), before)
assert again.param_groups[0]["lr"] == 0.5
assert not again.state

# --- an optimizer without state stays so, and gives its lack of state; replicas of buffers


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.again = self.norm  # tied, buffers too

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.again(self.norm(x))  # type: ignore[no-any-return]


model = Norm()
model(inputs(rank))  # other running statistics on each rank
adam = torch.optim.Adam(model.parameters(), weight_decay=0.1)
save("fresh", model, adam)
assert not adam.state
assert all(parameter.grad is None for parameter in model.parameters())
other, reference = Norm(), Norm()
used = torch.optim.Adam(other.parameters(), lr=0.5)
step(other, used)
load("fresh", other, used)
reference(inputs(0))
assert same(values(other), values(reference)), "all of rank 0's"
assert not used.state
assert used.param_groups[0]["lr"] == 0.001

print("done", rank)
group.close()
