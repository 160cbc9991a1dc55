"""Eager and graph: what was asked, what runs, and that a block restores what was."""

from __future__ import annotations

import pytest
import torch
from parallelkit_torch import execution, names
from parallelkit_torch.execution import TorchExecutionMode
from parallelkit_torch.graph import watch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel

from parallelkit.errors import ExecutionModeError, UnsupportedFeatureError
from parallelkit.protocols import ExecutionMode
from parallelkit.specs import ExecutionSpec


def mode(name: str, *, fallback: bool = False, **options: object) -> TorchExecutionMode:
    return execution.set_execution_mode(
        ExecutionSpec(mode=name, framework="torch", fallback=fallback, options=options)
    )


def stance() -> str:
    return torch._dynamo.eval_frame._stance.stance


def test_protocol_and_facts() -> None:
    eager, graph = mode("eager"), mode("graph", backend="eager")
    assert isinstance(eager, ExecutionMode)
    assert (eager.requested, eager.effective) == ("eager", "eager")
    assert (graph.requested, graph.effective) == ("graph", "graph")
    assert graph.reason == "torch.compile with eager"
    assert "torch.compile" in repr(graph)


def test_eager_gives_back_the_target_and_undoes_compiling() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    model = nn.Linear(2, 2)
    eager = mode("eager")
    assert eager.compile(step) is step
    assert eager.compile(model) is model
    assert eager.compile(torch.compile(step, backend="eager")) is step
    assert eager.compile(torch.compile(model, backend="eager")) is model


def test_graph_compiles_once_and_not_again() -> None:
    counter = CompileCounter()
    model = nn.Linear(2, 2)
    step = mode("graph", backend=counter).compile(model)
    for _ in range(4):
        step(torch.ones(3, 2))
    assert counter.frame_count == 1
    assert next(iter(step.parameters())) is model.weight


def test_blocks_nest_and_restore() -> None:
    counter = CompileCounter()
    step = torch.compile(lambda x: x * 2, backend=counter)
    eager, graph = mode("eager"), mode("graph", backend="eager")
    assert stance() == "default"
    with eager:
        step(torch.ones(1))
        assert counter.frame_count == 0
        with graph:
            step(torch.ones(1))
            assert counter.frame_count == 1
            with eager, eager:
                assert stance() == "force_eager"
            assert stance() == "default"
        assert stance() == "force_eager"
    assert stance() == "default"
    with pytest.raises(ZeroDivisionError), eager:
        raise ZeroDivisionError
    assert stance() == "default"


def test_blocks_are_left_in_order() -> None:
    eager, graph = mode("eager"), mode("graph", backend="aot_eager")
    with pytest.raises(ExecutionModeError, match="without being entered"):
        eager.__exit__(None, None, None)
    graph.__enter__()
    eager.__enter__()
    with pytest.raises(ExecutionModeError, match=r"mode graph.* left while .*mode eager"):
        graph.__exit__(None, None, None)
    assert stance() == "force_eager"
    eager.__exit__(None, None, None)
    graph.__exit__(None, None, None)
    assert stance() == "default"


def test_preparing_a_mode_changes_nothing() -> None:
    mode("eager")
    assert stance() == "default"


@pytest.mark.parametrize("name", ["eager", "graph"])
def test_unknown_options_are_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedFeatureError, match="no option 'ful_graph'"):
        mode(name, ful_graph=True)


def test_nearest_option_is_suggested() -> None:
    with pytest.raises(UnsupportedFeatureError, match="did you mean 'fullgraph'"):
        mode("graph", fulgraph=True)


def test_unknown_backend() -> None:
    with pytest.raises(ExecutionModeError, match=r"no backend 'nothing'.*inductor"):
        mode("graph", backend="nothing")


def test_what_cannot_be_called() -> None:
    with pytest.raises(ExecutionModeError, match="a list cannot be compiled"):
        mode("eager").compile([])


def test_no_compiler() -> None:
    with torch._inductor.config.patch({"cpp.cxx": (None, "/nonexistent/compiler")}):
        with pytest.raises(UnsupportedFeatureError, match=r"C\+\+ compiler.*execution_mode"):
            mode("graph")
        taken = mode("graph", fallback=True)
        assert (taken.requested, taken.effective) == ("graph", "eager")
        assert "C++ compiler" in taken.reason
        assert mode("graph", backend="aot_eager").effective == "graph"
        with taken:
            assert stance() == "force_eager"


def test_no_python_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution.sysconfig, "get_paths", lambda: {"include": "/nowhere"})
    assert "/nowhere/Python.h" in (execution.cpp_problem() or "")


#: torch's own, where dynamo looks at an input that another block computed
GRADIENT_WARNING = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.relu(self.first(x)))  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def counts(graph: TorchExecutionMode) -> tuple[int, int, int]:
    return graph.graphs, graph.recompiles, graph.graph_breaks


def test_recompiles_are_constant_over_steps_and_grow_with_shapes() -> None:
    graph = mode("graph", backend="aot_eager", dynamic=False)
    step = graph.compile(Net())
    assert counts(graph) == (0, 0, 0)
    for _ in range(4):
        step(torch.ones(3, 4))
        assert counts(graph) == (1, 0, 0)
    for size, recompiles in ((5, 1), (6, 2), (5, 2), (3, 2)):
        step(torch.ones(size, 4))
        assert counts(graph) == (1 + recompiles, recompiles, 0)


def test_dynamic_shapes_are_compiled_once_more() -> None:
    graph = mode("graph", backend="eager")
    step = graph.compile(lambda x: x * 7)
    for size in (3, 4, 5, 6):
        step(torch.ones(size))
    assert counts(graph) == (2, 1, 0)


