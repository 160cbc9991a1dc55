"""What two ranks can get wrong; checkpoints, seeds and data. Argument: a folder to be made."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from context_models import LAYOUTS, batch, build, mean_loss
from mindspore import mint, nn, ops
from parallelkit_mindspore.parallel.device_layout import Piece

import parallelkit as pk
from parallelkit.errors import (
    CheckpointError,
    ContextOrderError,
    LayoutError,
    NonFiniteGradientError,
    RankMismatchError,
    UnsupportedFeatureError,
)


def raises(error: type[Exception], text: str, call: Callable[[], Any]) -> None:
    try:
        call()
    except error as found:
        assert text in str(found), found
        return
    raise AssertionError(f"no {error.__name__} with {text!r}")


def different_models() -> None:
    context = pk.parallel_context()
    sizes = (2, 3) if group.rank else (2, 4)
    rank_1 = f"rank {1} has" if group.rank else "another rank's differ from rank 0's"
    raises(RankMismatchError, rank_1, lambda: context.parallelize(nn.Dense(*sizes)))
    model = nn.SequentialCell(nn.Dense(2, 2), nn.Dense(2, 2))
    model[1].weight.requires_grad = not group.rank
    raises(RankMismatchError, "1.weight" if group.rank else "", lambda: context.parallelize(model))
    context.parallelize(nn.Dense(2, 2))  # the group still works
    context.reset()


def units() -> None:
    """Ranks with 1 and 4 units of gradient."""
    for reduce, expected in (("mean", 2.5), ("sum", 5.0)):
        context = pk.parallel_context(reduce=reduce)
        model = context.parallelize(nn.Dense(1, 1, has_bias=False))
        x = ms.Tensor([[4.0 if group.rank else 1.0]], ms.float32)
        context.train_step(model, x, loss=total)
        assert float(context.gradients(model)[0]) == expected
        value = context.weighted_mean(ms.Tensor(6.0, ms.float32), 1 + 2 * group.rank)
        assert float(value) == (3.0 if reduce == "mean" else 1.5)
        raises(RankMismatchError, "not above 0", lambda c=context, x=x: c.weighted_mean(x, 0))
        raises(
            NonFiniteGradientError,
            "nothing was scaled",
            lambda c=context, m=model: not_finite(c, m),
        )
        context.reset()


def total(output: Any, target: Any) -> Any:
    return output.sum()


def not_finite(context: Any, model: Any) -> None:
    context.train_step(model, ms.Tensor([[float("inf")]], ms.float32), loss=total)
    context.clip_grad_norm_(model, 1.0, error_if_nonfinite=True)


def apart(folder: Path) -> None:
    """Ranks that train other parameters, or are in different steps, get no mixed gradients."""
    context = pk.parallel_context()
    model = context.parallelize(nn.SequentialCell(nn.Dense(2, 2), nn.Dense(2, 2)))
    optimizer = nn.Momentum(model.trainable_params(), 0.1, 0.9)
    path = str(folder / "apart")
    context.save(path, model, optimizer)
    x = ms.Tensor(np.ones((2, 2), np.float32))

    def train(weight: Any = None, loss: Any = total) -> None:
        context.train_step(model, x, x, loss=loss, weight=weight)

    train()
    frozen = model[group.rank].weight
    frozen.requires_grad = False
    raises(RankMismatchError, "in train step 2 of SequentialCell, of all but ['1.weight']", train)
    frozen.requires_grad = True

    def fails(output: Any, target: Any) -> Any:
        raise ValueError("mine")

    for weight in (None, 2):
        context.load(path, model, optimizer)
        if group.rank:
            raises(ValueError, "mine", lambda: train(None, fails))
        raises(RankMismatchError, "rank(s) 1: all_", lambda w=weight: train(w))
        raises(RankMismatchError, "rank(s) 0: all_", lambda w=weight: train(w))
    context.load(path, model, optimizer)
    assert not any(float(abs(g).max()) for g in context.gradients(model))
    raises(RankMismatchError, "different optimizers: ['Momentum', '']", lambda: context.load(
        path, model, None if group.rank else optimizer,
    ))  # fmt: skip
    train()
    context.reset()


def divided() -> None:
    layouts = LAYOUTS["mlp"]
    context = pk.parallel_context(tensor=2, layouts=layouts)
    model = build("mlp", 0)
    optimizer = nn.Momentum(model.trainable_params(), 0.1, 0.9)
    raises(ContextOrderError, "holds the parameter 'up.weight'", lambda: context.parallelize(model))
    del optimizer
    context.parallelize(model)
    context.reset()

    styles = {"up": "colwise", "down": "rowwise"}
    context = pk.parallel_context("semi_auto", tensor=2, layouts=styles, fallback=True)
    model = context.parallelize(build("mlp", 0))
    found = context.strategies(context.compile(model)).parameters
    assert found["up.weight"].pieces == (Piece(dim=0, degree=2, stride=1),)
    assert found["down.weight"].pieces == (Piece(dim=1, degree=2, stride=1),)
    assert found["down.bias"].pieces == ()
    assert context.found_plan(model).degrees == context.plan.degrees
    context.reset()

    # a norm inside a divided region has whole parameters and a part of the activations
    x = ms.Tensor(np.arange(12).reshape(2, 6).astype(np.float32))
    for zero in (False, True):
        context = pk.parallel_context(tensor=2, layouts={"up": "colwise", "down": "rowwise"})
        given = Wrong()
        if zero:  # as many start: then the gradients before it are zero in the first step
            given.down.weight.copy_(ops.zeros_like(given.down.weight))
        model = context.parallelize(given)
        if zero:
            context.train_step(model, x, loss=square_above_1)
            context.apply_gradients(model, nn.SGD(model.trainable_params(), 0.1))
        raises(LayoutError, "what it works on is divided", lambda c=context, m=model: c.train_step(
            m, x, loss=square_above_1,
        ))  # fmt: skip
        context.reset()
    context = pk.parallel_context(tensor=2, layouts={"": "colwise"})
    double = nn.Dense(2, 4, dtype=ms.float64)
    raises(UnsupportedFeatureError, "float64", lambda: context.parallelize(double))
    single = context.parallelize(nn.Dense(2, 4))
    assert single.weight.shape == (2, 2)
    assert [p.name for p in single.get_parameters()] == ["weight", "bias"]
    context.reset()
    linear = mint.nn.Linear(4, 2)
    expected = linear(ms.Tensor(np.ones((3, 4), np.float32))).asnumpy()
    context = pk.parallel_context(tensor=2, layouts={"0": "rowwise"})
    model = context.parallelize(nn.SequentialCell(linear))
    first = group.broadcast(ms.Tensor(expected), 0).asnumpy()
    found = model(ms.Tensor(np.ones((3, 2), np.float32))).asnumpy()
    np.testing.assert_allclose(found, first, atol=1e-6)
    context.reset()


class Wrong(nn.Cell):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Dense(6, 8)
        self.scale = ms.Parameter(ms.Tensor(np.ones(1, np.float32)), name="scale")
        self.down = nn.Dense(8, 2)

    def construct(self, x: Any) -> Any:
        return self.down(self.up(x) * self.scale)


def square_above_1(output: Any, target: Any) -> Any:
    return ((output - 1) * (output - 1)).mean()


def checkpoints(folder: Path) -> None:
    """Saved under data 2, loaded under tensor 2, saved again, and loaded under data 2."""
    x, y = (ms.Tensor(values) for values in batch("mlp"))
    plain = pk.parallel_context()
    model = plain.parallelize(build("mlp", 0))
    optimizer = nn.Momentum(model.trainable_params(), 0.1, 0.9)
    step(plain, model, optimizer, x, y)
    path = str(folder / "first")
    plain.save(path, model, optimizer, extra={"step": 1} if group.rank == 0 else None)
    raises(CheckpointError, "exists", lambda: plain.save(path, model, optimizer))
    own = str(folder / f"rank {group.rank}")
    raises(RankMismatchError, "another path", lambda: plain.save(own, model))
    raises(RankMismatchError, "another extra", lambda: plain.save(
        str(folder / "x"), model, extra={"rank": group.rank},
    ))  # fmt: skip
    assert not (folder / "x").exists()

    wide = pk.parallel_context(tensor=2, layouts=LAYOUTS["mlp"])
    divided_model = wide.parallelize(build("mlp", 5))
    wide_optimizer = nn.Momentum(divided_model.trainable_params(), 0.1, 0.9)
    assert wide.load(path, divided_model, wide_optimizer) == {"step": 1}
    for context, one, two in ((plain, model, optimizer), (wide, divided_model, wide_optimizer)):
        step(context, one, two, x, y)
    second = str(folder / "second")
    wide.save(second, divided_model, wide_optimizer)
    before = {p.name: p.asnumpy().copy() for p in optimizer.get_parameters()}
    assert plain.load(second, model, optimizer) == {}
    for parameter in optimizer.get_parameters():  # the model's, and the moments
        np.testing.assert_allclose(parameter.asnumpy(), before[parameter.name], atol=1e-6)

    other = plain.parallelize(build("images", 0))
    kept = [p.asnumpy().copy() for p in other.get_parameters()]
    raises(CheckpointError, "of another model", lambda: plain.load(second, other))
    raises(CheckpointError, "Momentum, and Adam", lambda: plain.load(
        second, model, nn.Adam(model.trainable_params()),
    ))  # fmt: skip
    group.barrier()
    if group.rank == 0:
        data = bytearray((folder / "second" / "model.safetensors").read_bytes())
        data[-1] ^= 1
        (folder / "second" / "model.safetensors").write_bytes(data)
    group.barrier()
    raises(CheckpointError, "is damaged", lambda: plain.load(second, other))
    raises(CheckpointError, "does not exist", lambda: plain.load(str(folder / "none"), other))
    for parameter, value in zip(other.get_parameters(), kept, strict=True):
        np.testing.assert_array_equal(parameter.asnumpy(), value)
    assert sorted(p.name for p in folder.iterdir()) == ["apart", "first", "second"]
    wide.reset()
    plain.reset()


def step(context: Any, model: Any, optimizer: Any, x: Any, y: Any) -> None:
    context.train_step(model, x, y, loss=mean_loss)
    context.apply_gradients(model, optimizer)


def seeds_and_data() -> None:
    for degrees, apart in (({"data": 2}, True), ({"tensor": 2}, False)):
        context = pk.parallel_context(**degrees, layouts=LAYOUTS["mlp"])
        seed = context.seed(3)
        drawn = [float(np.random.rand()), float(ops.standard_normal((1,))[0])]
        mine = [seed, *drawn]
        first = group.broadcast_object(mine, 0)
        assert (mine != first) == (apart and group.rank == 1), (mine, first)
        loader = context.shard([(number,) for number in range(5)], batch_size=1)
        items = [int(row[0][0]) for row in loader]
        expected = [[0, 2, 4], [1, 3, 0]][group.rank] if apart else [0, 1, 2, 3, 4]
        assert items == expected, items
        context.reset()


group = pk.init_process_group(framework="mindspore", device="cpu", timeout=60)
different_models()
units()
apart(Path(sys.argv[1]))
divided()
seeds_and_data()
checkpoints(Path(sys.argv[1]))
group.close()
