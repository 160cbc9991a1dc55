"""Parts of the execution suite: eager and graph, what keeps from a graph, and both compared."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import numpy as np

import parallelkit as pk
from parallelkit.errors import ExecutionModeError, FunctionFailedError, UnsupportedFeatureError
from parallelkit.protocols import ExecutionMode
from parallelkit.testing.conformance import reference
from parallelkit.testing.conformance.contexts import LR, MOMENTUM
from parallelkit.testing.conformance.groups import open_group
from parallelkit.testing.conformance.parts import (
    Case,
    Parts,
    all_close,
    close,
    main,
    raises,
    source_of,
)

TOLERANCE: Final = 2e-6
GRAPH: Final = ("execution.graph",)

PARTS: Final = Parts()


def double(x: Any) -> Any:
    """Something that every graph mode can take."""
    return x * 2 + 1


def fails(x: Any) -> Any:
    """Something that fails by itself."""
    raise ValueError("on purpose")


@PARTS.part()
def refusals(case: Case) -> None:
    """Unknown modes and options are refused by name."""
    raises(ExecutionModeError, lambda: mode(case, "fast"), "'fast'", "eager", "graph")
    for name in sorted({"eager", *graph_of(case)}):
        raises(UnsupportedFeatureError, partial(mode, case, name, no_such=1), "'no_such'")
        raises(ExecutionModeError, partial(mode(case, name).compile, []), "list")


@PARTS.part(needs=["execution.eager"])
def eager(case: Case) -> None:
    """Eager gives back what it was given, and changes nothing by being prepared."""
    before = case.adapter.global_mode()
    made = mode(case, "eager")
    assert isinstance(made, ExecutionMode)
    assert (made.requested, made.effective) == ("eager", "eager")
    assert case.adapter.global_mode() == before
    assert made.compile(double) is double
    model = case.adapter.mlp(reference.mlp_weights())
    assert made.compile(model) is model
    check_output(case, model)
    assert (made.graphs, made.recompiles, made.graph_breaks) == (0, 0, 0)
    assert "eager" in made.explain()


@PARTS.part(needs=GRAPH)
def graph_function(case: Case) -> None:
    """A compiled function gives what the plain one gives."""
    made = graph(case)
    assert (made.requested, made.effective) == ("graph", "graph")
    assert made.reason
    compiled = made.compile(double)
    for _ in range(2):
        found = case.adapter.array(compiled(case.tensor([1.0, 2.0])))
        assert found.tolist() == [3.0, 5.0]


@PARTS.part(needs=GRAPH)
def graphs_are_counted(case: Case) -> None:
    """Equal shapes compile once; a new shape is right, too, and then constant again."""
    made = graph(case)
    model = made.compile(case.adapter.mlp(reference.mlp_weights()))
    check_output(case, model)
    graphs = made.graphs
    assert graphs >= 1, f"{graphs} graphs after a call"
    for _ in range(3):
        check_output(case, model)
    assert (made.graphs, made.recompiles) == (graphs, 0)
    for items in (2, 5):  # the second new shape may be taken by what was made for the first
        check_output(case, model, items)
    after = (made.graphs, made.recompiles)
    for items in (2, 5):
        check_output(case, model, items)
    assert (made.graphs, made.recompiles) == after
    assert made.graph_breaks == 0
    assert str(after[0]) in made.explain()


@PARTS.part(needs=(*GRAPH, "weights.source"))
def names_stay_plain(case: Case) -> None:
    """A compiled model has the parameters of the plain one, under their names."""
    plain = case.adapter.mlp(reference.mlp_weights())
    manifest = source_of(case, plain).manifest()
    compiled = graph(case).compile(plain)
    check_output(case, compiled)
    assert source_of(case, compiled).manifest() == manifest
    assert [t.name for t in manifest.tensors] == list(reference.mlp_weights())


@PARTS.part(needs=GRAPH)
def eager_undoes_compiling(case: Case) -> None:
    """`eager.compile` of what `graph.compile` gave is the plain thing."""
    assert mode(case, "eager").compile(graph(case).compile(double)) is double
    model = case.adapter.mlp(reference.mlp_weights())
    compiled = graph(case).compile(model)
    check_output(case, compiled)
    assert mode(case, "eager").compile(compiled) is model
    check_output(case, model)


@PARTS.part(needs=GRAPH)
def blocks_nest_and_restore(case: Case) -> None:
    """A block restores what was, whatever ends it."""
    state = case.adapter.global_mode
    modes = {"eager": mode(case, "eager"), "graph": graph(case)}
    before = state()
    inside: dict[str, Any] = {}
    for name, made in modes.items():
        with made as entered:
            assert entered is made
            inside[name] = state()
        assert state() == before
    assert inside["eager"] != inside["graph"]
    with modes["eager"]:
        with modes["graph"]:
            assert state() == inside["graph"]
            with modes["eager"], modes["eager"]:
                assert state() == inside["eager"]
            assert state() == inside["graph"]
        assert state() == inside["eager"]
    assert state() == before

    def ends_badly(name: str) -> None:
        with modes[name]:
            raise ZeroDivisionError

    for name in modes:
        raises(ZeroDivisionError, partial(ends_badly, name))
        assert state() == before


@PARTS.part(needs=("context.standalone", *GRAPH))
def training_is_the_same(case: Case) -> None:
    """Steps in either mode, and in both by turns, are the reference's."""
    with open_group(case):
        for turns in (("eager",) * 4, ("graph",) * 4, ("eager", "graph") * 2):
            expected = reference.MLP(reference.mlp_weights())
            context = pk.parallel_context("standalone")
            model = context.parallelize(case.adapter.mlp(reference.mlp_weights()))
            optimizer = case.adapter.momentum(model, LR, MOMENTUM)
            modes = {"eager": mode(case, "eager"), "graph": graph(case)}
            ready = {name: modes[name].compile(model) for name in sorted(set(turns))}
            inputs, targets = reference.batch(4)
            for turn in turns:
                with modes[turn]:
                    loss = context.train_step(
                        ready[turn],
                        case.tensor(inputs),
                        case.tensor(targets),
                        loss=reference.mean_squares,
                    )
                    context.apply_gradients(ready[turn], optimizer)
                close(case.adapter.array(loss), expected.loss(inputs, targets), TOLERANCE)
                expected.step(expected.gradients(inputs, targets), LR, MOMENTUM)
            all_close(case.adapter.parameters(model), expected.weights, 10 * TOLERANCE)
            context.reset()
            del model, optimizer, ready


