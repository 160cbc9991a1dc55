"""PyNative and Graph: what was asked, what runs, and that a block restores what was."""

from __future__ import annotations

import copy
import functools
import inspect
import os
import threading
from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn, ops
from parallelkit_mindspore import execution
from parallelkit_mindspore.execution import MindSporeExecutionMode
from parallelkit_mindspore.graph import apart, settings

from parallelkit.errors import ExecutionModeError, UnsupportedFeatureError, WrongThreadError
from parallelkit.protocols import ExecutionMode
from parallelkit.spawn import RankResult
from parallelkit.specs import ExecutionSpec


def mode(name: str, *, fallback: bool = False, **options: object) -> MindSporeExecutionMode:
    return execution.set_execution_mode(
        ExecutionSpec(mode=name, framework="mindspore", fallback=fallback, options=options)
    )


def ones(*shape: int) -> Any:
    return ms.Tensor(np.ones(shape, np.float32))


def counts(graph: MindSporeExecutionMode) -> tuple[int, int, int]:
    return graph.graphs, graph.recompiles, graph.graph_breaks


def current() -> tuple[int, str | None]:
    return ms.get_context("mode"), os.environ.get("MS_JIT")


#: How often Python ran the `construct` of a cell.
CALLS: list[str] = []


class Counted(nn.Cell):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.layer = nn.Dense(3, 3)
        self.name = name

    def construct(self, x: Any, scale: float = 1.0) -> Any:
        CALLS.append(self.name)
        return self.layer(x) * scale


@pytest.fixture(autouse=True)
def _no_calls() -> None:
    CALLS.clear()


def doubled(x: Any) -> Any:
    return x * 2


def test_protocol_and_facts() -> None:
    eager, graph = mode("eager"), mode("graph", jit_level="O0")
    assert isinstance(eager, ExecutionMode)
    assert isinstance(graph, ExecutionMode)
    assert (eager.requested, eager.effective) == ("eager", "eager")
    assert (graph.requested, graph.effective) == ("graph", "graph")
    assert graph.reason == "mindspore.jit with capture_mode 'ast'"
    assert "mindspore.jit" in repr(graph)
    assert current() == (ms.PYNATIVE_MODE, None), "preparing a mode changed something"


def test_blocks_nest_and_restore() -> None:
    eager, graph = mode("eager"), mode("graph")
    in_eager, in_graph = (ms.PYNATIVE_MODE, "0"), (ms.GRAPH_MODE, None)
    before = current()
    with eager:
        assert current() == in_eager
        with graph:
            assert current() == in_graph
            with eager, eager:
                assert current() == in_eager
                assert mode("graph").effective == "graph", "MS_JIT=0 is the block's, not the user's"
            assert current() == in_graph
        assert current() == in_eager
    assert current() == before
    with pytest.raises(ZeroDivisionError), graph:
        raise ZeroDivisionError
    assert current() == before


def test_blocks_are_left_in_order() -> None:
    eager, graph, before = mode("eager"), mode("graph"), current()
    with pytest.raises(ExecutionModeError, match="without being entered"):
        eager.__exit__(None, None, None)
    graph.__enter__()
    eager.__enter__()
    with pytest.raises(ExecutionModeError, match=r"mode graph.* left while .*mode eager"):
        graph.__exit__(None, None, None)
    assert current() == (ms.PYNATIVE_MODE, "0"), "an exit that is refused changes nothing"
    eager.__exit__(None, None, None)
    graph.__exit__(None, None, None)
    assert current() == before


def test_a_cell_is_compiled_in_place_and_the_rest_is_not() -> None:
    cell, other = Counted("cell"), Counted("other")
    names = [parameter.name for parameter in cell.get_parameters()]
    x = ones(2, 3)
    expected = cell(x).asnumpy()
    graph, before = mode("graph"), current()
    assert graph.compile(cell) is cell
    assert current() == before, "compiling switched the mode of the process"
    CALLS.clear()
    for _ in range(3):
        np.testing.assert_allclose(cell(x).asnumpy(), expected, rtol=1e-6)
        other(x)
    assert CALLS == ["other"] * 3
    assert counts(graph) == (1, 0, 0)
    assert [parameter.name for parameter in cell.get_parameters()] == names
    assert len(cell.trainable_params()) == 2
    twin = copy.deepcopy(cell)
    assert twin.construct.__self__ is twin
    assert mode("eager").compile(cell) is cell
    assert "construct" not in cell.__dict__
    cell(x)
    assert CALLS == ["other"] * 3 + ["cell"]
    assert counts(graph) == (1, 0, 0)