def test_targets_are_counted_by_themselves() -> None:
    def first(x: torch.Tensor) -> torch.Tensor:
        return x + 10

    def second(x: torch.Tensor) -> torch.Tensor:
        y = x + 20
        print(end="")
        return y * 2

    graph, other = (mode("graph", backend="eager", dynamic=False) for _ in range(2))
    one, two = graph.compile(first), graph.compile(second)
    foreign = other.compile(lambda x: x + 30)
    for size in (2, 3, 4):
        one(torch.ones(size))
    two(torch.ones(2))
    foreign(torch.ones(2))
    torch.compile(lambda x: x + 40, backend="eager")(torch.ones(2))
    assert [(t.title.rpartition(".")[2], t.graphs, t.recompiles) for t in graph.targets] == [
        ("first", 3, 2),
        ("second", 2, 0),
    ]
    (found,) = graph.targets[1].breaks
    assert found.construct == "call of print()"
    assert found.file == __file__
    assert counts(graph) == (5, 2, 1)
    assert counts(other) == (1, 0, 0)


def test_a_reset_of_dynamo_does_not_end_the_counting() -> None:
    graph = mode("graph", backend="eager")
    step = graph.compile(lambda x: x * 11)
    step(torch.ones(2))
    torch._dynamo.reset()
    step(torch.ones(2))
    assert counts(graph) == (2, 1, 0)


def test_fullgraph_raises_and_the_break_is_counted() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        print(end="")
        return x * 13

    graph = mode("graph", backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        graph.compile(step)(torch.ones(2))
    assert counts(graph) == (0, 0, 1)
    assert graph.compile(lambda x: x * 14)(torch.ones(2)).sum() == 28
    assert counts(graph) == (1, 0, 1)


@GRADIENT_WARNING
def test_blocks_share_what_was_compiled() -> None:
    torch._dynamo.reset()
    graph = mode("graph", backend="aot_eager", regions="blocks")
    model = Net()
    expected = model(torch.ones(2, 4, requires_grad=True))
    plain = list(model.state_dict())
    step = graph.compile(model)
    assert step is model
    torch.testing.assert_close(step(torch.ones(2, 4, requires_grad=True)), expected)
    assert counts(graph) == (1, 0, 0)
    assert list(model.state_dict()) == names.plain_names(model) == plain
    assert names.is_compiled(model)
    assert graph.compile(model) is model  # again: not compiled twice over
    assert mode("eager").compile(model) is model
    assert not names.is_compiled(model)
    step(torch.ones(9, 4))
    assert counts(graph) == (1, 0, 0)


@GRADIENT_WARNING
def test_what_was_done_is_told_in_order() -> None:
    graph = mode("graph", backend="aot_eager", regions=["layers.*"])
    model = Net()
    model.layers[0] = checkpoint_wrapper(model.layers[0])
    graph.compile(model)(torch.ones(2, 4))
    text = graph.explain()
    assert "effective 'graph': torch.compile with aot_eager" in text
    first = text.index("1. activation checkpoints around 1 part(s)")
    assert first < text.index("2. compiled in place: layers.0, layers.1, layers.2")
    assert "recompile(s), 0 break(s)" in text
    eager = mode("eager")
    eager.compile(model)
    assert "2. compiled no longer" in eager.explain()


def test_regions_of_a_function() -> None:
    with pytest.raises(ExecutionModeError, match="names parts of a module"):
        mode("graph", regions="blocks", backend="eager").compile(lambda x: x)


@GRADIENT_WARNING
@pytest.mark.parametrize("regions", ["whole", "blocks"])
def test_names_through_checkpoints_and_compiling(regions: str) -> None:
    model = Net()
    plain = list(model.state_dict())
    model.layers[1] = checkpoint_wrapper(model.layers[1])
    step = mode("graph", backend="aot_eager", regions=regions).compile(model)
    step(torch.ones(2, 4)).sum().backward()
    assert names.plain_names(step) == plain
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_compiled_before_it_was_replicated() -> None:
    wrapped = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(wrapped)
    wrapped.module = torch.compile(Net(), backend="eager")
    with pytest.raises(ExecutionModeError, match="compiled before it was replicated"):
        mode("graph", backend="eager").compile(wrapped)


def test_cuda_graphs_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(execution, "cpp_problem", lambda: None)
    with pytest.raises(UnsupportedFeatureError, match="cuda_graphs=True cannot run here: torch"):
        mode("graph", cuda_graphs=True)
    taken = mode("graph", cuda_graphs=True, fallback=True)
    assert taken.effective == "graph"
    assert taken.reason.endswith("without CUDA graphs: torch sees no CUDA device")
    assert taken.compile_options == {}


def test_cuda_graphs_of_a_model_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ExecutionModeError, match="cannot run Net: its parameters are on cpu"):
        mode("graph", cuda_graphs=True).compile(Net())
    taken = mode("graph", cuda_graphs=True, fallback=True)
    assert taken.compile_options == {"mode": "reduce-overhead"}
    given: list[dict[str, object]] = []
    monkeypatch.setattr(torch, "compile", lambda model, **options: given.append(options) or model)
    taken.compile(Net())
    assert given == [{}]
    assert "without CUDA graphs: parameters are on cpu" in taken.explain()


def test_a_torch_that_cannot_be_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_entry", lambda compiled: object())
    graph = mode("graph", backend="eager")
    step = graph.compile(lambda x: x * 17)
    assert step(torch.ones(2)).sum() == 34  # it runs compiled all the same
    with pytest.raises(UnsupportedFeatureError, match="cannot be counted"):
        _ = graph.recompiles
    assert "cannot be counted" in graph.explain()
