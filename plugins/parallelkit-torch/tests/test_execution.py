"""Eager and graph: what was asked, what runs, and that a block restores what was."""

from __future__ import annotations

import pytest
import torch
from parallelkit_torch import execution
from parallelkit_torch.execution import TorchExecutionMode
from torch import nn
from torch._dynamo.testing import CompileCounter

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
