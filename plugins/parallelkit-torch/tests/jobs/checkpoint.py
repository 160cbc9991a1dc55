"""Four ranks: a checkpoint of any plan goes into any other, and training goes on as if nothing was.

Arguments: a folder, and "chain", for every plan in turn, or "all", for every pair.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import torch
from models import decoder
from parallelkit_torch.parallel.checkpoint_state import model_state, optimizer_state
from torch import nn
from torch.distributed.tensor import DTensor

import parallelkit as pk

folder = Path(sys.argv[1])
group: Any = pk.init_process_group(device="cpu", timeout=60)
assert group.world_size == 4

#: Plans by name: number of ranks, and degrees.
PLANS: dict[str, tuple[int, dict[str, int]]] = {
    "standalone": (1, {}),
    "data": (2, {"data": 2}),
    "shard": (2, {"data_shard": 2}),
    "tensor": (2, {"tensor": 2}),
    "pipeline": (2, {"pipeline": 2}),
    "shard-tensor": (4, {"data_shard": 2, "tensor": 2}),
    "data-shard": (4, {"data": 2, "data_shard": 2}),
    "pipeline-shard": (4, {"pipeline": 2, "data_shard": 2}),
}
members = {n: group if n == 4 else group.subgroup(list(range(n))) for n in (1, 2, 4)}
contexts = {
    name: pk.parallel_context(group=members[ranks], **degrees)
    for name, (ranks, degrees) in PLANS.items()
    if members[ranks] is not None
}

generator = torch.Generator().manual_seed(7)
tokens = torch.randint(0, 32, (9, 8, 6), generator=generator)  # steps, items, length


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def build(seed: int) -> nn.Module:
    model = decoder(seed)
    model.model.norm.weight.requires_grad_(False)
    return model


def optimizer_of(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """Two groups; a large eps, since Adam makes much of gradients that are nothing but rounding."""
    decayed = [p for n, p in model.named_parameters() if p.requires_grad and not n.endswith("bias")]
    others = [p for n, p in model.named_parameters() if p.requires_grad and n.endswith("bias")]
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": lr / 7}],
        lr=lr,
        eps=1e-3,
    )


def train(context: Any, model: nn.Module, optimizer: Any, steps: range) -> None:
    parts = context.plan.data_shard_count
    part = context.plan.data_shard_index(context.group.rank)
    for step in steps:
        batch = tokens[step].chunk(parts)[part]
        context.train_step(model, batch, batch, loss=loss)
        optimizer.step()
        optimizer.zero_grad()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    found = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found.detach().clone()


def snapshot(model: nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    """Everything on this rank, whole, by name."""
    held = model_state(model)
    found = {name: whole(tensor) for name, tensor in held.tensors.items()}
    for name, state in optimizer_state(optimizer, held).tensors.items():
        found |= {f"{name}.{key}": whole(tensor) for key, tensor in state.items()}
    return found


def compare(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], what: str) -> None:
    assert found, what
    for name, value in found.items():
        torch.testing.assert_close(
            value, expected[name], rtol=1e-4, atol=2e-6, msg=lambda m, n=name: f"{what}: {n}: {m}"
        )


# what one process does, on every rank by itself, after each step
reference = build(0)
optimizer = optimizer_of(reference, 0.01)
after = [snapshot(reference, optimizer)]
for step in range(len(tokens)):
    loss(reference(tokens[step]), tokens[step]).backward()
    optimizer.step()
    optimizer.zero_grad()
    after.append(snapshot(reference, optimizer))


def chain() -> None:
    """Train one step under each plan, each going on from the checkpoint of the one before."""
    previous = ""
    for done, name in enumerate([*PLANS, "standalone"]):
        if name in contexts:
            context = contexts[name]
            model = context.parallelize(build(done))
            optimizer = optimizer_of(model, 0.5 if previous else 0.01)
            if previous:
                assert context.load(folder / previous, model, optimizer) == {"step": done}
                compare(snapshot(model, optimizer), after[done], f"{previous} into {name}")
            train(context, model, optimizer, range(done, done + 1))
            previous = f"{done}-{name}"
            context.save(folder / previous, model, optimizer, extra={"step": done + 1})
            compare(snapshot(model, optimizer), after[done + 1], f"{name}, going on")
        previous = f"{done}-{name}"
        group.barrier()


def save(name: str) -> None:
    context = contexts[name]
    model = context.parallelize(build(0))
    optimizer = optimizer_of(model, 0.01)
    train(context, model, optimizer, range(2))
    before = snapshot(model, optimizer)
    extra = {"step": 2, "loader": {"epoch": 1, "seeds": [1, 2]}, "best": float("inf")}
    context.save(folder / name, model, optimizer, extra=extra if context.group.rank == 0 else None)
    compare(snapshot(model, optimizer), before, f"saving {name} changes nothing")
    train(context, model, optimizer, range(2, 4))
    compare(snapshot(model, optimizer), after[4], f"{name} at 4 steps")


def load(source: str, name: str) -> None:
    context, what = contexts[name], f"{source} into {name}"
    model = context.parallelize(build(5))
    optimizer = optimizer_of(model, 0.5)
    assert context.load(folder / source, model, optimizer)["loader"]["seeds"] == [1, 2]
    assert [g["lr"] for g in optimizer.param_groups] == [0.01, 0.01], what
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.1, 0.01 / 7], what
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999), what
    compare(snapshot(model, optimizer), after[2], what)
    train(context, model, optimizer, range(2, 4))
    compare(snapshot(model, optimizer), after[4], f"{what}, going on")


if sys.argv[2] == "chain":
    chain()
    names = [f"{done}-{name}" for done, name in enumerate([*PLANS, "standalone"])]
else:
    names = list(PLANS)
    for name in contexts:
        save(name)
    group.barrier()
    for source, name in itertools.product(names, contexts):
        load(source, name)
group.barrier()
if group.rank == 0:
    assert sorted(p.name for p in folder.iterdir()) == sorted(names), "nothing else is left"
    print("done")
group.close()
