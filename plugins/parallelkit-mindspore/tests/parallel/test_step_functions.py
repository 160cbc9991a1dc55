"""When the function of a train step is made, and compiled, again: once a loss, once a shape."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import mint, nn
from mindspore.graph import api
from parallelkit_mindspore.graph.switch import switched
from parallelkit_mindspore.parallel import autograd
from parallelkit_mindspore.parallel import step as module
from parallelkit_mindspore.parallel.step import Steps


class Losses:
    def mean(self, output: Any, target: Any) -> Any:
        return (output - target).mean()

    def total(self, output: Any, target: Any) -> Any:
        return (output - target).sum()


class Net(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.layer = mint.nn.Linear(2, 2)

    def construct(self, x: Any) -> Any:
        return self.layer(x)


def mean_of_pair(output: Any, target: Any) -> Any:
    return (output - target[0] * target[1]).mean()


def test_a_method_is_the_same_loss_at_every_look() -> None:
    model, losses, steps = mint.nn.Linear(2, 2), Losses(), Steps()

    def made(loss: Any) -> Any:
        return steps.function(model, loss, model.trainable_params(), named=False, backward=True)

    assert losses.mean is not losses.mean
    assert made(losses.mean) is made(losses.mean)
    assert made(losses.mean) is not made(losses.total)
    assert made(losses.mean) is not made(Losses().mean)
    assert made(Losses.mean) is made(Losses.mean)


@pytest.mark.parametrize("named", [False, True])
def test_a_new_batch_compiles_nothing(named: bool) -> None:
    model, steps = Net(), Steps()
    weights = model.trainable_params()

    def run(items: int, seed: int) -> float:
        x = np.random.RandomState(seed).randn(items, 2).astype(np.float32)
        inputs: Any = {"x": ms.Tensor(x)} if named else ms.Tensor(x)
        goal = (ms.Tensor(x + 1), ms.Tensor(x))
        step = steps.function(model, mean_of_pair, weights, named=named, backward=True)
        value, found = module.run(step, inputs, goal, items=items, microbatches=1, scale=None)
        assert len(found) == 2
        w, b = (p.asnumpy() for p in weights)
        assert float(value) == pytest.approx(float((x @ w.T + b - (x + 1) * x).mean()), abs=1e-5)
        return len(api.ms_compile_cache)

    with switched("graph"):
        first = run(4, 0)
        assert [run(4, seed) for seed in (1, 2, 3)] == [first] * 3
        assert run(6, 4) == first + 1


class Trained(nn.Cell):
    """Whether it trains shows in what it gives, and in its statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(p=0.5)
        self.norm = nn.BatchNorm1d(2)

    def construct(self, x: Any) -> Any:
        return self.norm(self.drop(x))


def first_column(output: Any, target: Any) -> Any:
    return (output[:, 0] ** 3).mean() + output[0, 1]


@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize("first", [True, False])
def test_a_graph_is_of_the_cells_as_they_train_now(backward: bool, first: bool) -> None:
    model, steps = Trained(), Steps()
    x = ms.Tensor(np.random.RandomState(0).randn(16, 2).astype(np.float32))

    def run() -> float:
        weights = model.trainable_params() if backward else []
        step = steps.function(model, first_column, weights, named=False, backward=backward)
        value, _ = module.run(step, x, x, items=16, microbatches=1, scale=None)
        return float(value)

    def statistics() -> list[float]:
        return list(model.norm.moving_mean.asnumpy().tolist())

    with switched("graph"):
        for training in (first, not first, first):
            model.set_train(training)
            before = statistics()
            values = {run() for _ in range(3)}
            assert (len(values) > 1) == training, values
            assert (statistics() != before) == training
        model.set_train(True)
        model.norm.set_train(False)  # one cell alone
        before = statistics()
        assert len({run() for _ in range(3)}) > 1
        assert statistics() == before
    assert len(steps._made) == 3


def test_a_loss_that_is_a_cell_trains_or_not() -> None:
    class Loss(nn.Cell):
        def construct(self, output: Any, target: Any) -> Any:
            return output.mean() if self.training else output.sum()

    model, loss, steps = Net(), Loss(), Steps()
    with switched("graph"):
        found = []
        for training in (True, False):
            loss.set_train(training)
            step = steps.function(model, loss, [], named=False, backward=False)
            x = ms.Tensor(np.ones((4, 2), np.float32))
            found.append(float(module.run(step, x, x, items=4, microbatches=1, scale=None)[0]))
    assert found[1] == pytest.approx(8 * found[0], rel=1e-5)


def failing(output: Any, target: Any) -> Any:
    raise ValueError("mine")


def test_a_failed_gradient_leaves_parameters_that_can_be_written() -> None:
    model, steps = Net(), Steps()
    weights = model.trainable_params()
    step = steps.function(model, failing, weights, named=False, backward=True)
    x = ms.Tensor(np.ones((4, 2), np.float32))
    with pytest.raises(ValueError, match="mine"):
        module.run(step, x, x, items=4, microbatches=1, scale=None)
    weights[0].copy_(mint.zeros((2, 2)))
    assert float(weights[0].sum()) == 0
    # and one that was not ours
    with pytest.raises(ValueError, match="mine"):
        ms.value_and_grad(lambda a: failing(model(a), a), None, weights)(x)
    try:
        with autograd.unrecorded():
            weights[0].copy_(mint.ones((2, 2)))
        assert float(weights[0].sum()) == 4
    finally:
        api._pynative_executor.clear_res()
    _, found = ms.value_and_grad(lambda a: model(a).sum(), None, weights)(x)
    assert found[0].asnumpy().tolist() == [[4, 4], [4, 4]]


def test_a_failure_inside_another_gradient_function_does_not_end_that() -> None:
    model, steps = Net(), Steps()
    weights = model.trainable_params()
    x = ms.Tensor(np.ones((4, 2), np.float32))

    def outer(a: Any) -> Any:
        step = steps.function(model, failing, [], named=False, backward=False)
        value = model(a).sum()
        with pytest.raises(ValueError, match="mine"):
            module.run(step, a, a, items=4, microbatches=1, scale=None)
        return value

    _, found = ms.value_and_grad(outer, None, weights)(x)
    assert found[0].asnumpy().tolist() == [[4, 4], [4, 4]]
