"""MindSpore's own ways to train, under a context of ours, against one process with the whole batch.

Arguments: reductions, comma-separated; then ways ("model", "cell", "custom", "step"), each with a
mode, such as `model:graph`. "step" is `context.train_step`.
"""

from __future__ import annotations

import sys
from typing import Any

import mindspore as ms
import mindspore.dataset as ds
import numpy as np
from context_models import ITEMS, MEAN, MODES, Reference, batch, build, close, mean_loss
from mindspore import nn
from mindspore.train import Model

import parallelkit as pk
from parallelkit.errors import ContextOrderError

STEPS = 2


def train(way: str, context: Any, model: Any, optimizer: Any, x: Any, y: Any) -> None:
    """Two steps with one batch, in one of the ways."""
    if way == "model":
        data = ds.NumpySlicesDataset((x, y), ["x", "y"], shuffle=False).batch(len(x))
        Model(model, MEAN, optimizer).train(STEPS, data, dataset_sink_mode=False)
        return
    inputs, target = ms.Tensor(x), ms.Tensor(y)
    if way == "cell":
        cell = nn.TrainOneStepCell(nn.WithLossCell(model, mean_loss), optimizer)
        step = lambda a, b: cell(a, b)  # noqa: E731
    elif way == "custom":
        step = custom(model, optimizer)
    else:

        def step(a: Any, b: Any) -> None:
            context.train_step(model, a, b, loss=mean_loss)
            context.apply_gradients(model, optimizer)

    for _ in range(STEPS):
        step(inputs, target)


def custom(model: Any, optimizer: Any) -> Any:
    reducer = nn.DistributedGradReducer(optimizer.parameters)

    def forward(a: Any, b: Any) -> Any:
        return mean_loss(model(a), b)

    differentiate = ms.value_and_grad(forward, None, optimizer.parameters)

    def step(a: Any, b: Any) -> Any:
        value, found = differentiate(a, b)
        optimizer(reducer(found))
        return value

    return ms.jit(step) if ms.get_context("mode") == ms.GRAPH_MODE else step


def run(reduce: str, way: str, mode: str) -> None:
    ms.set_context(mode=MODES[mode])
    context = pk.parallel_context(reduce=reduce)
    assert ms.get_auto_parallel_context("parallel_mode") == "data_parallel"
    assert ms.get_auto_parallel_context("gradients_mean") == (reduce == "mean")
    assert context.native["device_num"] == group.world_size
    model = context.parallelize(build("images", seed=group.rank))
    optimizer = nn.Momentum(model.trainable_params(), 0.1, 0.9)
    x, y = batch("images")
    size = ITEMS // group.world_size
    mine = slice(group.rank * size, (group.rank + 1) * size)
    train(way, context, model, optimizer, x[mine], y[mine])
    reference = Reference("images")
    for _ in range(STEPS):
        reference.add(x, y, mean_loss)
        reference.step(1.0 if reduce == "mean" else group.world_size)
    expected = [p.asnumpy() for p in reference.model.trainable_params()]
    atol = 1e-6 if reduce == "mean" else 1e-6 * group.world_size
    close(model.trainable_params(), expected, f"{way} {mode} {reduce}", atol=atol)
    context.reset()


def built_before() -> None:
    """The negative control: a step that is older than the context trains its rank alone."""
    ms.set_context(mode=ms.PYNATIVE_MODE)
    x, y = batch("images")
    rows = slice(group.rank * 2, group.rank * 2 + 2)
    model = build("images", seed=0)
    optimizer = nn.Momentum(model.trainable_params(), 0.1, 0.9)
    cell = nn.TrainOneStepCell(nn.WithLossCell(model, mean_loss), optimizer)
    try:
        pk.parallel_context()
    except ContextOrderError as error:
        assert "a TrainOneStepCell exists that was built with" in str(error), error
        assert "parallel_mode='stand_alone'" in str(error), error
    else:
        raise AssertionError("a step that read other settings was not refused")
    ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
    cell(ms.Tensor(x[rows]), ms.Tensor(y[rows]))  # as if it had been let pass
    weights = group.all_gather(ms.Tensor(model.head.weight.value()))
    assert np.abs(weights[0].asnumpy() - weights[1].asnumpy()).max() > 1e-4
    ms.reset_auto_parallel_context()
    del cell

    context = pk.parallel_context()
    second = nn.TrainOneStepCell(nn.WithLossCell(model, mean_loss), optimizer)
    same = pk.parallel_context()  # reads the same
    try:
        pk.parallel_context(reduce="sum")
    except ContextOrderError as error:
        assert "gradients_mean=True" in str(error), error
    else:
        raise AssertionError("a second, different context was not refused")
    same.reset()
    context.reset()
    pk.parallel_context(reduce="sum").reset()  # `second` lives, and its context is done with
    del second


group = pk.init_process_group(framework="mindspore", device="cpu", timeout=60)
built_before()
for combined in sys.argv[1].split(","):
    for one in sys.argv[2:]:
        try:
            run(combined, *one.split(":"))
        except BaseException as error:
            error.add_note(f"{one}, {combined}")
            raise
group.close()
