"""Parallel contexts in a world of one, and everything that is refused before anything runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from parallelkit_torch.group import TorchProcessGroup
from parallelkit_torch.parallel.context import TorchParallelContext
from parallelkit_torch.parallel.setup import setup_parallel_context
from torch import nn

from parallelkit.errors import (
    DataShardError,
    ExecutionModeError,
    GradientError,
    LayoutError,
    PlanError,
    RankMismatchError,
    UnsupportedFeatureError,
)
from parallelkit.plan import AXES, plan
from parallelkit.protocols import ParallelContext
from parallelkit.specs import ContextSpec

ALL_AXES = (*AXES, "expert")


class Wide:
    """A group that says it is wide, for what is refused before communication."""

    framework, device, backend, rank = "torch", "cpu", "gloo", 0

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size


def make(group: Any, mode: str | None = None, **changes: Any) -> TorchParallelContext:
    degrees = {k: changes.pop(k) for k in ALL_AXES if k in changes}
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
    assert "Linear, what was done to it:\n  1. " in context.explain()
    assert [int(b) for b in context.shard(list(range(3)))] == [0, 1, 2]
    context.reset()
    context.reset()


def test_native_is_a_mesh_with_every_axis(group: TorchProcessGroup) -> None:
    mesh = make(group).native
    assert mesh.mesh_dim_names == AXES
    assert mesh.size() == 1
    for axis in AXES:  # any view of one axis, whatever the degrees
        assert mesh[axis].size() == 1
    assert mesh["data", "data_shard"].mesh_dim_names == ("data", "data_shard")


@pytest.mark.parametrize("axis", ["context", "expert"])
def test_planned_but_not_run_axes_are_refused_by_name(axis: str) -> None:
    with pytest.raises(UnsupportedFeatureError, match=f"'{axis}'.*cannot run it yet"):
        make(Wide(2), "hybrid", **{axis: 2})


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
    with pytest.raises(UnsupportedFeatureError, match="'data_shards'; did you mean 'data_shard'"):
        make(Wide(2), options={"data_shards": -1})


def test_options_of_what_the_plan_does_not_use() -> None:
    """Those of torch's wrappers are refused; ours are kept, so that one degree can change alone."""
    with pytest.raises(UnsupportedFeatureError, match="no option 'static_graph'"):
        make(Wide(2), data_shard=2, options={"static_graph": True})
    with pytest.raises(UnsupportedFeatureError, match="no option 'reshard_after_forward'"):
        make(Wide(2), options={"reshard_after_forward": False})
    context = make(Wide(2), options={"layouts": {"a": "colwise"}, "schedule": "1f1b"})
    assert "not used under this plan: layouts, schedule" in context.explain()