@PARTS.part(needs=GRAPH)
def check_graph(case: Case) -> None:
    """A planted construct is found at its line; a function without any is one graph."""
    x = case.tensor([1.0, 2.0])
    given: dict[str, Any] = {"framework": case.adapter.framework, "manager": case.adapter.manager}
    report = pk.check_graph(double, x, **given)
    assert report.ok, str(report)
    assert report.framework == case.adapter.framework
    before = case.adapter.global_mode()
    planted = case.adapter.planted()
    report = pk.check_graph(planted.function, x, **given)
    assert not report.ok, str(report)
    found = [(b.file, b.line) for b in report.breaks]
    assert (planted.file, planted.line) in found, f"{planted} not in {found}"
    words = [b.construct for b in report.breaks if b.line == planted.line]
    assert any(planted.construct.lower() in word.lower() for word in words), words
    assert case.adapter.global_mode() == before
    error = raises(FunctionFailedError, lambda: pk.check_graph(fails, x, **given))
    assert isinstance(error.__cause__, ValueError)
    raises(ExecutionModeError, lambda: pk.check_graph(3, x, **given), "int")  # type: ignore[arg-type]


@PARTS.part(needs=GRAPH)
def compare_modes(case: Case) -> None:
    """Both modes agree, gradients too; the model and the mode are as before."""
    given: dict[str, Any] = {
        "framework": case.adapter.framework,
        "manager": case.adapter.manager,
        "options": dict(case.adapter.graph_options),
    }
    before = case.adapter.global_mode()
    model = case.adapter.mlp(reference.mlp_weights())
    inputs, _ = reference.batch(4)
    compared = pk.compare_modes(model, case.tensor(inputs), repeat=2, gradients=True, **given)
    assert compared.outputs.tensors == 1
    assert compared.outputs.max_abs < TOLERANCE, str(compared)
    assert compared.gradients is not None
    assert compared.gradients.tensors >= len(reference.mlp_weights())
    assert compared.gradients.max_abs < 10 * TOLERANCE, str(compared)
    assert len(compared.eager_seconds) == len(compared.graph_seconds) == 2
    assert compared.recompiles == 0
    assert compared.speedup > 0
    all_close(case.adapter.parameters(model), reference.mlp_weights(), 0)
    assert case.adapter.global_mode() == before
    x = case.tensor([1.0])
    raises(ExecutionModeError, lambda: pk.compare_modes(double, x, repeat=0, **given), "repeat")
    raises(FunctionFailedError, lambda: pk.compare_modes(fails, x, repeat=1, **given))
    assert case.adapter.global_mode() == before


def mode(case: Case, name: str, **options: Any) -> ExecutionMode:
    """The adapter's mode of a name."""
    return pk.execution_mode(
        name, framework=case.adapter.framework, manager=case.adapter.manager, **options
    )


def graph(case: Case) -> ExecutionMode:
    """The adapter's graph mode, with its options."""
    return mode(case, "graph", **case.adapter.graph_options)


def graph_of(case: Case) -> set[str]:
    """The graph mode's name where the backend has one."""
    return {"graph"} if set(GRAPH) <= case.features else set()


def check_output(case: Case, model: Any, items: int = 4) -> None:
    """Check that a model with the reference's weights gives the reference's loss."""
    inputs, targets = reference.batch(items)
    output = case.adapter.array(model(case.tensor(inputs)))
    found = float(np.mean((output.astype(np.float64) - targets) ** 2))
    close(found, reference.MLP(reference.mlp_weights()).loss(inputs, targets), TOLERANCE)


if __name__ == "__main__":
    main(PARTS)
