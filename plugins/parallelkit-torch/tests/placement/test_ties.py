"""Places that share memory when the loader was watched, and not later; or the other way round."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from parallelkit_torch.names import slots
from parallelkit_torch.placement import LoadedModule
from parallelkit_torch.placement.observe import places_of
from parallelkit_torch.placement.replay import Tie, ties
from torch import nn

from parallelkit.errors import ManifestError

sys.path.insert(0, str(Path(__file__).parent))
import engines
from engines import Target, Weights, manifest

sys.path.pop(0)


def by_name(target: Target, weights: Weights) -> None:
    for name, weight in weights:
        target.get_parameter(name).data.copy_(weight)


def followed(target: Target, *names: str) -> tuple[LoadedModule, dict[str, torch.Tensor]]:
    tensors = {name: torch.full((4, 2), 1.0 + i) for i, name in enumerate(names)}
    sink = LoadedModule(target, target.load_weights)
    sink.learn(manifest(tensors))
    engines.update(sink, tensors)
    engines.update(sink, tensors)
    return sink, {name: tensor + 7 for name, tensor in tensors.items()}


def tied() -> Target:
    target = Target(by_name, embed=torch.zeros(4, 2), head=torch.zeros(4, 2))
    target.register_parameter("head", target.get_parameter("embed"))
    return target


@pytest.mark.parametrize("name", ["embed", "head"])
def test_a_tie_that_was_broken_is_an_error_whichever_name_is_published(name: str) -> None:
    target = tied()
    sink, later = followed(target, "embed")
    target.register_parameter(name, nn.Parameter(torch.zeros(4, 2)))
    before = dict(engines.state(target))
    with pytest.raises(ManifestError, match="'head' is no longer tied to 'embed'"):
        engines.update(sink, later)
    assert dict(engines.state(target)) == before
    target.register_parameter("head", target.get_parameter("embed"))
    engines.update(sink, later)
    assert torch.equal(target.get_parameter("head").data, later["embed"])


def test_other_objects_over_the_same_memory_are_tied_still() -> None:
    target = tied()
    sink, later = followed(target, "embed")
    target.register_parameter("head", nn.Parameter(target.get_parameter("embed").data[:]))
    engines.update(sink, later)
    assert torch.equal(target.get_parameter("head").data, later["embed"])


def test_a_name_that_is_tied_and_gone_is_missed_by_nobody() -> None:
    target = tied()
    sink, later = followed(target, "embed")
    target.register_parameter("head", None)
    engines.update(sink, later)
    assert torch.equal(target.get_parameter("embed").data, later["embed"])


def test_a_part_that_moved_away_from_the_whole() -> None:
    target = Target(by_name, {"first": torch.zeros(2, 2)}, embed=torch.zeros(4, 2))
    target.first = target.get_parameter("embed").data[:2]
    sink, later = followed(target, "embed")
    target.first = target.get_parameter("embed").data[2:]
    with pytest.raises(ManifestError, match="'first' is no longer tied to 'embed'"):
        engines.update(sink, later)


def test_places_that_are_tied_later_are_an_error() -> None:
    target = Target(by_name, embed=torch.zeros(4, 2), head=torch.zeros(4, 2))
    sink, later = followed(target, "embed", "head")
    head = target.get_parameter("head")
    target.register_parameter("head", target.get_parameter("embed"))
    with pytest.raises(ManifestError, match="'head' shares memory with 'embed' now"):
        engines.update(sink, later)
    target.register_parameter("head", head)
    engines.update(sink, later)
    assert torch.equal(head.data, later["head"])


def test_neighbours_and_columns_of_one_memory_are_not_tied() -> None:
    memory = torch.zeros(4, 4)
    module = nn.Module()
    for name, part in (("left", memory[:, :2]), ("right", memory[:, 2:]), ("row", memory[1])):
        module.register_buffer(name, part)
    places = places_of(slots(module))
    assert ties(places, [0, 1]) == [Tie(0, 2, 16), Tie(1, 2, 8)]
    assert ties(places, [2]) == [Tie(2, 0, -16), Tie(2, 1, -8)]
    assert ties(places[:2], [0, 1]) == []
    assert ties(places, []) == []