@pytest.mark.parametrize(
    ("degrees", "options", "error", "match"),
    [
        ({"pipeline": 2}, {"schedule": "2f2b"}, PlanError, "'2f2b'; it is one of 1f1b"),
        ({"pipeline": 2}, {"virtual_stages": 2}, PlanError, "schedule 'interleaved' has two"),
        ({"pipeline": 2}, {"virtual_stages": 0}, PlanError, "a positive integer"),
        ({"pipeline": 2}, {"schedule": "interleaved", "virtual_stages": 1}, PlanError, "two or"),
        ({"data_shard": 2}, {"blocks": "layers.*"}, PlanError, "it is a list"),
        ({"tensor": 2}, {"layouts": ["a"]}, LayoutError, "maps patterns to styles"),
    ],
)
def test_values_of_options(
    degrees: dict[str, int], options: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        make(Wide(2), options=options, **degrees)


def test_semi_auto_takes_the_users_layouts() -> None:
    with pytest.raises(LayoutError, match="takes your layouts"):
        make(Wide(2), "semi_auto", tensor=2)


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


def test_clip_takes_positive_numbers(group: TorchProcessGroup) -> None:
    context = make(group)
    model = context.parallelize(nn.Linear(2, 2))
    for bad in (0, -1.0, "1", True, float("nan")):
        with pytest.raises(PlanError, match="max_norm"):
            context.clip_grad_norm_(model, bad)  # type: ignore[arg-type]


def test_gradients_are_applied_and_forgotten(group: TorchProcessGroup) -> None:
    context = make(group)
    model = context.parallelize(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    before = model.weight.detach().clone()
    context.train_step(model, torch.ones(1, 2), loss=lambda x, _: x.sum())
    gradient = model.weight.grad.clone()
    context.apply_gradients(model, optimizer)
    torch.testing.assert_close(model.weight.detach(), before - 0.5 * gradient)
    assert model.weight.grad is None
    with pytest.raises(GradientError, match="no gradient in any parameter"):
        context.apply_gradients(model, optimizer)
    with pytest.raises(UnsupportedFeatureError, match="was not given back by parallelize"):
        context.apply_gradients(nn.Linear(2, 2), optimizer)


def test_models_of_others_are_refused(group: TorchProcessGroup) -> None:
    context, stranger = make(group), nn.Linear(2, 2)
    for call in (
        lambda: context.train_step(stranger, torch.ones(1, 2), loss=lambda x, _: x.sum()),
        lambda: context.accumulate(stranger, sync=True),
        lambda: context.clip_grad_norm_(stranger, 1.0),
    ):
        with pytest.raises(UnsupportedFeatureError, match="was not given back by parallelize"):
            call()


def test_a_model_without_values(group: TorchProcessGroup) -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(UnsupportedFeatureError, match="meta device"):
        make(group).parallelize(model)


def test_seed_depends_on_the_data_part_alone(group: TorchProcessGroup) -> None:
    context = make(group)
    first = context.seed(3), torch.rand(1)
    assert (context.seed(3), torch.rand(1)) == first
    assert context.seed(4) != first[0]


@pytest.mark.parametrize("microbatches", [1, 2, 3, 5, 9])
def test_microbatches_change_nothing(group: TorchProcessGroup, microbatches: int) -> None:
    context = make(group)
    model = context.parallelize(nn.Linear(3, 2))
    x, y = torch.randn(5, 3), torch.tensor([0, 1, 1, 0, 1])
    loss = nn.functional.cross_entropy
    expected = loss(model(x), y)
    expected.backward()
    gradient = model.weight.grad.clone()
    model.zero_grad()
    value = context.train_step(model, x, y, loss=loss, microbatches=microbatches)
    torch.testing.assert_close(value, expected.detach())
    torch.testing.assert_close(model.weight.grad, gradient)


def test_a_mapping_goes_by_name(group: TorchProcessGroup) -> None:
    context = make(group)
    model = context.parallelize(nn.Linear(3, 2))
    x = torch.randn(4, 3)
    loss = lambda output, target: output.square().mean()  # noqa: E731
    values = [context.train_step(model, inputs, loss=loss) for inputs in (x, {"input": x})]
    torch.testing.assert_close(*values)


@pytest.mark.parametrize("weight", ["x", -1, float("nan"), float("inf"), True])
def test_weights_are_numbers(group: TorchProcessGroup, weight: Any) -> None:
    context = make(group)
    with pytest.raises(PlanError, match="weight is"):
        context.weighted_mean(torch.ones(()), weight)


def test_batches_that_cannot_be_cut(group: TorchProcessGroup) -> None:
    context = make(group)
    model = context.parallelize(nn.Linear(3, 2))

    def step(x: Any, y: Any, **options: Any) -> None:
        context.train_step(model, x, y, loss=lambda a, b: a.sum(), **options)

    with pytest.raises(DataShardError, match="at least 1"):
        step(torch.ones(0, 3), torch.ones(0))
    with pytest.raises(DataShardError, match=r"\[2, 3\]"):
        step(torch.ones(2, 3), torch.ones(3))
    with pytest.raises(DataShardError, match="ndarray cannot be cut"):
        step(torch.ones(2, 3), torch.ones(2).numpy(), microbatches=2)
    with pytest.raises(PlanError, match="without dims"):
        context.train_step(model, torch.ones(2, 3), loss=lambda a, b: a)
    for bad in (0, -1, 1.5, True):
        with pytest.raises(PlanError, match="microbatches"):
            step(torch.ones(2, 3), None, microbatches=bad)
