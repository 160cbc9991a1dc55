"""What goes on around recorded copies, and would leave a module that computes with old values."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from parallelkit_torch.placement import LoadedModule
from parallelkit_torch.placement.sets import Sets
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from parallelkit.errors import ManifestError
from parallelkit.weights.subscriber import SERVE_THREAD

sys.path.insert(0, str(Path(__file__).parent))
import engines
from engines import Target, Weights, manifest

sys.path.pop(0)


def values(start: float) -> dict[str, torch.Tensor]:
    return {name: torch.arange(float(start), float(start) + 3) for name in "ab"}


def learned(module: Target) -> LoadedModule:
    sink = LoadedModule(module, module.load_weights)
    sink.learn(manifest(values(1)))
    return sink


def copies(target: Target, weights: Weights) -> None:
    for name, weight in weights:
        target.get_parameter(name).data.copy_(weight)


def test_a_loader_that_drops_what_forward_derives_is_called_each_time() -> None:
    def loads(target: Target, weights: Weights) -> None:
        copies(target, weights)
        target.sum = None

    module = Target(loads, a=torch.zeros(3), b=torch.zeros(3))
    module.sum = None
    sink = learned(module)
    assert "2 by the loader" in sink.explain()
    assert "'a' comes with 'sum' of a Target, which the loader sets too" in sink.explain()
    for start in (1.0, 2.0, 3.0):
        engines.update(sink, values(start))
        assert module.sum is None
        module.sum = module.a + module.b


def test_attributes_of_other_modules_and_of_other_threads_do_not_count() -> None:
    plain = (nn.Module.__setattr__, nn.Module.__delattr__)
    mine, other, layer = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    with Sets([mine], lambda value: value == "known") as one, Sets([other], bool) as two:
        thread = threading.Thread(target=lambda: setattr(mine, "there", 1))
        thread.start()
        thread.join()
        mine.weight = nn.Parameter(torch.zeros(2, 2))
        mine.layer = layer
        del mine.layer
        mine.seen = "known"
        other.x = 0
        assert (one.found, two.found) == ("", "'x' of a Linear")
        del mine.seen
    assert one.found == "'seen' of a Linear"
    assert (nn.Module.__setattr__, nn.Module.__delattr__) == plain


def test_a_loader_that_counts_its_names_gets_them_all() -> None:
    def loads(target: Target, weights: Weights) -> None:
        given = dict(weights)
        target.get_parameter("a").data.copy_(given["a"] * (1 / len(given)))
        if "b" in given:
            target.get_parameter("b").data.copy_(given["b"])

    module = Target(loads, a=torch.zeros(3), b=torch.zeros(3))
    sink = learned(module)
    for start in (1.0, 2.0):
        engines.update(sink, values(start))
        assert torch.equal(module.a, values(start)["a"] / 2)
        assert torch.equal(module.b, values(start)["b"])


def test_a_parameter_that_turned_up_later_is_refused() -> None:
    module = Target(copies, a=torch.zeros(3), b=torch.zeros(3))
    sink = learned(module)
    engines.update(sink, values(1))
    module.adapter = nn.Linear(2, 2)
    with pytest.raises(ManifestError, match=r"parameter 'adapter.weight' is new \(and 1 more\)"):
        sink.check()
    del module.adapter
    module.register_buffer("cache", torch.zeros(1))
    sink.check()


def test_a_parameter_that_a_loader_makes_is_known_from_then_on() -> None:
    def loads(target: Target, weights: Weights) -> None:
        for name, weight in weights:
            target.get_parameter(name).data.copy_(weight * 2)
            if not hasattr(target, "scale"):
                target.scale = nn.Parameter(torch.zeros(1))
            target.scale.data.copy_(weight.max())

    module = Target(loads, a=torch.zeros(3), b=torch.zeros(3))
    sink = learned(module)
    for start in (1.0, 2.0):
        engines.update(sink, values(start))
        assert float(module.scale.detach()) == start + 2


def test_a_negated_view_in_the_place_of_a_parameter_is_refused() -> None:
    module = Target(copies, a=torch.zeros(3), b=torch.zeros(3))
    sink = learned(module)
    engines.update(sink, values(1))
    module.a = nn.Parameter(torch._neg_view(torch.zeros(3)))
    with pytest.raises(ManifestError, match="'a' is conjugated or negated, or was"):
        sink.check()


def test_what_the_serving_thread_sees_is_not_what_is_written_by() -> None:
    module = Target(copies, a=torch.zeros(3), b=torch.zeros(3))
    sink = learned(module)
    engines.update(sink, values(1))
    held = sink._replay._held
    thread = threading.Thread(target=sink.check, name=SERVE_THREAD)
    thread.start()
    thread.join()
    assert sink._replay._held is held
    sink.check()
    assert sink._replay._held is not held


def test_memory_that_a_parameter_gave_up_is_not_taken_for_it_again() -> None:
    def loads(target: Target, weights: Weights) -> None:
        for name, weight in weights:
            target.get_parameter(name).data = weight.clone()

    module = Target(loads, a=torch.zeros(3), b=torch.zeros(3))
    sink = learned(module)  # `b` gets the memory that `a` had, as often as not
    assert "2 by the loader" in sink.explain()
    engines.update(sink, values(1))
    engines.update(sink, values(2))
    assert torch.equal(module.b, values(2)["b"])


def aside(function: Callable[[], torch.Tensor]) -> torch.Tensor:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def undispatched(function: Callable[[], torch.Tensor]) -> torch.Tensor:
    with _disable_current_modes():  # type: ignore[no-untyped-call]
        return function()


@pytest.mark.parametrize("somewhere", [aside, undispatched])
def test_what_was_computed_out_of_sight_is_not_taken_for_the_loaders_own(
    somewhere: Callable[[Callable[[], torch.Tensor]], torch.Tensor],
) -> None:
    """A part of a parameter comes from the tensor itself, the rest from what a pool made of it."""

    def loads(target: Target, weights: Weights) -> None:
        for name, weight in weights:
            doubled = somewhere(partial(torch.mul, weight, 2))
            live = target.get_parameter(name).data
            live[:1].copy_(weight[:1])
            live[1:].copy_(doubled[1:])

    module = Target(loads, a=torch.zeros(3), b=torch.zeros(3))
    sink = learned(module)
    assert "'a' may be in values that were made where torch does not show how" in sink.explain()
    for start in (1.0, 2.0, 3.0):
        engines.update(sink, values(start))
        assert module.a.tolist() == [start, 2 * start + 2, 2 * start + 4]


def test_printed_values_leave_torch() -> None:
    def loads(target: Target, weights: Weights) -> None:
        for name, weight in weights:
            target.get_parameter(name).data.copy_(weight)
            target.seen.fill_(float(f"{weight[0]}"))

    module = Target(loads, {"seen": torch.zeros(1)}, a=torch.zeros(3), b=torch.zeros(3))
    sink = learned(module)
    for start in (1.0, 2.0, 3.0):
        engines.update(sink, values(start))
        assert module.seen.tolist() == [start]
