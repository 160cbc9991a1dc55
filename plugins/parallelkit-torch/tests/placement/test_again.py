"""A loader that does otherwise in a later update: noticed, never half a version taken for one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from parallelkit_torch.placement import LoadedModule
from torch import nn

from parallelkit.errors import LoaderError

sys.path.insert(0, str(Path(__file__).parent))
import engines
from engines import Target, Weights, manifest

sys.path.pop(0)

Act = Callable[[Target], None]


def scaled(target: Target, weights: Weights) -> None:
    """Copies `plain`, and computes `scaled`, which stays with the loader."""
    for name, weight in weights:
        made = weight * 2 if name == "scaled" else weight
        target.get_parameter(name).data.copy_(made)


def published(start: float) -> dict[str, torch.Tensor]:
    return {n: torch.full((4, 3), float(start)) for n in ("plain", "scaled")}


def module(loads: Callable[[Target, Weights], None] = scaled) -> Target:
    return Target(loads, plain=torch.zeros(4, 3), scaled=torch.zeros(4, 3))


def learned(target: Target) -> LoadedModule:
    sink = LoadedModule(target, target.load_weights)
    sink.learn(manifest(published(1)))
    engines.update(sink, published(1))
    engines.update(sink, published(2))
    assert torch.equal(target.get_parameter("plain").data, published(2)["plain"])
    assert torch.equal(target.get_parameter("scaled").data, 2 * published(2)["scaled"])
    return sink


@pytest.mark.parametrize("rows", [0, 3])
def test_a_loader_that_writes_less_the_next_time(rows: int) -> None:
    def less(target: Target, weights: Weights) -> None:
        for name, weight in weights:
            target.get_parameter(name).data[:rows].copy_(2 * weight[:rows])

    target = module()
    sink = learned(target)
    target.loads = less
    said = "only a part of 'scaled' to 'scaled'" if rows else "nothing of 'scaled' to 'scaled'"
    with pytest.raises(LoaderError, match=f"the loader wrote {said}, which it did when"):
        engines.update(sink, published(3))
    target.loads = scaled
    engines.update(sink, published(4))
    assert torch.equal(target.get_parameter("scaled").data, 2 * published(4)["scaled"])


def test_a_loader_that_writes_the_same_in_other_portions() -> None:
    def in_rows(target: Target, weights: Weights) -> None:
        for name, weight in weights:
            for row, values in enumerate(weight):
                target.get_parameter(name).data[row].copy_(2 * values)

    target = module()
    sink = learned(target)
    for target.loads, start in ((in_rows, 3.0), (scaled, 4.0), (in_rows, 5.0)):
        engines.update(sink, published(start))
        assert torch.equal(target.get_parameter("scaled").data, 2 * published(start)["scaled"])


def fill(target: Target) -> None:
    target.get_parameter("plain").data[1:2].zero_()


def copy(target: Target) -> None:
    scale = target.get_parameter("scaled").data
    target.get_parameter("plain").data[:, :1].copy_(scale[:, :1])


def other_memory(target: Target) -> None:
    target.get_parameter("plain").data = torch.zeros(4, 3)


@pytest.mark.parametrize("act", [fill, copy, other_memory])
def test_a_loader_that_writes_over_what_was_recorded(act: Act) -> None:
    def more(target: Target, weights: Weights) -> None:
        scaled(target, weights)
        act(target)

    target = module()
    sink = learned(target)
    target.loads = more
    for start in (3.0, 4.0):  # in every update, not in the first alone
        with pytest.raises(LoaderError, match="the loader wrote into 'plain' too, of which"):
            engines.update(sink, published(start))
    target.loads = scaled
    engines.update(sink, published(5))
    assert torch.equal(target.get_parameter("plain").data, published(5)["plain"])


def test_beside_recorded_rows_of_the_same_parameter() -> None:
    """Of one parameter some rows are recorded and the others computed: these may be written."""

    def loads(target: Target, weights: Weights) -> None:
        for name, weight in weights:
            rows = slice(4, 8) if name == "scaled" else slice(0, 4)
            made = weight * 2 if name == "scaled" else weight
            target.get_parameter("both").data[rows].copy_(made)

    target = Target(loads, both=torch.zeros(8, 3))
    sink = LoadedModule(target, target.load_weights)
    sink.learn(manifest(published(1)))
    for start in (1.0, 2.0):
        engines.update(sink, published(start))
        tensors = published(start)
        wanted = torch.cat([tensors["plain"], 2 * tensors["scaled"]])
        assert torch.equal(target.get_parameter("both").data, wanted)

    def one_row_up(target: Target, weights: Weights) -> None:
        loads(target, weights)
        target.get_parameter("both").data[3].fill_(9)

    target.loads = one_row_up
    with pytest.raises(LoaderError, match="the loader wrote into 'both' too"):
        engines.update(sink, published(3))


def test_a_function_that_does_otherwise_with_some_names_gets_them_all() -> None:
    target = module()

    def loads(weights: Weights) -> None:
        pairs = list(weights)
        scaled(target, pairs)
        if len(pairs) == 1:
            target.get_parameter("plain").data.zero_()

    sink = LoadedModule(target, loads)
    sink.learn(manifest(published(1)))
    engines.update(sink, published(1))
    with pytest.raises(LoaderError, match="the loader wrote into 'plain' too"):
        engines.update(sink, published(2))
    engines.update(sink, published(3))
    assert torch.equal(target.get_parameter("plain").data, published(3)["plain"])
    assert isinstance(target.get_parameter("plain"), nn.Parameter)
