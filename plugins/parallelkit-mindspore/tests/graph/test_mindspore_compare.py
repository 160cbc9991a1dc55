"""`compare_modes`: the same call in both modes, and everything as it was afterwards."""

from __future__ import annotations

import functools
import random
import threading
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn, ops
from mindspore.graph import api
from parallelkit_mindspore.graph import reach as reach_module
from parallelkit_mindspore.graph.compare import compare_modes
from parallelkit_mindspore.graph.differences import compare
from parallelkit_mindspore.graph.reach import reach
from parallelkit_mindspore.graph.tree import leaves, replaced

from parallelkit.errors import (
    ExecutionModeError,
    FunctionFailedError,
    UnsupportedFeatureError,
    WrongThreadError,
)
from parallelkit.graphs import ModeComparison
from parallelkit.specs import ComparisonSpec

X = ms.Tensor(np.random.RandomState(0).rand(4, 3).astype(np.float32))
Y = ms.Tensor(np.random.RandomState(1).rand(4, 2).astype(np.float32))


def run(function: Any, *args: Any, **options: Any) -> ModeComparison:
    spec = ComparisonSpec(
        framework="mindspore", function=function, args=args or (X,), repeat=2, **options
    )
    return compare_modes(spec)


def net() -> Any:
    model = nn.SequentialCell(nn.Dense(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Dense(4, 2))
    return model.set_train()


def bytes_of(*cells: Any) -> dict[str, bytes]:
    return {p.name: p.asnumpy().tobytes() for cell in cells for p in cell.get_parameters()}


def test_a_cell_with_gradients_and_all_is_given_back() -> None:
    model, x = net(), X.copy()
    before, pointers = bytes_of(model), [p.data_ptr() for p in model.get_parameters()]
    phases, mode = set(api.ms_compile_cache), ms.get_context("mode")
    random.seed(7)
    np.random.seed(7)
    in_python, in_numpy = random.getstate(), np.random.get_state()[1].tobytes()  # type: ignore[index, union-attr]
    made = run(model, x, gradients=True)
    assert bytes_of(model) == before
    assert [p.data_ptr() for p in model.get_parameters()] == pointers
    assert set(api.ms_compile_cache) == phases
    assert ms.get_context("mode") == mode
    assert random.getstate() == in_python
    assert np.random.get_state()[1].tobytes() == in_numpy  # type: ignore[index, union-attr]
    assert "construct" not in model.__dict__
    assert np.array_equal(x.asnumpy(), X.asnumpy())
    assert (made.function, made.framework) == ("SequentialCell", "mindspore")
    assert made.outputs.max_abs < 1e-5
    assert made.outputs.tensors == 1
    assert made.gradients is not None
    assert made.gradients.tensors == 6
    assert made.gradients.max_abs < 1e-4
    assert (made.graphs, made.recompiles, made.breaks, made.notes) == (1, 0, 0, ())
    assert (len(made.eager_seconds), len(made.graph_seconds)) == (2, 2)
    assert made.compile_seconds > 0


def test_a_train_step_with_its_optimiser() -> None:
    model = net()
    optimiser = nn.Adam(model.trainable_params(), 0.1)

    def loss(x: Any, y: Any) -> Any:
        return nn.MSELoss()(model(x), y)

    gradient = ms.value_and_grad(loss, None, optimiser.parameters)

    def step(x: Any, y: Any) -> Any:
        value, gradients = gradient(x, y)
        optimiser(gradients)
        return {"loss": value}

    before = bytes_of(model, optimiser)
    made = run(step, X, Y)
    assert made.outputs.max_abs < 1e-5
    assert made.outputs.tensors == 1
    assert made.graphs == 1
    assert bytes_of(model, optimiser) == before


class Trainer:
    """What many keep a model in: a plain class."""

    def __init__(self) -> None:
        self.parts = {"model": net()}
        self.optimiser = nn.SGD(self.parts["model"].trainable_params(), 0.1)
        self.gradient = ms.value_and_grad(self.loss, None, self.optimiser.parameters)

    def loss(self, x: Any, y: Any) -> Any:
        return nn.MSELoss()(self.parts["model"](x), y)

    def step(self, x: Any, y: Any) -> Any:
        value, gradients = self.gradient(x, y)
        self.optimiser(gradients)
        return value

    def method_of_another(self, x: Any, y: Any) -> Any:
        return functools.partial(TRAINERS[0].step, x)(y=y)


TRAINERS: list[Trainer] = []


@pytest.mark.parametrize("way", ["bound self", "global", "partial", "default", "argument"])
def test_a_trainer_of_a_plain_class_is_given_back(way: str) -> None:
    trainer = Trainer()
    TRAINERS[:] = [trainer]

    def by_default(x: Any, y: Any, step: Any = trainer.step) -> Any:
        return step(x, y)

    def as_given(given: Any, x: Any, y: Any) -> Any:
        return given(x, y)

    if way == "argument":
        call, args = functools.partial(as_given, trainer.step), (X, Y)
    else:
        call, args = (
            {
                "bound self": trainer.step,
                "global": Trainer().method_of_another,
                "partial": functools.partial(trainer.step, y=Y),
                "default": by_default,
            }[way],
            (X,) if way == "partial" else (X, Y),
        )
    found = reach(call, args).tensors
    held = [trainer.parts["model"], trainer.optimiser]
    assert {id(p) for cell in held for p in cell.get_parameters()} <= {id(p) for p in found}
    if way == "bound self":
        before = bytes_of(*held)
        made = run(call, *args)
        assert bytes_of(*held) == before
        assert made.notes == ()
        assert made.outputs.max_abs < 1e-5


def added(parameter: Any, x: Any) -> Any:
    return ops.assign_add(parameter, x)


def test_a_parameter_among_the_arguments_is_given_back() -> None:
    parameter = ms.Parameter(X * 0)
    made = run(added, parameter, X)
    assert not parameter.asnumpy().any()
    assert made.outputs.max_abs == 0.0
    assert made.notes == ()


class Odd(nn.Cell):
    """Parameters that MindSpore's own operators do not write: bfloat16, transposed, empty."""

    def __init__(self) -> None:
        super().__init__()
        one = ms.Tensor(np.ones(3, np.float32))
        self.half = ms.Parameter(one.astype(ms.bfloat16), name="half")
        self.turned = ms.Parameter(ms.Tensor(np.arange(6, dtype=np.float32).reshape(3, 2)).T)
        self.empty = ms.Parameter(ms.Tensor(np.zeros((0, 2), np.float32)), name="empty")

    def construct(self, x: Any) -> Any:
        return x + self.half + self.turned.sum()


def test_parameters_of_any_dtype_and_layout() -> None:
    cell = Odd()
    before = cell.turned.asnumpy().copy()
    made = run(cell)
    assert made.outputs.max_abs < 1e-5
    assert cell.half.astype(ms.float32).asnumpy().tolist() == [1.0] * 3
    assert np.array_equal(cell.turned.asnumpy(), before)


def test_looking_ends() -> None:
    many = [[n] for n in range(reach_module.LIMIT)]
    assert not reach(lambda: many).complete
    loop: list[Any] = []
    loop.append(loop)
    assert reach(loop).complete


def test_a_difference_is_found_and_named() -> None:
    class Leaky(nn.Cell):
        """Adds a number that eager sees change and a graph keeps as it was."""

        def construct(self, x: Any) -> Any:
            COUNTER.number = COUNTER.number + 1
            return {"same": x * 1, "off": x + COUNTER.number}

    made = run(Leaky())
    assert made.outputs.worst == "off"
    assert made.outputs.max_abs >= 0.5
    assert made.outputs.tensors == 2


class Counter:
    number = 0


COUNTER = Counter()


def test_gradients_of_arguments() -> None:
    def square(x: Any) -> Any:
        return x * x

    made = run(square, gradients=True)
    assert made.gradients is not None
    assert made.gradients.tensors == 1
    assert made.gradients.max_abs < 1e-6


def test_random_numbers_are_noted() -> None:
    made = run(nn.Dropout(p=0.5).set_train())
    assert any("random numbers" in note for note in made.notes)
    assert made.outputs.max_abs > 0


def test_arguments_that_are_changed_in_place() -> None:
    def step(x: Any, same: Any) -> Any:
        x.add_(1)
        return same * 2

    x = X.copy()
    run(step, x, x)
    assert np.array_equal(x.asnumpy(), X.asnumpy())


def test_options_and_other_captures() -> None:
    def step(x: Any) -> Any:
        return ops.relu(x) * 3

    made = run(step, options={"capture_mode": "bytecode"})
    assert made.reason == "mindspore.jit with capture_mode 'bytecode'"
    assert made.graphs == 1
    with pytest.raises(UnsupportedFeatureError, match="no option 'speed'"):
        run(step, options={"speed": 2})


def raises(x: Any) -> Any:
    return {}["missing"]


def refused(x: Any) -> Any:
    import math

    return x + math.pi


def whole(x: Any) -> Any:
    return x.astype(ms.int32)


def test_errors_and_the_mode_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    mode, model = ms.get_context("mode"), net()
    before = bytes_of(model)
    with pytest.raises(FunctionFailedError, match="raises raised KeyError in mode 'eager'") as one:
        run(raises)
    assert isinstance(one.value.__cause__, KeyError)
    with pytest.raises(FunctionFailedError, match="in mode 'graph': Unsupported statement 'Imp"):
        run(refused)
    with pytest.raises(ExecutionModeError, match="no floating-point tensor among the outputs"):
        run(whole, gradients=True)
    with pytest.raises(ExecutionModeError, match="nothing needs a gradient"):
        run(lambda x: X, 3, gradients=True)
    with pytest.raises(FunctionFailedError):
        run(model, ms.Tensor(np.ones((4, 7), np.float32)))
    assert bytes_of(model) == before
    assert ms.get_context("mode") == mode
    monkeypatch.setenv("MS_JIT", "0")
    with pytest.raises(UnsupportedFeatureError, match="MS_JIT=0"):
        run(whole)


def test_another_thread_is_refused() -> None:
    caught: list[BaseException] = []

    def other() -> None:
        try:
            run(whole)
        except WrongThreadError as error:
            caught.append(error)

    run(whole)
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert "compare_modes was called in thread" in str(caught[0])


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("one", "other", "absolute", "relative"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0, 0.0),
        ([1.0, 4.0], [1.5, 4.0], 0.5, 0.125),
        ([INF, NAN, -INF], [INF, NAN, -INF], 0.0, 0.0),
        ([1.0], [NAN], INF, INF),
        ([INF, 1.0], [-INF, 1.0], INF, INF),
        ([0.0], [1.0], 1.0, INF),
    ],
)
def test_differences(
    one: list[float], other: list[float], absolute: float, relative: float
) -> None:
    made = compare({"a": ms.Tensor(one)}, {"a": ms.Tensor(other)})
    assert (made.max_abs, made.max_rel) == (absolute, relative)
    assert made.worst == ("a" if absolute else "")