def test_what_was_compiled_runs_plain_in_an_eager_block() -> None:
    cell = Counted("cell")
    mode("graph").compile(cell)
    x = ones(2, 3)
    cell(x)
    assert CALLS == []
    with mode("eager"):
        cell(x)
        cell(x, scale=2.0)
    assert CALLS == ["cell", "cell"]


def test_a_graph_block_compiles_every_cell() -> None:
    cell = nn.SequentialCell(nn.Dense(3, 3), nn.ReLU())
    graph = mode("graph")
    graph.compile(cell)
    expected = cell(ones(2, 3)).asnumpy()
    assert counts(graph) == (1, 0, 0)
    with graph:
        np.testing.assert_allclose(cell(ones(2, 3)).asnumpy(), expected, rtol=1e-6)
        cell(ones(2, 3))
    assert counts(graph) == (2, 1, 0), "the whole cell was compiled once more, by MindSpore itself"


def test_recompiles_are_constant_over_steps_and_grow_with_shapes() -> None:
    graph = mode("graph")
    step = graph.compile(nn.SequentialCell(nn.Dense(3, 3), nn.ReLU()))
    assert counts(graph) == (0, 0, 0)
    for _ in range(4):
        step(ones(2, 3))
        assert counts(graph) == (1, 0, 0)
    for size, recompiles in ((5, 1), (6, 2), (5, 2), (2, 2)):
        step(ones(size, 3))
        assert counts(graph) == (1 + recompiles, recompiles, 0)


