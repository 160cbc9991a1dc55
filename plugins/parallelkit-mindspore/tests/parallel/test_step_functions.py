"""When the function of a train step is made, and compiled, again: once a loss, once a shape."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import mint, nn
from mindspore.graph import api
from parallelkit_mindspore.graph.switch import switched
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