def test_differences_of_other_kinds() -> None:
    assert compare([ms.Tensor(2**60)], [ms.Tensor(2**60 + 1)]).max_abs >= 0
    assert compare([ms.Tensor(True)], [ms.Tensor(False)]).max_abs == 1.0
    assert compare(1 + 1j, 1 + 3j).max_abs == 2.0
    found = compare(["text", None, 2.0], ["other", None, 2.5])
    assert (found.tensors, found.max_abs, found.max_rel, found.worst) == (1, 0.5, 0.25, "[2]")
    half = ms.Tensor(np.ones(3, np.float32)).astype(ms.bfloat16)
    assert compare(half, half * 2).max_rel == 1.0
    assert compare([ms.Tensor([1.0])], (ms.Tensor([1.0]),)).max_abs == 0.0


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([ms.Tensor([1.0, 2.0])], [ms.Tensor([1.0])]),
        ([ms.Tensor([1.0])], [ms.Tensor([1])]),
        ({"a": 1}, {"b": 1}),
    ],
)
def test_what_is_not_alike(one: Any, other: Any) -> None:
    with pytest.raises(ExecutionModeError, match="graph mode gives"):
        compare(one, other)


def test_trees() -> None:
    tree = {"a": [1, (2, 3)], 4: 5}
    assert [path for path, _ in leaves(tree)] == ['["a"][0]', '["a"][1][0]', '["a"][1][1]', "[4]"]
    assert replaced(tree, lambda leaf: leaf + 1) == {"a": [2, (3, 4)], 4: 6}
