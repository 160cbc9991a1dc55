"""Parallel contexts in a world of one, and everything that is refused before anything runs."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn
from mindspore.train import Model
from parallelkit_mindspore.parallel.context import MindSporeParallelContext
from parallelkit_mindspore.parallel.setup import setup_parallel_context

from parallelkit.errors import (
    CheckpointError,
    ContextOrderError,
    DataShardError,
    ExecutionModeError,
    GradientError,
    LayoutError,
    MovedParameterError,
    NotPlainError,
    PlanError,
    RankMismatchError,
    UnsupportedFeatureError,
    WrongThreadError,
)
from parallelkit.plan import AXES, plan
from parallelkit.protocols import ParallelContext
from parallelkit.specs import ContextSpec

ALL_AXES = (*AXES, "expert")


def make(group: Any, mode: str | None = None, **changes: Any) -> MindSporeParallelContext:
    degrees = {k: changes.pop(k) for k in ALL_AXES if k in changes}
    planned = plan(group.world_size, mode, **degrees)
    spec = ContextSpec(plan=planned, mode=planned.mode, **changes)
    context = setup_parallel_context(spec, group)
    assert isinstance(context, MindSporeParallelContext)
    return context


def tensor(*shape: int) -> ms.Tensor:
    return ms.Tensor(np.random.RandomState(0).uniform(-1, 1, shape).astype(np.float32))


def square(output: Any, target: Any) -> Any:
    return (output * output).mean()


ENTROPY = nn.CrossEntropyLoss()


@pytest.mark.parametrize("mode", ["standalone", "data", None])
def test_world_of_one_is_the_model_itself(group: Any, mode: str | None) -> None:
    context = make(group, mode)
    assert isinstance(context, ParallelContext)
    model = nn.Dense(2, 2)
    assert context.parallelize(model) is model
    assert context.mode == context.effective
    assert "world of one" in context.explain()
    assert "left alone" in context.explain()
    assert "Dense, what was done to it:\n  1. nothing to replicate" in context.explain()
    assert context.native == {}
    assert [int(b[0][0]) for b in context.shard([(0,), (1,), (2,)])] == [0, 1, 2]
    assert isinstance(context.grad_reducer(model.trainable_params()), nn.Identity)
    context.reset()
    context.reset()


@pytest.mark.parametrize("axis", ["pipeline", "data_shard", "context", "expert"])
def test_axes_that_do_not_run_are_refused_by_name(wide: Any, axis: str) -> None:
    with pytest.raises(UnsupportedFeatureError, match=f"no axis '{axis}'.*data and tensor"):
        make(wide(2), "hybrid", **{axis: 2})


def test_plan_of_another_world(wide: Any) -> None:
    with pytest.raises(PlanError, match="for 4 ranks and the group has 2"):
        setup_parallel_context(ContextSpec(plan=plan(4), mode="data"), wide(2))
    with pytest.raises(PlanError, match="'avg'"):
        make(wide(2), reduce="avg")


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"gradient_mean": True}, UnsupportedFeatureError, "did you mean 'gradients_mean'"),
        ({"device_num": 2}, UnsupportedFeatureError, "no option 'device_num'"),
        ({"tensors": 2}, UnsupportedFeatureError, "did you mean 'tensor'"),
        ({"gradients_mean": False}, PlanError, "contradicts reduce='mean'"),
        ({"gradients_mean": 1}, PlanError, "True or False"),
        ({"parameter_broadcast": "yes"}, PlanError, "True or False"),
        ({"all_reduce_fusion_config": [3, 2]}, PlanError, "ascending"),
        ({"all_reduce_fusion_config": 3}, PlanError, "ascending"),
        ({"all_reduce_fusion_config": [True]}, PlanError, "ascending"),
        ({"layouts": ["a"]}, LayoutError, "maps patterns to styles"),
    ],
)
def test_options(wide: Any, options: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        make(wide(2), options=options)
    assert ms.get_auto_parallel_context("parallel_mode") == "stand_alone"


def test_what_is_set_is_seen_and_put_back(wide: Any) -> None:
    ms.set_auto_parallel_context(enable_alltoall=True)
    options = {"parameter_broadcast": True, "all_reduce_fusion_config": [1, 3]}
    context = make(wide(2), options={**options, "layouts": {"a": "colwise"}})
    wanted = {"parallel_mode": "data_parallel", "gradients_mean": True, "device_num": 2, **options}
    assert context.native == wanted
    assert {name: ms.get_auto_parallel_context(name) for name in wanted} == wanted
    assert "not used under this plan: layouts" in context.explain()
    assert "parallel_mode='data_parallel'" in context.explain()
    context.reset()
    assert ms.get_auto_parallel_context("gradients_mean") is False
    assert ms.get_auto_parallel_context("all_reduce_fusion_config") == []
    assert ms.get_auto_parallel_context("enable_alltoall") is True  # the user's own
    ms.reset_auto_parallel_context()


def test_contexts_are_layers(wide: Any) -> None:
    first, second = make(wide(2), reduce="sum"), make(wide(4))
    assert ms.get_auto_parallel_context("device_num") == 4
    first.reset()  # not the one in force
    assert ms.get_auto_parallel_context("device_num") == 4
    third = make(wide(2), tensor=2)
    assert ms.get_auto_parallel_context("parallel_mode") == "hybrid_parallel"
    third.reset()
    assert ms.get_auto_parallel_context("parallel_mode") == "data_parallel"
    assert ms.get_auto_parallel_context("gradients_mean") is True
    second.reset()


def test_a_group_inside_the_world_leaves_the_settings_alone(wide: Any) -> None:
    inner = wide(2)
    inner.native = "some_group"
    context = make(inner)
    assert context.native == {}
    assert "grad_reducer" in context.explain()
    context.reset()


def test_settings_that_the_user_changes_afterwards(wide: Any) -> None:
    context = make(wide(2))
    made = context.native
    context.grad_reducer([])
    ms.set_auto_parallel_context(gradients_mean=False)
    assert context.native == made | {"gradients_mean": False}
    assert "but gradients_mean was set to False since" in context.explain()
    for call in (
        lambda: context.parallelize(nn.Dense(2, 2)),
        lambda: context.train_step(nn.Dense(2, 2), tensor(1, 2), loss=square),
        lambda: context.grad_reducer([]),
    ):
        with pytest.raises(ContextOrderError, match="gradients_mean is False, not True"):
            call()
    ms.set_auto_parallel_context(gradients_mean=True)
    context.grad_reducer([])
    ms.reset_auto_parallel_context()
    with pytest.raises(ContextOrderError, match="parallel_mode is 'stand_alone'"):
        context.grad_reducer([])
    newer = make(wide(4))  # another context of ours is no such change
    assert context.native == made
    newer.reset()
    context.reset()


def steps() -> dict[str, Any]:
    """Things that read the settings when they are built."""
    model = nn.Dense(2, 2)
    optimizer = nn.Momentum(model.trainable_params(), 0.1, 0.9)
    return {
        "TrainOneStepCell": nn.TrainOneStepCell(nn.WithLossCell(model, ENTROPY), optimizer),
        "Model": Model(model, ENTROPY, optimizer),
    }


@pytest.mark.parametrize("kind", ["TrainOneStepCell", "Model"])
def test_steps_that_are_older_than_the_context(wide: Any, kind: str) -> None:
    thing = steps()[kind]
    with pytest.raises(ContextOrderError, match=f"a {kind} exists .*parallel_mode='stand_alone'"):
        make(wide(2))
    del thing
    make(wide(2)).reset()


def test_what_only_evaluates_is_no_step(wide: Any) -> None:
    evaluates = Model(nn.Dense(2, 2), ENTROPY, metrics={"loss"})
    make(wide(2)).reset()
    del evaluates


def test_garbage_is_no_step(wide: Any) -> None:
    thing = steps()["TrainOneStepCell"]
    thing.itself = [thing]
    gc.disable()
    try:
        del thing
        make(wide(2)).reset()
    finally:
        gc.enable()


def test_a_second_context_that_differs(wide: Any) -> None:
    first = make(wide(2), reduce="sum")
    reducer = nn.DistributedGradReducer(nn.Dense(2, 2).trainable_params(), degree=2)
    make(wide(2), reduce="sum").reset()
    with pytest.raises(ContextOrderError, match="DistributedGradReducer .*gradients_mean=False"):
        make(wide(2))
    first.reset()  # done with
    make(wide(2)).reset()
    del reducer


def test_what_cannot_be_parallelized(group: Any, wide: Any) -> None:
    context = make(group)
    with pytest.raises(UnsupportedFeatureError, match="a dict"):
        context.parallelize({})
    with pytest.raises(LayoutError, match="divides layers by your layouts"):
        make(wide(2), tensor=2).parallelize(nn.Dense(2, 2))


def test_models_of_others_are_refused(group: Any) -> None:
    context, stranger = make(group), nn.Dense(2, 2)
    optimizer = nn.Momentum(stranger.trainable_params(), 0.1, 0.9)
    for call in (
        lambda: context.train_step(stranger, tensor(1, 2), loss=square),
        lambda: context.accumulate(stranger, sync=True),
        lambda: context.clip_grad_norm_(stranger, 1.0),
        lambda: context.gradients(stranger),
        lambda: context.apply_gradients(stranger, optimizer),
        lambda: context.save("x", stranger),
        lambda: context.train_step(square, tensor(1, 2), loss=square),  # type: ignore[arg-type]
    ):
        with pytest.raises(UnsupportedFeatureError, match="was not given back by parallelize"):
            call()


@pytest.mark.parametrize("mode", [ms.PYNATIVE_MODE, ms.GRAPH_MODE])
@pytest.mark.parametrize("kind", [nn.Momentum, ms.experimental.optim.SGD])
def test_parameters_that_were_given_other_memory(group: Any, mode: int, kind: Any) -> None:
    ms.set_context(mode=mode)
    context = make(group)
    model = context.parallelize(nn.Dense(3, 2))
    rest = (0.9,) if kind is nn.Momentum else ()
    optimizer = kind(model.trainable_params(), 0.1, *rest)

    def trained() -> list[float]:
        losses = []
        for _ in range(3):
            losses.append(float(context.train_step(model, tensor(4, 3), loss=square)))
            context.apply_gradients(model, optimizer)
        return losses

    model.weight.set_data(tensor(2, 3))  # as load_param_into_net does; before the first step
    first = trained()
    assert first[0] > first[1] > first[2]
    ms.ops.assign(model.weight, model.weight + 9)  # in place
    assert trained()[0] > first[0]
    said = "the first 'weight', were given other memory"
    context.train_step(model, tensor(4, 3), loss=square)
    model.weight.set_data(tensor(2, 3))
    with pytest.raises(MovedParameterError, match=said):
        context.apply_gradients(model, optimizer)
    with pytest.raises(MovedParameterError, match=said):
        context.train_step(model, tensor(4, 3), loss=square)


def test_optimizers(group: Any) -> None:
    context = make(group)
    model = context.parallelize(nn.SequentialCell(nn.Dense(3, 2), nn.Dense(2, 2)))
    stranger = nn.Momentum(nn.Dense(3, 2).trainable_params(), 0.1, 0.9)
    with pytest.raises(UnsupportedFeatureError, match=r"not the model's, such as 'weight'"):
        context.apply_gradients(model, stranger)
    with pytest.raises(UnsupportedFeatureError, match="is a list"):
        context.apply_gradients(model, [])
    halves = [nn.SGD(cell.trainable_params(), 0.1) for cell in model]
    with pytest.raises(GradientError, match="call train_step before"):
        context.apply_gradients(model, halves[0])
    context.train_step(model, tensor(4, 3), loss=square)
    before = [p.asnumpy().copy() for p in model.trainable_params()]
    given = [g.asnumpy() for g in context.gradients(model)]
    context.apply_gradients(model, halves[1])  # the first half's are kept
    with pytest.raises(GradientError, match="no gradients"):
        context.apply_gradients(model, halves[1])
    context.apply_gradients(model, halves[0])
    for parameter, old, gradient in zip(model.trainable_params(), before, given, strict=True):
        np.testing.assert_allclose(parameter.asnumpy(), old - 0.1 * gradient, atol=1e-6)


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW"])
def test_optimizers_that_do_nothing_on_the_cpu(group: Any, kind: str) -> None:
    context = make(group)
    model = context.parallelize(nn.Dense(3, 2))
    context.train_step(model, tensor(4, 3), loss=square)
    optimizer = getattr(ms.mint.optim, kind)(model.trainable_params(), 0.1)
    with pytest.raises(UnsupportedFeatureError, match=f"mint.optim.{kind} does not work .*mindspo"):
        context.apply_gradients(model, optimizer)


def test_frozen_parameters_and_none_at_all(group: Any) -> None:
    context = make(group)
    model = context.parallelize(nn.Dense(3, 2))
    model.bias.requires_grad = False
    context.train_step(model, tensor(4, 3), loss=square)
    assert [g.shape for g in context.gradients(model)] == [(2, 3)]
    model.weight.requires_grad = False
    context.train_step(model, tensor(4, 3), loss=square)
    assert context.gradients(model) == ()


@pytest.mark.parametrize("microbatches", [1, 2, 3, 5, 9])
def test_microbatches_change_nothing(group: Any, microbatches: int) -> None:
    context = make(group)
    model = context.parallelize(nn.Dense(3, 2))
    x, y = tensor(5, 3), ms.Tensor([0, 1, 1, 0, 1], ms.int32)

    def forward(a: Any, b: Any) -> Any:
        return ENTROPY(model(a), b)

    expected, found = ms.value_and_grad(forward, None, model.trainable_params())(x, y)
    value = context.train_step(model, x, y, loss=ENTROPY, microbatches=microbatches)
    np.testing.assert_allclose(float(value), float(expected), rtol=1e-5)
    for mine, whole in zip(context.gradients(model), found, strict=True):
        np.testing.assert_allclose(mine.asnumpy(), whole.asnumpy(), atol=1e-6)


def test_accumulated_batches_add_up(group: Any) -> None:
    context = make(group)
    model = context.parallelize(nn.Dense(3, 2))
    context.train_step(model, tensor(4, 3), loss=square)
    once = context.gradients(model)[0].asnumpy()
    with context.accumulate(model, sync=False):
        context.train_step(model, tensor(4, 3), loss=square)
    context.train_step(model, tensor(4, 3), loss=square)
    np.testing.assert_allclose(context.gradients(model)[0].asnumpy(), 3 * once, rtol=1e-5)


def test_precision_of_float64(group: Any) -> None:
    context = make(group)
    model = context.parallelize(nn.Dense(3, 2, dtype=ms.float64))
    x = tensor(6, 3).astype(ms.float64)
    whole = float(context.train_step(model, x, loss=square))
    parts = float(context.train_step(model, x, loss=square, microbatches=3))
    assert abs(whole - parts) < 1e-14
    assert str(context.gradients(model)[0].dtype) == "Float64"


def test_inputs_by_place_and_by_name(group: Any) -> None:
    context = make(group)
    model = context.parallelize(nn.Dense(3, 2))
    x = tensor(4, 3)
    values = [float(context.train_step(model, one, loss=square)) for one in (x, (x,), {"x": x})]
    assert len(set(values)) == 1


class Pair(NamedTuple):
    x: Any
    scale: Any


class Scaled(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Dense(3, 2)

    def construct(self, x: Any, scale: Any = None, sign: str = "+") -> Any:
        value = self.layer(x)
        if scale is not None:
            value = value * scale
        return -value if sign == "-" else value


def added(output: Any, target: Any) -> Any:
    return output.mean()


@pytest.mark.parametrize("mode", [ms.PYNATIVE_MODE, ms.GRAPH_MODE])
def test_inputs_of_every_kind(group: Any, mode: int) -> None:
    context = make(group)
    model = context.parallelize(Scaled())
    x, twice = tensor(4, 3), ms.Tensor(np.full((4, 1), 2, np.float32))
    expected = float(added(model(x), None))
    ms.set_context(mode=mode)
    for inputs, factor in (
        ((x, None), 1),
        ({"x": x, "scale": None}, 1),
        ({"x": x, "sign": "-"}, -1),
        ({"x": x, "scale": 2.0}, 2),
        ((x, 3.0), 3),
        (Pair(x, twice), 2),
        ((x, twice, "-"), -2),
    ):
        for count in (1, 2):
            value = context.train_step(model, inputs, x, loss=added, microbatches=count)
            assert float(value) == pytest.approx(factor * expected, rel=1e-4), inputs
    with pytest.raises(DataShardError, match="array of NumPy's"):
        context.train_step(model, x.asnumpy(), x, loss=added)
    if mode == ms.GRAPH_MODE:
        with pytest.raises(ExecutionModeError, match="holds None"):
            context.train_step(model, x, (x, None), loss=added)


def gives_pair(output: Any, target: Any) -> Any:
    return output.sum(), output


def gives_number(output: Any, target: Any) -> Any:
    return 1.0


def gives_nothing(output: Any, target: Any) -> Any:
    return None


@pytest.mark.parametrize("mode", [ms.PYNATIVE_MODE, ms.GRAPH_MODE])
@pytest.mark.parametrize("loss", [gives_pair, gives_number, gives_nothing])
def test_losses_that_are_none(group: Any, mode: int, loss: Any) -> None:
    context = make(group)
    model = context.parallelize(nn.Dense(3, 2))
    ms.set_context(mode=mode)
    for backward in (True, False):
        with pytest.raises(PlanError, match="one tensor without dims"):
            context.train_step(model, tensor(4, 3), loss=loss, backward=backward)


@pytest.mark.parametrize("weight", [4, 4.0, np.float32(4), np.int64(4), np.array([4]), "tensor"])
def test_weights_of_every_kind(group: Any, weight: Any) -> None:
    context = make(group)
    model = context.parallelize(nn.Dense(3, 2))
    expected = float(context.train_step(model, tensor(4, 3), loss=square)) / 4
    given = ms.Tensor(4) if isinstance(weight, str) else weight
    value = context.train_step(model, tensor(4, 3), loss=square, weight=given)
    assert float(value) == pytest.approx(expected)


def test_step_functions_are_kept_and_bounded(group: Any) -> None:
    context = make(group)
    model = context.parallelize(nn.Dense(3, 2))
    made = context._models[model].steps._made
    for _ in range(3):
        context.train_step(model, tensor(4, 3), loss=square)
    assert len(made) == 1
    context.train_step(model, tensor(4, 3), loss=square, backward=False)
    assert len(made) == 2
    for _ in range(40):
        context.train_step(model, tensor(4, 3), loss=lambda a, b: a.sum())
    assert len(made) == 16


def test_graph_mode_compiles_and_names_a_lambda(group: Any) -> None:
    context = make(group)
    model = context.parallelize(nn.Dense(3, 2))
    eager = float(context.train_step(model, tensor(4, 3), loss=square))
    ms.set_context(mode=ms.GRAPH_MODE)
    for _ in range(2):
        assert float(context.train_step(model, tensor(4, 3), loss=square)) == pytest.approx(eager)
    with pytest.raises(ExecutionModeError, match="lambda that was written inside"):
        context.train_step(model, tensor(4, 3), loss={"f": lambda a, b: a.sum()}["f"])


@pytest.mark.parametrize("bad", [0, -1.0, "1", True, float("nan")])
def test_clip_takes_positive_numbers(group: Any, bad: Any) -> None:
    context = make(group)
    model = context.parallelize(nn.Dense(2, 2))
    context.train_step(model, tensor(1, 2), loss=square)
    with pytest.raises(PlanError, match="max_norm"):
        context.clip_grad_norm_(model, bad)
    with pytest.raises(PlanError, match="norm_type"):
        context.clip_grad_norm_(model, 1.0, norm_type=bad)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
def test_norms(group: Any, norm_type: float) -> None:
    context = make(group)
    model = context.parallelize(nn.Dense(3, 2))
    context.train_step(model, tensor(4, 3), loss=square)
    flat = np.concatenate([g.asnumpy().ravel() for g in context.gradients(model)])
    norm = float(context.clip_grad_norm_(model, 0.01, norm_type=norm_type))
    assert norm == pytest.approx(float(np.linalg.norm(flat, norm_type)), rel=1e-5)
    again = float(context.clip_grad_norm_(model, float("inf"), norm_type=norm_type))
    assert again == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize(
    "weight", ["x", -1, float("nan"), float("inf"), True, ms.Tensor([4, 4]), np.ones(2), None]
)
def test_weights_are_numbers(group: Any, weight: Any) -> None:
    context = make(group)
    with pytest.raises(PlanError, match="weight is"):
        context.weighted_mean(ms.Tensor(1.0), weight)


def test_weighted_mean_alone(group: Any) -> None:
    context = make(group, reduce="sum")
    assert float(context.weighted_mean(ms.Tensor(6.0), 4)) == 1.5
    with pytest.raises(RankMismatchError, match="not above 0"):
        context.weighted_mean(ms.Tensor(0.0), 0)


def test_batches_that_cannot_be_cut(group: Any) -> None:
    context = make(group)
    model = context.parallelize(nn.Dense(3, 2))

    def step(x: Any, y: Any, **options: Any) -> None:
        context.train_step(model, x, y, loss=square, **options)

    with pytest.raises(DataShardError, match=r"\[2, 3\]"):
        step(tensor(2, 3), tensor(3))
    with pytest.raises(DataShardError, match="at least 1"):
        step(None, None)
    with pytest.raises(DataShardError, match="ndarray cannot be cut"):
        step(tensor(2, 3), np.ones(2), microbatches=2)
    with pytest.raises(PlanError, match="without dims"):
        context.train_step(model, tensor(2, 3), loss=lambda a, b: a)
    for bad in (0, -1, 1.5, True):
        with pytest.raises(PlanError, match="microbatches"):
            step(tensor(2, 3), None, microbatches=bad)


def test_seed_depends_on_the_data_part_alone(group: Any) -> None:
    context = make(group)
    first = context.seed(3), np.random.rand()
    assert (context.seed(3), np.random.rand()) == first
    assert context.seed(4) != first[0]
    with pytest.raises(DataShardError):
        context.seed("x")  # type: ignore[arg-type]


def test_calls_of_another_thread_are_refused(group: Any) -> None:
    import threading

    context = make(group)
    caught: list[BaseException] = []

    def call() -> None:
        try:
            context.parallelize(nn.Dense(1, 1))
        except WrongThreadError as error:
            caught.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert len(caught) == 1


class Saved:
    """A context, a model, its optimiser and a checkpoint of both."""

    def __init__(self, group: Any, folder: Path, kind: Any = nn.Momentum) -> None:
        self.context = make(group)
        self.model = self.context.parallelize(nn.SequentialCell(nn.Dense(3, 2), nn.Dense(2, 2)))
        self.optimizer = nn.Momentum(self.model.trainable_params(), 0.1, 0.9)
        self.step()
        self.path = folder / "step"
        self.context.save(str(self.path), self.model, self.optimizer, extra={"at": [1, "x", None]})

    def step(self) -> None:
        self.context.train_step(self.model, tensor(4, 3), loss=square)
        self.context.apply_gradients(self.model, self.optimizer)

    def values(self) -> dict[str, Any]:
        return {p.name: p.asnumpy().copy() for p in self.optimizer.get_parameters()}

    def load(self, optimizer: Any = None) -> Any:
        return self.context.load(str(self.path), self.model, optimizer)

    def refused(self, match: str, optimizer: Any = None) -> None:
        before = self.values()
        with pytest.raises(CheckpointError, match=match):
            self.load(optimizer)
        for name, value in self.values().items():
            np.testing.assert_array_equal(value, before[name])


@pytest.fixture
def saved(group: Any, tmp_path: Path) -> Saved:
    return Saved(group, tmp_path)


def test_a_checkpoint_gives_back_everything(saved: Saved) -> None:
    before = saved.values()
    addresses = [p.data_ptr() for p in saved.model.get_parameters()]
    saved.step()
    assert saved.load(saved.optimizer) == {"at": [1, "x", None]}
    for name, value in saved.values().items():
        np.testing.assert_array_equal(value, before[name])
    assert [p.data_ptr() for p in saved.model.get_parameters()] == addresses
    assert sorted(p.name for p in saved.path.iterdir()) == [
        "model.safetensors",
        "optimizer.safetensors",
        "parallelkit.json",
    ]
    saved.context.save(str(saved.path), saved.model, overwrite=True)
    saved.refused("has no optimizer|with the optimizer none", saved.optimizer)


@pytest.mark.parametrize("kind", ["NAdam", "ASGD", "Adam", "Rprop"])
def test_an_optimizer_goes_on_as_if_nothing_had_been(group: Any, tmp_path: Path, kind: str) -> None:
    context = make(group)
    model = context.parallelize(nn.Dense(3, 2))
    start = [p.asnumpy().copy() for p in model.get_parameters()]

    def optimizer() -> Any:
        return getattr(ms.experimental.optim, kind)(model.trainable_params(), lr=0.05)

    def train(steps: int, by: Any) -> None:
        for _ in range(steps):
            context.train_step(model, tensor(4, 3), loss=square)
            context.apply_gradients(model, by)

    straight = optimizer()
    train(6, straight)
    expected = [p.asnumpy().copy() for p in model.get_parameters()]
    for parameter, value in zip(model.get_parameters(), start, strict=True):
        parameter.copy_(ms.Tensor(value))
    first = optimizer()
    train(3, first)
    context.save(str(tmp_path / "c"), model, first)
    second = optimizer()
    context.load(str(tmp_path / "c"), model, second)
    train(3, second)
    for parameter, value in zip(model.get_parameters(), expected, strict=True):
        np.testing.assert_array_equal(parameter.asnumpy(), value)


def test_a_wrapper_is_saved_as_what_it_wraps(saved: Saved) -> None:
    step = nn.TrainOneStepCell(nn.WithLossCell(saved.model, ENTROPY), saved.optimizer)
    before = saved.values()
    saved.context.save(str(saved.path), step, saved.optimizer, overwrite=True)
    saved.step()
    saved.context.load(str(saved.path), step, saved.optimizer)
    for name, value in saved.values().items():
        np.testing.assert_array_equal(value, before[name])
    with pytest.raises(UnsupportedFeatureError, match="TrainOneStepCell is a wrapper around the S"):
        saved.context.train_step(step, tensor(4, 3), loss=square)
    with pytest.raises(UnsupportedFeatureError, match="call model = context.parallelize"):
        saved.context.save(str(saved.path), nn.WithLossCell(nn.Dense(2, 2), ENTROPY))


def test_dtypes_that_numpy_has_not(group: Any, tmp_path: Path) -> None:
    context = make(group)
    cell = nn.Cell()
    cell.low = ms.Parameter(tensor(3).astype(ms.bfloat16), name="low")
    cell.whole = ms.Parameter(ms.Tensor([7], ms.int64), name="whole")
    cell.flag = ms.Parameter(ms.Tensor([True, False]), name="flag", requires_grad=False)
    model = context.parallelize(cell)
    before = cell.low.astype(ms.float32).asnumpy().copy()
    context.save(str(tmp_path / "c"), model)
    for parameter in cell.get_parameters():
        parameter.copy_(ms.ops.zeros_like(parameter))
    context.load(str(tmp_path / "c"), model)
    np.testing.assert_array_equal(cell.low.astype(ms.float32).asnumpy(), before)
    assert int(cell.whole[0]) == 7
    assert cell.flag.asnumpy().tolist() == [True, False]


def test_damage_is_noticed(saved: Saved) -> None:
    document = saved.path / "parallelkit.json"
    text = document.read_text()
    about = json.loads(text)
    for changed, match in (
        ({"framework": "torch"}, "of the framework 'torch'"),
        ({"format": 9}, "has format 9"),
        ({"more": 1}, "is damaged"),
        ({"files": {}}, "has no model"),
    ):
        document.write_text(json.dumps({**about, **changed}))
        saved.refused(match)
    document.write_bytes(b"\xff{")
    saved.refused("is damaged")
    document.unlink()
    saved.refused("no complete checkpoint")
    document.write_text(text)
    file = saved.path / "model.safetensors"
    data = file.read_bytes()
    for changed_bytes in (data[:-1], data[:-1] + bytes([data[-1] ^ 1]), b""):
        file.write_bytes(changed_bytes)
        saved.refused("is damaged")
    file.unlink()
    saved.refused("cannot be read")


def test_other_models_and_optimizers(saved: Saved) -> None:
    saved.refused("Momentum, and SGD", nn.SGD(saved.model.trainable_params(), 0.1))
    other = saved.context.parallelize(nn.SequentialCell(nn.Dense(3, 2), nn.Dense(2, 3)))
    with pytest.raises(CheckpointError, match=r"'1.weight' is float32 \[2, 2\] in it"):
        saved.context.load(str(saved.path), other)
    with pytest.raises(CheckpointError, match="is in it and not here"):
        saved.context.load(str(saved.path), saved.context.parallelize(nn.Dense(3, 2)))


def test_where_nothing_can_be_saved(saved: Saved, tmp_path: Path) -> None:
    def save(path: Any, **options: Any) -> None:
        saved.context.save(path, saved.model, **options)

    with pytest.raises(CheckpointError, match="overwrite=True"):
        save(str(saved.path))
    with pytest.raises(CheckpointError, match="it is a string"):
        save(3)
    with pytest.raises(NotPlainError, match="bytes"):
        save(str(tmp_path / "x"), extra={"a": b"1"})
    for number in (float("nan"), [float("inf")]):
        with pytest.raises(NotPlainError, match="infinite or no number"):
            save(str(tmp_path / "x"), extra={"a": number})
    for bad in ("no", 1, None):
        with pytest.raises(CheckpointError, match="it is True or False"):
            save(str(saved.path), overwrite=bad)
    with pytest.raises(NotPlainError, match="a dict of plain"):
        save(str(tmp_path / "x"), extra=[1])
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError):
        save(str(tmp_path / "file" / "x"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "step"]
