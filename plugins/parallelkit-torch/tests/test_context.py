"""Parallel contexts in a world of one, and everything that is refused before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from parallelkit_torch.context import TorchParallelContext, setup_parallel_context
from parallelkit_torch.group import TorchProcessGroup, init_process_group
from torch import nn

from parallelkit.errors import (
    ExecutionModeError,
    PlanError,
    RankMismatchError,
    UnsupportedFeatureError,
)
from parallelkit.plan import plan
from parallelkit.plugin import GroupSpec
from parallelkit.protocols import ParallelContext
from parallelkit.specs import ContextSpec


class Wide:
    """A group that says it is wide, for what is refused before communication."""

    framework, device, backend, rank = "torch", "cpu", "gloo", 0

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size


@pytest.fixture
def group(spec: Callable[..., GroupSpec]) -> Iterator[TorchProcessGroup]:
    with init_process_group(spec()) as opened:
        yield opened


def make(group: Any, mode: str | None = None, **changes: Any) -> TorchParallelContext:
    degrees = {k: changes.pop(k) for k in ("data", "tensor", "data_shard") if k in changes}
    planned = plan(group.world_size, mode, **degrees)
    return setup_parallel_context(ContextSpec(plan=planned, mode=planned.mode, **changes), group)


@pytest.mark.parametrize("mode", ["standalone", "data", None])
def test_world_of_one_is_the_model_itself(group: TorchProcessGroup, mode: str | None) -> None:
    context = make(group, mode)
    assert isinstance(context, ParallelContext)
    model = nn.Linear(2, 2)
    assert context.parallelize(model) is model
    assert context.mode == context.effective
    assert "world of one" in context.explain()
    assert [int(b) for b in context.shard(list(range(3)))] == [0, 1, 2]
    context.reset()
    context.reset()


def test_native_is_a_mesh(group: TorchProcessGroup) -> None:
    mesh = make(group).native
    assert mesh.mesh_dim_names == ("data",)
    assert mesh.size() == 1


def test_other_modes_and_axes_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedFeatureError, match=r"no mode 'auto'.*standalone, data"):
        make(Wide(2), "auto")
    with pytest.raises(UnsupportedFeatureError, match=r"axis 'tensor' \(tensor=2\)"):
        make(Wide(4), "hybrid", tensor=2)
    with pytest.raises(UnsupportedFeatureError, match="'data_shard'"):
        make(Wide(2), "hybrid", data_shard=2, fallback=True)


def test_fallback_takes_the_nearest_and_says_so() -> None:
    context = make(Wide(2), "semi_auto", fallback=True)
    assert (context.mode, context.effective) == ("semi_auto", "data")
    assert "effective 'data'" in context.explain()


def test_plan_of_another_world() -> None:
    with pytest.raises(PlanError, match="for 4 ranks and the group has 2"):
        setup_parallel_context(ContextSpec(plan=plan(4), mode="data"), Wide(2))  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="'avg'"):
        make(Wide(2), reduce="avg")


def test_unknown_options() -> None:
    with pytest.raises(UnsupportedFeatureError, match="did you mean 'bucket_cap_mb'"):
        make(Wide(2), options={"bucket_cap": 1})
    for ours in ("process_group", "device_ids", "module"):
        with pytest.raises(UnsupportedFeatureError, match=f"'{ours}'"):
            make(Wide(2), options={ours: None})
    assert "static_graph=True" in make(Wide(2), options={"static_graph": True}).explain()


def test_what_cannot_be_parallelized(group: TorchProcessGroup) -> None:
    context = make(group)
    with pytest.raises(ExecutionModeError, match="parallelize first, then compile"):
        context.parallelize(torch.compile(nn.Linear(1, 1), backend="eager"))
    with pytest.raises(UnsupportedFeatureError, match="a dict"):
        context.parallelize({})  # type: ignore[arg-type]


def test_weighted_mean_alone(group: TorchProcessGroup) -> None:
    context = make(group, reduce="sum")
    assert float(context.weighted_mean(torch.tensor(6.0), 4)) == 1.5
    with pytest.raises(RankMismatchError, match="not above 0"):
        context.weighted_mean(torch.tensor(0.0), 0)
