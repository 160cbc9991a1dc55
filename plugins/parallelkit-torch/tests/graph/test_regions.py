"""Which parts of a model are compiled, and that compiling in place can be taken off."""

from __future__ import annotations

import pytest
import torch
from parallelkit_torch.graph import regions
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from parallelkit.errors import ExecutionModeError


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.relu(self.first(x)))  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.layers = nn.ModuleList(Block() for _ in range(blocks))
        self.heads = nn.ModuleDict({"a": nn.Linear(4, 2), "b": nn.Linear(4, 2)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.heads["a"](x) + self.heads["b"](x)  # type: ignore[no-any-return]


def named(model: nn.Module, wanted: str | tuple[str, ...]) -> list[str]:
    return [name for name, _ in regions.parts(model, wanted)]


def test_auto_and_whole_are_the_whole() -> None:
    assert named(Net(), "auto") == named(Net(), "whole") == []


def test_blocks_are_what_repeats_and_has_parts() -> None:
    assert named(Net(), "blocks") == ["layers.0", "layers.1", "layers.2"]
    assert named(nn.Sequential(nn.Linear(2, 2), Net(2)), "blocks") == ["1.layers.0", "1.layers.1"]


def test_checkpoints_around_blocks() -> None:
    net = Net()
    net.layers[1] = checkpoint_wrapper(net.layers[1])
    parts = regions.parts(net, "blocks")
    assert [name for name, _ in parts] == ["layers.0", "layers.1", "layers.2"]
    assert parts[1][1] is net.layers[1]
    assert regions.history(net) == ["activation checkpoints around 1 part(s)"]


@pytest.mark.parametrize("model", [Net(1), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))])
def test_no_blocks(model: nn.Module) -> None:
    with pytest.raises(ExecutionModeError, match=r"finds no block in \w+.*regions=\['layers"):
        regions.parts(model, "blocks")


@pytest.mark.parametrize(
    ("patterns", "found"),
    [
        (("layers.*",), ["layers.0", "layers.1", "layers.2"]),
        (("embed", "heads.?"), ["embed", "heads.a", "heads.b"]),
        (("layers.[01].first",), ["layers.0.first", "layers.1.first"]),
        (("*",), ["embed", "layers", "heads"]),
        (("embed", "embed"), ["embed"]),
    ],
)
def test_patterns(patterns: tuple[str, ...], found: list[str]) -> None:
    assert named(Net(), patterns) == found


@pytest.mark.parametrize(
    ("patterns", "said"),
    [
        (("layer.*",), "named like 'layer.*'; at the top it has embed, layers, heads"),
        (("layers.*", "layers.0.first"), "'layers.0.first' and 'layers.0', which contains it"),
    ],
)
def test_patterns_that_do_not_fit(patterns: tuple[str, ...], said: str) -> None:
    with pytest.raises(ExecutionModeError, match=said):
        regions.parts(Net(), patterns)


def test_undo() -> None:
    net = Net()
    net.compile(backend="eager")
    net.layers[0].compile(backend="eager")
    assert regions.undo(net) == 2
    assert regions.undo(net) == 0
    assert regions.undo(print) == 0
    assert net.layers[0]._compiled_call_impl is None


def test_nothing_was_done_to_a_plain_model() -> None:
    assert regions.history(Net()) == []
    assert regions.history(print) == []
    assert not regions.is_sharded(Net())
