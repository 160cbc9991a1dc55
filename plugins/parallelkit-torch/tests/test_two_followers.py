"""Two followers of one memory: also where neither writes it as plain bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from parallelkit_torch.placement import LoadedModule
from parallelkit_torch.sharded_target import ShardedModuleSink
from parallelkit_torch.weights import ModuleSink
from torch import nn

import parallelkit as pk
from parallelkit.errors import QuarantinedError
from parallelkit.protocols import LocatedSink
from parallelkit.weights import writers

Pairs = Iterable[tuple[str, torch.Tensor]]
Step = Callable[[], pk.WeightSubscriber]
Follow = Callable[..., Step]


@pytest.fixture
def follow() -> Iterator[Follow]:
    """Publish a model and let a target follow it; what it gives makes one update."""
    with ExitStack() as stack:

        def start(source: nn.Module, target: nn.Module, **options: Any) -> Step:
            publisher = stack.enter_context(pk.publish_weights(source, timeout=20))
            follower = pk.subscribe_weights(target, publisher.ticket, **options)
            stack.enter_context(follower)

            def step() -> pk.WeightSubscriber:
                with torch.no_grad():
                    for parameter in source.parameters():
                        parameter.add_(1)
                thread = threading.Thread(target=publisher.update)
                thread.start()
                try:
                    follower.step(20)
                finally:
                    thread.join(30)
                return follower

            return step

        yield start


class Whole(nn.Module):
    """A target with one part, filled by a loader of a kind, and one that nobody else has."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        if kind == "channels_last":
            self.part: nn.Module = nn.Conv2d(3, 4, 3, bias=False)
            self.part.to(memory_format=torch.channels_last)
        else:
            dtype = torch.bfloat16 if kind == "casting" else torch.float32
            self.part = nn.Linear(6, 6, bias=False, dtype=dtype)
        self.rest = nn.Linear(2, 2, bias=False)
        self.register_buffer("table", torch.ones(3), persistent=False)

    def published(self) -> nn.Module:
        """What a trainer of it has."""
        model = nn.Module()
        model.rest = nn.Linear(2, 2, bias=False)
        if self.kind == "channels_last":
            model.part = nn.Conv2d(3, 4, 3, bias=False)
        elif self.kind == "fused":
            model.a, model.b = nn.Linear(6, 2, bias=False), nn.Linear(6, 4, bias=False)
        else:
            model.part = nn.Linear(6, 6, bias=False)
        return model

    def load(self, weights: Pairs) -> None:
        rows = {"a.weight": slice(0, 2), "b.weight": slice(2, 6)}
        own = dict(self.named_parameters())
        for name, tensor in weights:
            if self.kind == "replacing":
                own[name].data = tensor
            elif name in rows:
                self.part.weight.data[rows[name]].copy_(tensor)
            else:
                own[name].data.copy_(tensor * 2 if self.kind == "transforming" else tensor)

    def options(self) -> dict[str, Any]:
        return {} if self.kind == "channels_last" else {"loader": self.load}


KINDS = ["channels_last", "casting", "transforming", "fused"]


def like(part: nn.Module) -> nn.Module:
    """A model that `part` can follow by its own names."""
    source = nn.Module()
    for name, tensor in part.named_parameters():
        source.register_parameter(name, nn.Parameter(torch.ones_like(tensor)))
    return source


def around(module: nn.Module) -> nn.Module:
    """Another module of the same parameters, by names without dots."""
    other = nn.Module()
    for name, tensor in module.named_parameters():
        other.register_parameter(name.replace(".", "_"), tensor)
    return other


def refused(follower: pk.WeightSubscriber) -> None:
    assert follower.state == "quarantined"
    with pytest.raises(QuarantinedError, match="another subscriber of this process, has written"):
        with follower.use():
            pass


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("second", ["part", "whole"])
def test_each_is_refused_once_the_other_has_written(follow, kind, second):
    whole = Whole(kind)
    target = whole.part if second == "part" else around(whole)
    first = follow(whole.published(), whole, **whole.options())
    other = follow(like(target), target)
    for _ in range(3):  # also after a loader was watched
        one = first()
        assert one.state == "current"
        two = other()
        assert two.state == "current"
        refused(one)
        first()
        refused(two)


@pytest.mark.parametrize("kind", KINDS)
def test_followers_of_nothing_in_common_leave_each_other_alone(follow, kind):
    whole, beside = Whole(kind), Whole(kind)
    beside.table = whole.table  # which no loader writes
    first = follow(whole.published(), whole, **whole.options())
    other = follow(beside.published(), beside, **beside.options())
    for _ in range(3):
        assert (first().state, other().state, first().state) == ("current",) * 3


def test_a_tensor_that_the_loader_replaced_is_its_all_the_same(follow):
    whole = Whole("replacing")
    other = follow(like(whole.part), whole.part)
    two = other()
    first = follow(whole.published(), whole, **whole.options())
    first()
    refused(two)
    other()
    assert first().state == "current"
    refused(two)


@pytest.mark.parametrize(("columns", "met"), [((0, 3), True), ((4, 8), False)])
def test_columns_of_one_matrix(follow, columns, met):
    matrix = torch.zeros(5, 8)

    def view(first: int, last: int) -> nn.Module:
        module = nn.Module()
        module.weight = nn.Parameter(matrix[:, first:last])
        return module

    left, other = view(0, 4), view(*columns)
    one = follow(like(left), left)()
    two = follow(like(other), other)()
    assert two.state == "current"
    if met:
        refused(one)
    else:
        assert one.state == "current"


@pytest.mark.parametrize("kind", KINDS)
def test_what_did_not_move_is_not_looked_through_again(follow, kind, monkeypatch):
    whole = Whole(kind)
    beside = nn.Linear(2, 2)
    first, other = follow(whole.published(), whole, **whole.options()), follow(like(beside), beside)
    for _ in range(2):
        first(), other()
    looks = []
    monkeypatch.setattr(writers, "shared", lambda *memory: looks.append(memory))
    for _ in range(2):
        first(), other()
    assert looks == []


def test_sinks_tell_where_they_write():
    module = nn.Linear(2, 3)
    for sink in (ModuleSink(module), ShardedModuleSink(module)):
        assert isinstance(sink, LocatedSink)
        sink.begin()
        assert [(s.start, s.shape, s.space) for s in sink.live_memory()] == [
            (t.data_ptr(), tuple(t.shape), "cpu") for t in module.parameters()
        ]
    assert isinstance(LoadedModule(module, module.load_state_dict), LocatedSink)
