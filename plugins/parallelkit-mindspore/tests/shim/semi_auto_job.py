"""One rank of 8 compiles what the user laid out. Arguments: the library, a folder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import mindspore as ms
from mindspore import ops
from parallelkit_mindspore.parallel.strategies import operator_pieces, read_file
from world import Perceptron, World, batch, file_of, lines, strategy_of, whole_step

from parallelkit.errors import LayoutError, StrategyError, UnsupportedFeatureError

LAYOUTS = {"**.up": "colwise", "**.down": "rowwise"}
MEGATRON = [
    "up.weight [128, 64]: dim 0 over tensor (4)",
    "up.bias [128]: dim 0 over tensor (4)",
    "down.weight [64, 128]: dim 1 over tensor (4)",
    "down.bias [64]: whole",
]


class Scaled(Perceptron):
    """A product with a parameter that is smaller than its input."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__(width, inner)
        self.scale = ms.Parameter(ops.ones((width,)), name="scale")
        self.mul = ops.Mul()

    def construct(self, x: Any) -> Any:
        return self.mul(self.down(self.relu(self.up(x))), self.scale)


def raises(kind: type[Exception], *says: str) -> Any:
    class Check:
        def __enter__(self) -> None: ...
        def __exit__(self, got: Any, error: Any, _: Any) -> bool:
            assert got is kind, (kind, error)
            for text in says:
                assert text in str(error), (text, str(error))
            return True

    return Check()


def forward_by_the_models_own_strategies(world: World) -> None:
    net = Perceptron(64, 128)
    net.up.matmul.shard(((2, 1), (4, 1)))
    net.down.matmul.shard(((2, 4), (1, 4)))
    context = world.context("semi_auto", {"dataset_strategy": "full_batch"}, data=2, tensor=4)
    step = context.parallelize(net)
    assert lines(context, "not compiled yet")
    with raises(StrategyError, "not compiled"):
        context.strategies(step)
    with world.device():
        context.compile(step, batch(64))
    assert lines(context, "up.weight") == MEGATRON[:1]
    assert lines(context, "down.weight") == MEGATRON[2:3]
    assert strategy_of(context, step, "up-Dense/MatMul") == ((2, 1), (4, 1))
    (said,) = lines(context, "Default/network-Perceptron/down-Dense/MatMul")
    assert said.endswith(
        "input 0: dim 0 over data (2), dim 1 over tensor (4); input 1: dim 1 over tensor (4)"
    )


def step_by_layouts(world: World, folder: str) -> None:
    """A whole step; the file of its strategies makes a second one alike, without layouts."""
    path = file_of(folder, "semi.json")
    context = world.context(
        "semi_auto", {"layouts": LAYOUTS, "strategy_save": path}, data=2, tensor=4
    )
    step = context.parallelize(whole_step(Perceptron(64, 128)))
    with world.device():
        context.compile(step, batch(64), batch(64))
    shown = context.explain()
    for line in MEGATRON:
        assert f"  {line}" in shown, shown
    assert "layout: network._backbone.up.matmul by ((2, 1), (4, 1))" in shown
    assert context._data_part() == (world.rank, 8)
    saved = read_file(path)
    assert saved.operators["MatMul_up.weight"] == ((2, 1), (4, 1))
    assert saved.parameters["up.weight"] == context.strategies(step).parameters["up.weight"]

    for options, expected in (({"strategy_load": path}, MEGATRON[0]), ({}, None)):
        again = world.context(
            "semi_auto",
            options,
            data=-1 if expected is None else 2,
            tensor=1 if expected is None else 4,
        )
        plain = again.parallelize(whole_step(Perceptron(64, 128)))
        with world.device():
            again.compile(plain, batch(64), batch(64))
        got = lines(again, "up.weight")
        assert got == [expected or "up.weight [128, 64]: whole"], got
        if expected:  # the operators of the file; others are MindSpore's to choose
            for layer in ("up-Dense/MatMul", "up-Dense/BiasAdd", "down-Dense/MatMul"):
                assert strategy_of(again, plain, layer) == strategy_of(context, step, layer)


def optimizer_sharding(world: World, folder: str) -> None:
    path = file_of(folder, "shard.json")
    options = {"layouts": LAYOUTS, "optimizer_threshold": 0, "strategy_save": path}
    context = world.context("semi_auto", options, data=1, data_shard=2, tensor=4)
    step = context.parallelize(whole_step(Perceptron(64, 128)))
    with world.device():
        context.compile(step, batch(64), batch(64))
    assert lines(context, "up.weight") == [
        "up.weight [128, 64]: dim 0 over tensor (4), dim 0 over data_shard (2)"
    ]
    saved = read_file(path)  # says how far apart the optimizer's ranks are; we reckon it
    reckoned = context.strategies(step).parameters
    assert {n: layout.pieces for n, layout in saved.parameters.items() if n in reckoned} == {
        n: layout.pieces for n, layout in reckoned.items()
    }


def digits_of_an_operator(world: World) -> None:
    """Our rule for the ranks of an operator's dims, against MindSpore's layout of its parameter."""
    context = world.context(
        "semi_auto", {"layouts": {"mul": ((2, 2), (2,)), "up.matmul": ((1, 1), (4, 1))}}, data=8
    )
    step = context.parallelize(Scaled(64, 128))
    with world.device():
        context.compile(step, batch(64))
    found = context.strategies(step)
    for name, weight, position in (("/Mul-", "scale", 1), ("up-Dense/MatMul", "up.weight", 1)):
        (operator,) = (key for key in found.operators if name in key)
        ours = operator_pieces(operator, found.operators[operator], world.size)
        assert ours is not None
        assert tuple(ours[position]) == found.parameters[weight].pieces != (), (name, ours)


def wrong_layouts(world: World) -> None:
    context = world.context("semi_auto", {"layouts": {"up.matmul": ((2, 1), (4, 1))}}, tensor=4)
    step = context.parallelize(Perceptron(64, 130))
    with (
        world.device(),
        raises(
            LayoutError,
            "operator MatMul cannot be divided",
            "up.matmul by ((2, 1), (4, 1)) (weight [130, 64], bias [130])",
            "world.py:",
        ),
    ):
        context.compile(step, batch(64))
    with raises(LayoutError, "cell 'up' (colwise)", "130 outputs", "tensor=4"):
        world.context("semi_auto", {"layouts": {"up": "colwise"}}, tensor=4).parallelize(
            Perceptron(64, 130)
        )
    with raises(LayoutError, "nothing says what it divides"):
        world.context("semi_auto", {}, tensor=4).parallelize(Perceptron(64, 128))
    unlaid = world.context("semi_auto")
    step = unlaid.parallelize(Perceptron(64, 128))
    with raises(UnsupportedFeatureError, "for Ascend and GPU only"):  # nothing is pretended
        unlaid.compile(step, batch(64))


def main(library: str, folder: str) -> None:
    ms.set_context(mode=ms.GRAPH_MODE)
    world = World(library)
    forward_by_the_models_own_strategies(world)
    step_by_layouts(world, folder)
    optimizer_sharding(world, folder)
    digits_of_an_operator(world)
    wrong_layouts(world)
    assert ms.get_auto_parallel_context("parallel_mode") == "stand_alone"
    assert ms.get_context("device_target") == "CPU"
    assert not list(Path(folder).glob("*.ckpt"))


if __name__ == "__main__":
    main(*sys.argv[1:])
