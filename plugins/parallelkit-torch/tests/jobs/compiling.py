"""Two ranks: what is sharded or replicated is compiled after that, and gives eager's results."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from parallelkit_torch import names
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import parallelkit as pk

# torch's own, where dynamo looks at an input that another block computed
warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")
group = pk.init_process_group(device="cpu", timeout=60)
assert group.world_size == 2


def mesh(axis: str) -> DeviceMesh:
    return DeviceMesh.from_group(group.native, "cpu", mesh_dim_names=(axis,))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


def replicate(model: Net) -> nn.Module:
    return DistributedDataParallel(model, process_group=group.native)


def shard(model: Net) -> nn.Module:
    axis = mesh("data_shard")
    for layer in model.layers:
        fully_shard(layer, mesh=axis)
    return fully_shard(model, mesh=axis)


def shard_one_unit(model: Net) -> nn.Module:
    return fully_shard(model, mesh=mesh("data_shard"))


def shard_checkpointed(model: Net) -> nn.Module:
    for key, layer in enumerate(model.layers):
        model.layers[key] = checkpoint_wrapper(layer)
    return shard(model)


def split(model: Net) -> nn.Module:
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for layer in model.layers:
        parallelize_module(layer, mesh("tensor"), plan)
    return model


torch.manual_seed(0)
plain = Net()
batch = torch.randn(6, 4)


def train(model: nn.Module, call: Callable[..., Any]) -> list[torch.Tensor]:
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    outputs = []
    for _ in range(3):
        output = call(batch)
        output.square().mean().backward()
        optimiser.step()
        optimiser.zero_grad()
        outputs.append(output.detach().clone())
    return outputs


expected = train(reference := copy.deepcopy(plain), reference)

# wrapping, options, parts compiled in place, graphs, breaks that are left
CASES: list[tuple[Callable[[Net], nn.Module], dict[str, Any], str, int, int]] = [
    (replicate, {"fullgraph": True}, "compiled in place: the whole", 1, 0),
    (replicate, {"regions": "blocks"}, "compiled in place: layers.0", 1, 0),
    (shard, {}, "compiled in place: layers.0, layers.1, layers.2", 1, 0),
    (shard, {"fullgraph": True}, "compiled in place: layers.0", 1, 0),
    (shard, {"regions": "whole"}, "compiled in place: the whole", 1, 1),
    (shard_one_unit, {"fullgraph": True}, "compiled in place: the whole", 1, 0),
    (shard_checkpointed, {}, "compiled in place: layers.0", 1, 0),
    (split, {"fullgraph": True}, "compiled as a whole", 1, 0),
]
BEFORE = {
    replicate: "1. replicated 2 times",
    shard: "1. sharded: 16 of 16 parameters over data_shard 2",
    shard_one_unit: "2. FSDP2 gathers 1 unit(s)",
    shard_checkpointed: "1. activation checkpoints around 3 part(s)",
    split: "1. sharded: 9 of 16 parameters over tensor 2",
}

for wrap, options, told, graphs, breaks in CASES:
    torch._dynamo.reset()
    case = f"{wrap.__name__} {options}"
    model = wrap(copy.deepcopy(plain))
    mode = pk.execution_mode("graph", backend="aot_eager", **options)
    compiled = mode.compile(model)
    outputs = train(compiled, compiled)
    for output, wanted in zip(outputs, expected, strict=True):
        torch.testing.assert_close(output, wanted, rtol=1e-4, atol=1e-5, msg=case)
    text = mode.explain()
    assert BEFORE[wrap] in text, f"{case}: {text}"
    assert text.index(BEFORE[wrap]) < text.index(told), f"{case}: {text}"
    counted = (mode.graphs, mode.recompiles, mode.graph_breaks)
    assert counted == (graphs, 0, breaks), f"{case}: {text}"
    for _ in range(2):
        compiled(batch)
    assert (mode.graphs, mode.recompiles) == (graphs, 0), f"{case}: compiled again: {text}"
    assert names.plain_names(compiled) == list(plain.state_dict()), case

# what breaks the sharded model as a whole is named, with the line that calls the unit
sharded = shard(copy.deepcopy(plain))
report = pk.check_graph(sharded, batch)
assert [found.construct for found in report.breaks] == [
    "module that FSDP2 shards inside a for block"
]
assert report.breaks[0].file == __file__
assert report.breaks[0].source == "x = layer(x)"
made = pk.compare_modes(sharded, batch, repeat=1, gradients=True, options={"backend": "aot_eager"})
assert made.outputs.max_abs < 1e-5
assert made.gradients is not None
assert made.gradients.max_abs < 1e-5
assert made.gradients.tensors == 16
assert (made.graphs, made.breaks) == (3, 0)
group.close()