class Product(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.weight = ms.Parameter(ones(3, 2), name="weight")

    def construct(self, x: Any) -> Any:
        return ops.matmul(x, self.weight)


@pytest.mark.parametrize("capture", ["ast", "bytecode"])
def test_parameters_that_move_are_noticed_and_compiled_again(capture: str) -> None:
    cell, graph = Product(), mode("graph", capture_mode=capture)
    graph.compile(cell)
    x = ones(2, 3)
    twin = copy.deepcopy(cell)
    twin(x)
    cell(x)
    compiled = graph.graphs
    cell(x)
    assert graph.graphs == compiled > 0
    cell.weight.set_data(ones(3, 2) * 5)
    assert cell(x).asnumpy().tolist() == [[15.0, 15.0]] * 2
    assert graph.graphs == compiled + 1
    cell(x)
    assert graph.graphs == compiled + 1
    cell.weight.copy_(ones(3, 2))
    assert cell(x).asnumpy().tolist() == [[3.0, 3.0]] * 2, "in place: no need to compile"
    assert graph.graphs == compiled + 1
    twin.weight.set_data(ones(3, 2) * 2)
    assert twin(x).asnumpy().tolist() == [[6.0, 6.0]] * 2, "a copy is watched by itself"


def test_an_optimiser_behind_a_compiled_function_is_watched() -> None:
    layer = nn.Dense(3, 2)
    optimiser = nn.SGD(layer.trainable_params(), 0.1)

    def loss(x: Any) -> Any:
        return layer(x).sum()

    gradient = ms.value_and_grad(loss, None, optimiser.parameters)

    def step(x: Any) -> Any:
        value, gradients = gradient(x)
        optimiser(gradients)
        return value

    compiled = mode("graph").compile(step)
    compiled(ones(2, 3))
    optimiser.learning_rate.set_data(ms.Tensor(0.0))
    before = layer.weight.asnumpy().copy()
    compiled(ones(2, 3))
    assert np.array_equal(layer.weight.asnumpy(), before)


def test_dynamic_shapes_stop_compiling() -> None:
    graph = mode("graph", dynamic=True)
    step = graph.compile(doubled)
    for size in (2, 3, 4, 5, 6, 7):
        step(ones(size))
    assert graph.graphs == 3
    assert "dynamic=1" in graph.explain()


def test_targets_are_counted_by_themselves() -> None:
    graph, other = mode("graph"), mode("graph")

    def inner(x: Any) -> Any:
        return x + 10

    one = graph.compile(inner)

    def outer(x: Any) -> Any:
        return one(x) * 2

    two, foreign = graph.compile(outer), other.compile(inner)
    for size in (2, 3, 4):
        one(ones(size))
    assert two(ones(2)).asnumpy().tolist() == [22.0, 22.0]
    foreign(ones(2))
    ms.jit(doubled)(ones(9))
    found = [(t.title.rpartition(".")[2], t.graphs, t.recompiles) for t in graph.targets]
    assert found == [("inner", 3, 2), ("outer", 1, 0)]
    assert counts(other) == (1, 0, 0), "graphs are not shared between modes"


def test_bytecode() -> None:
    graph = mode("graph", capture_mode="bytecode")

    def step(x: Any) -> Any:
        return ops.relu(x) * 3

    compiled = graph.compile(step)
    for size in (2, 2, 3, 2):
        assert compiled(ones(size)).asnumpy().tolist() == [3.0] * size
    assert counts(graph) == (2, 1, 0)
    with mode("eager"):
        compiled(ones(7))
    assert counts(graph) == (2, 1, 0)


@pytest.mark.ranks
def test_trace(job: Callable[..., list[RankResult]]) -> None:
    job("tracing.py", ranks=1)


def test_trace_where_mindspore_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = inspect.stack()[0]._replace(code_context=None)
    monkeypatch.setattr(settings.inspect, "stack", lambda: [frame])
    with pytest.raises(UnsupportedFeatureError, match="python -m"):
        mode("graph", capture_mode="trace")
    assert mode("graph").effective == "graph"


def test_eager_gives_back_the_target_and_undoes_compiling() -> None:
    cell, eager = nn.Dense(3, 3), mode("eager")
    assert eager.compile(doubled) is doubled
    assert eager.compile(mode("graph").compile(doubled)) is doubled
    for capture in ("ast", "bytecode", "trace"):
        assert eager.compile(ms.jit(doubled, capture_mode=capture)) is doubled
    assert eager.compile(ms.jit(cell)) is cell
    cell.construct = ms.jit(cell.construct)
    outer = nn.SequentialCell(cell)
    assert eager.compile(outer) is outer
    assert "construct" not in cell.__dict__
    method = Tool().run
    compiled = mode("graph").compile(method)
    assert compiled(ones(2)).asnumpy().tolist() == [2.0, 2.0]
    plain = eager.compile(compiled)
    assert (plain.__func__, plain.__self__) == (method.__func__, method.__self__)

    @functools.wraps(ms.jit(doubled))
    def users(x: Any) -> Any:
        return x

    assert eager.compile(users) is users, "a wrapper of the user's is the user's"


class Tool:
    def run(self, x: Any) -> Any:
        return x * 2

    def __call__(self, x: Any) -> Any:
        return x * 3


class Marked(nn.Cell):
    @ms.jit
    def construct(self, x: Any) -> Any:
        CALLS.append("marked")
        return x + 1


def test_a_construct_marked_with_jit_is_undone_for_the_cell_alone() -> None:
    cell, other = Marked(), Marked()
    assert mode("eager").compile(cell) is cell
    for _ in range(3):
        cell(ones(2))
        other(ones(2))
    assert CALLS == ["marked"] * 3
    assert "construct" not in other.__dict__


def test_partials_and_callable_objects() -> None:
    graph = mode("graph")
    assert graph.compile(functools.partial(doubled, x=ones(2)))().asnumpy().tolist() == [2.0, 2.0]
    assert graph.compile(Tool())(ones(1)).asnumpy().tolist() == [3.0]
    assert graph.graphs == 2


@pytest.mark.parametrize("target", [len, nn.Dense, Tool])
def test_what_mindspore_cannot_compile(target: Any) -> None:
    with pytest.raises(ExecutionModeError, match="cannot be compiled"):
        mode("graph").compile(target)


def test_what_cannot_be_called() -> None:
    for name in ("eager", "graph"):
        with pytest.raises(ExecutionModeError, match="a list cannot be compiled"):
            mode(name).compile([])


@pytest.mark.parametrize("name", ["eager", "graph"])
def test_unknown_options_are_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedFeatureError, match="no option 'ful_graph'"):
        mode(name, ful_graph=True)


def test_nearest_option_is_suggested() -> None:
    with pytest.raises(UnsupportedFeatureError, match="did you mean 'capture_mode'"):
        mode("graph", capture_mod="ast")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"capture_mode": "magic"}, "capture_mode is 'magic'; it is 'ast', 'bytecode', 'trace'"),
        ({"jit_level": "O9"}, "refuses .*O9"),
        ({"fullgraph": "yes"}, "refuses .*fullgraph"),
        ({"dynamic": 2}, "dynamic is 2"),
        ({"exec_order": "x"}, "refuses .*'bfs'"),
        ({"backend": "nothing"}, "no backend 'nothing'.*ms_backend"),
        ({"backend": 3}, "backend is 3"),
    ],
)
def test_values_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ExecutionModeError, match=said):
        mode("graph", **given)


