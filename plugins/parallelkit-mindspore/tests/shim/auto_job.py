"""One rank of 8 compiles what a search finds, by both APIs. Arguments: library, folder."""

from __future__ import annotations

import sys
from typing import Any

import mindspore as ms
from parallelkit_mindspore.parallel import settings_native
from parallelkit_mindspore.parallel.strategies import read_file
from world import Perceptron, World, batch, file_of, lines, strategy_of, whole_step

from parallelkit.errors import UnsupportedFeatureError
from parallelkit.plan import plan

FOUND = plan(8, "hybrid", data=2, tensor=4)
SEARCHES = ("dynamic_programming", "recursive_programming", "sharding_propagation")
FULL = {"dataset_strategy": "full_batch"}


def compiled(world: World, options: dict[str, Any], net: Any = None, mode: str = "auto") -> Any:
    """A context and a whole step of 512-1024-512, compiled in it."""
    degrees = {} if mode == "auto" else {"data": 2, "tensor": 4}
    context = world.context(mode, {**FULL, **options}, **degrees)
    step = context.parallelize(whole_step(net or Perceptron(512, 1024)))
    with world.device():
        assert context.compile(step, batch(512), batch(512)) is step
    return context, step


def search_by_recursive_programming(world: World, folder: str) -> None:
    """The search finds a division by columns, then by rows; its file is reused."""
    path = file_of(folder, "auto.json")
    context, step = compiled(world, {"strategy_save": path})
    assert context.found_plan(step) == FOUND
    assert lines(context, "the search found") == [f"the search found {FOUND.title}"]
    assert lines(context, "up.weight") == ["up.weight [1024, 512]: dim 0 over tensor (4)"]
    assert lines(context, "down.weight") == ["down.weight [512, 1024]: dim 1 over tensor (4)"]
    saved, planned = read_file(path).parameters, context.strategies(step).parameters
    assert {name: saved[name] for name in planned} == planned
    again, same = compiled(world, {"strategy_load": path, "layouts": {}}, mode="semi_auto")
    assert again.strategies(same).parameters == context.strategies(step).parameters


def search_by_propagation(world: World) -> None:
    """One operator is laid out, the search spreads it to the others."""
    layouts = {"**.up.matmul": ((2, 1), (4, 1))}
    options = {"search_mode": "sharding_propagation", "layouts": layouts}
    context, step = compiled(world, options)
    assert strategy_of(context, step, "relu-ReLU") == ((2, 4),)
    assert strategy_of(context, step, "down-Dense/MatMul") == ((2, 4), (1, 4))
    assert context.found_plan(step) == FOUND


def the_older_api(world: World, folder: str) -> None:
    """The process-wide settings: set, compiled under, read back, put back."""
    before = settings_native.snapshot()
    path = file_of(folder, "context.json")
    for search in SEARCHES:
        layouts = {"**.up.matmul": ((2, 1), (4, 1))} if search == "sharding_propagation" else {}
        context, step = compiled(
            world,
            {"api": "context", "search_mode": search, "layouts": layouts, "strategy_save": path},
        )
        assert ms.get_auto_parallel_context("parallel_mode") == "auto_parallel"
        assert ms.get_auto_parallel_context("search_mode") == search
        assert ms.get_auto_parallel_context("device_num") == 8
        assert ms.get_auto_parallel_context("gradients_mean") is True
        found = context.found_plan(step)
        assert found == FOUND if search != "dynamic_programming" else found is not None
        assert not type(step).__name__.startswith("AutoParallel")
        del step
        context.reset()
        assert settings_native.snapshot() == before
    styles = {"**.up": "colwise", "**.down": "rowwise"}
    context, step = compiled(world, {"api": "context", "layouts": styles}, mode="semi_auto")
    other, wrapped = compiled(world, {"layouts": styles}, mode="semi_auto")
    assert context.strategies(step).parameters == other.strategies(wrapped).parameters
    assert context.native == other.native
    del step, wrapped
    context.reset()
    again, step = compiled(world, {"api": "context", "strategy_load": path}, mode="semi_auto")
    assert strategy_of(again, step, "up-Dense/MatMul") == ((2, 1), (4, 1))
    del step
    again.reset()
    ms.set_context(mode=ms.PYNATIVE_MODE)
    eager = world.context("auto", {"api": "context"})
    try:
        eager.parallelize(Perceptron(8, 8))
        raise AssertionError("PyNative mode was accepted")
    except UnsupportedFeatureError as error:
        assert "PyNative mode is on" in str(error)
    eager.reset()
    assert settings_native.snapshot() == before


def main(library: str, folder: str) -> None:
    ms.set_context(mode=ms.GRAPH_MODE)
    world = World(library)
    search_by_recursive_programming(world, folder)
    search_by_propagation(world)
    the_older_api(world, folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
