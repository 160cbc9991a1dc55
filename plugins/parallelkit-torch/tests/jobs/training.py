"""Two ranks of data parallel: what gradients, names, loaders and orders are."""

from __future__ import annotations

import copy
from typing import Any

import torch
from parallelkit_torch import names
from parallelkit_torch.weights import ModuleSink, ModuleSource
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.nn.parallel import DistributedDataParallel

import parallelkit as pk
from parallelkit.errors import RankMismatchError, UnsupportedFeatureError

group = pk.init_process_group(device="cpu", timeout=30)
rank, world = group.rank, group.world_size
assert world == 2


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))  # type: ignore[no-any-return]


def build(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Net()


# ranks with 1 and 4 units of gradient
for reduce, expected in (("mean", 2.5), ("sum", 5.0)):
    context = pk.parallel_context(data=-1, reduce=reduce)
    model = context.parallelize(Scale())
    model(torch.tensor([1.0, 4.0][rank])).backward()
    assert model.module.weight.grad.item() == expected, reduce
    assert f"gradients by {reduce}" in context.explain()

# per token: 1 token on rank 0, 4 on rank 1, whatever `reduce` is
tokens = [torch.tensor([3.0]), torch.tensor([1.0, 2.0, 3.0, 4.0])]
for reduce in ("mean", "sum"):
    context = pk.parallel_context("data", reduce=reduce)
    model = context.parallelize(Scale())
    context.weighted_mean(model(tokens[rank]).sum(), len(tokens[rank])).backward()
    assert abs(model.module.weight.grad.item() - torch.cat(tokens).mean().item()) < 1e-6

# a step of two ranks is a step of one rank on the full batch
inputs, targets = torch.randn(8, 4, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 3


def train(model: nn.Module, batches: Any, share: float) -> None:
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for x, y in batches:
        optimiser.zero_grad()
        (nn.functional.cross_entropy(model(x), y, reduction="sum") * share).backward()
        optimiser.step()


for reduce, share in (("mean", 1 / 4), ("sum", 1 / 8)):
    context = pk.parallel_context(data=-1, reduce=reduce)
    model = build(seed=rank)  # differs: rank 0's values win
    reference = build(seed=0)
    wrapped = context.parallelize(model)
    loader = context.shard(list(zip(inputs, targets, strict=True)), batch_size=4)
    train(wrapped, [batch for _ in range(3) for batch in loader], share)
    train(reference, [(inputs, targets)] * 3, 1 / 8)
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)

# order: shard, then compile; names stay plain; no recompilation over steps
counter = CompileCounter()
context = pk.parallel_context(data=-1)
plain = build()
wrapped = context.parallelize(copy.deepcopy(plain))
assert isinstance(wrapped, DistributedDataParallel)
compiled = pk.execution_mode("graph", backend=counter).compile(wrapped)
for _ in range(2):
    compiled(inputs).sum().backward()
frames = counter.frame_count
for _ in range(3):
    compiled(inputs).sum().backward()
assert counter.frame_count == frames > 0
assert names.plain_names(compiled) == list(plain.state_dict())
assert ModuleSource(compiled).manifest() == ModuleSource(plain).manifest()
assert ModuleSink(wrapped).needs() == ModuleSource(plain).manifest()

# five items on two ranks, equal numbers of batches, by data coordinate
got = {
    mode: [int(b) for b in context.shard(list(range(5)), mode=mode)]
    for mode in ("pad", "drop", "uneven")
}
assert (
    got
    == [
        {"pad": [0, 2, 4], "drop": [0, 2], "uneven": [0, 2, 4]},
        {"pad": [1, 3, 0], "drop": [1, 3], "uneven": [1, 3]},
    ][rank]
)
assert context.native["data"].size() == 2

# models that differ are an error on every rank, not a hang
for width in (4 + rank, 4):
    try:
        context.parallelize(nn.Linear(width, 2))
    except RankMismatchError as error:
        assert width != 4 or rank == 0
        assert "different models" in str(error)
    else:
        assert width == 4
try:
    context.parallelize(wrapped)
except UnsupportedFeatureError as error:
    assert "already" in str(error)
frozen = nn.Linear(2, 2).requires_grad_(False)
assert context.parallelize(frozen) is frozen
group.close()