@pytest.mark.parametrize("given", [{}, {"dynamic": None}, {"dynamic": False}, {"fullgraph": True}])
def test_values_that_are_allowed(given: dict[str, Any]) -> None:
    assert mode("graph", backend="ms_backend", **given).effective == "graph"


def test_ms_jit_0_is_refused_or_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MS_JIT", "0")
    with pytest.raises(UnsupportedFeatureError, match="MS_JIT=0 turns compiling off"):
        mode("graph")
    taken = mode("graph", fallback=True)
    assert (taken.requested, taken.effective) == ("graph", "eager")
    assert "MS_JIT=0" in taken.reason
    assert taken.compile(doubled) is doubled


def test_bytecode_needs_an_older_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings.sys, "version_info", (3, 12, 0))
    with pytest.raises(UnsupportedFeatureError, match=r"needs Python 3\.11"):
        mode("graph", capture_mode="bytecode")
    assert mode("graph").effective == "graph"


def test_fullgraph_turns_pieces_for_python_into_errors() -> None:
    def to_numpy(x: Any) -> Any:
        return ms.Tensor(x.asnumpy() + 1)

    assert mode("graph").compile(to_numpy)(ones(2)).asnumpy().tolist() == [2.0, 2.0]
    with pytest.raises(Exception, match="JIT strict mode"):
        mode("graph", fullgraph=True).compile(to_numpy)(ones(2))


def small() -> Any:
    ms.set_seed(3)
    net = nn.SequentialCell(nn.Dense(4, 8), nn.ReLU(), nn.Dense(8, 2))
    optimizer = nn.Adam(net.trainable_params(), learning_rate=0.05)
    return nn.TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), optimizer).set_train()


def batches() -> list[tuple[Any, Any]]:
    numbers = np.random.RandomState(0)
    made = [(numbers.rand(6, 4), numbers.rand(6, 2)) for _ in range(8)]
    return [(ms.Tensor(x.astype(np.float32)), ms.Tensor(y.astype(np.float32))) for x, y in made]


def test_alternating_modes_give_one_curve() -> None:
    eager, graph = mode("eager"), mode("graph")
    with apart.same_random_state():  # put back at the end
        step, turns = small(), small()
    names = [p.name for p in turns.get_parameters()]
    for number, (x, y) in enumerate(batches()):
        with eager:
            expected = float(step(x, y).asnumpy())
        with (eager, graph)[number % 2]:
            got = float(turns(x, y).asnumpy())
        assert got == pytest.approx(expected, rel=1e-5), number
    assert [p.name for p in turns.get_parameters()] == names


def test_gradients_pass_through_a_compiled_cell() -> None:
    net = nn.Dense(3, 1)
    x = ones(2, 3)

    def loss(x: Any) -> Any:
        return net(x).sum()

    gradient = ms.grad(loss, None, weights=net.trainable_params())
    expected = [g.asnumpy() for g in gradient(x)]
    graph = mode("graph")
    graph.compile(net)
    for one, other in zip(gradient(x), expected, strict=True):
        np.testing.assert_allclose(one.asnumpy(), other, rtol=1e-6)
    assert graph.graphs == 1


def test_other_threads_are_refused() -> None:
    eager, graph = mode("eager"), mode("graph")
    compiled = graph.compile(doubled)
    caught: list[str] = []

    def other() -> None:
        for call in (
            lambda: mode("graph"),
            lambda: graph.compile(doubled),
            eager.__enter__,
            lambda: compiled(1),
        ):
            try:
                call()
            except WrongThreadError as error:
                caught.append(str(error).split(" was called")[0])

    before = current()
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert caught == [
        "execution_mode",
        "ExecutionMode.compile",
        "entering an execution mode",
        "doubled, which is compiled,",
    ]
    assert current() == before


def test_explain() -> None:
    graph = mode("graph", jit_level="O0")
    graph.compile(doubled)(ones(2))
    cell = nn.Dense(2, 2)
    graph.compile(cell)
    mode("eager").compile(graph.compile(cell))
    assert graph.explain().splitlines() == [
        "execution mode 'graph', effective 'graph': mindspore.jit with capture_mode 'ast'",
        "options: jit_level='O0'",
        "doubled, what was done to it:",
        "  1. compiled",
        "  1 graph(s), 0 recompile(s), 0 break(s)",
        "Dense, what was done to it:",
        "  1. construct compiled in place",
        "  0 graph(s), 0 recompile(s), 0 break(s)",
        "Dense, what was done to it:",
        "  1. construct compiled in place",
        "  0 graph(s), 0 recompile(s), 0 break(s)",
    ]
