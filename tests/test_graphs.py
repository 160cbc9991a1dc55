"""Reports of graph mode, and the way from `check_graph` and `compare_modes` to a plugin."""

from __future__ import annotations

import json

import pytest

import parallelkit as pk
from parallelkit.errors import (
    ExecutionModeError,
    NoBackendError,
    PluginContractError,
    UnsupportedFeatureError,
)
from parallelkit.plugin import Difference, GraphBreak, GraphReport, ModeComparison, hookimpl
from parallelkit.testing.fake import FEATURES, FakePlugin

BREAK = GraphBreak(
    construct="call of print()",
    reason="it cannot be traced",
    file="train.py",
    line=7,
    hint="leave it out",
    source="print(loss)",
)


def report(**changes: object) -> GraphReport:
    values: dict[str, object] = {"function": "step", "framework": "x", "graphs": 1}
    return GraphReport(**(values | changes))  # type: ignore[arg-type]


def comparison(**changes: object) -> ModeComparison:
    values: dict[str, object] = {
        "function": "step",
        "framework": "x",
        "reason": "as asked",
        "outputs": Difference(tensors=2, max_abs=1e-6, max_rel=1e-3, worst="['loss']"),
        "eager_seconds": (2.0, 4.0, 6.0),
        "graph_seconds": (1.0, 1.0, 1.0),
    }
    return ModeComparison(**(values | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("graphs", "breaks", "ok"),
    [(1, (), True), (2, (), False), (1, (BREAK,), False), (0, (), False)],
)
def test_one_graph_and_nothing_else_is_ok(
    graphs: int, breaks: tuple[GraphBreak, ...], ok: bool
) -> None:
    made = report(graphs=graphs, breaks=breaks)
    assert made.ok is ok
    assert json.loads(made.to_json())["ok"] is ok


def test_a_report_names_construct_place_and_hint() -> None:
    text = str(report(breaks=(BREAK,)))
    for part in ("call of print()", "train.py:7", "print(loss)", "cannot be traced", "leave it"):
        assert part in text
    assert json.loads(report(breaks=(BREAK,)).to_json())["breaks"][0]["line"] == 7


def test_speedup_is_the_median_of_pairs_with_its_quartiles() -> None:
    made = comparison()
    assert made.speedup == 4.0
    assert made.speedup_spread == (3.0, 5.0)
    assert "speed-up 4.00 (quartiles 3.00 to 5.00 of 3)" in str(made)
    assert comparison(eager_seconds=(), graph_seconds=()).speedup == 0.0


def test_one_pair_has_no_spread() -> None:
    made = comparison(eager_seconds=(3.0,), graph_seconds=(2.0,))
    assert made.speedup_spread == (1.5, 1.5)


def test_infinite_differences_are_json() -> None:
    made = comparison(gradients=Difference(tensors=1, max_abs=float("inf"), max_rel=float("nan")))
    exported = json.loads(made.to_json())
    assert exported["gradients"]["max_abs"] is None
    assert exported["gradients"]["max_rel"] is None
    assert exported["outputs"]["max_abs"] == 1e-6
    assert "gradients" in str(made)
    assert "gradients" not in str(comparison())


def test_the_call_reaches_the_selected_plugin(manager, clean_launch) -> None:
    clean_launch()
    calls: list[tuple[object, ...]] = []

    def step(*args: object, **kwargs: object) -> None:
        calls.append((args, kwargs))

    manager.register(FakePlugin("one"), name="one")
    made = pk.check_graph(step, 1, 2, scale=3, manager=manager)
    assert made.framework == "one"
    assert calls == [((1, 2), {"scale": 3})]
    compared = pk.compare_modes(step, 1, repeat=2, manager=manager)
    assert len(calls) == 1 + 6
    assert len(compared.graph_seconds) == 2


@pytest.mark.parametrize("call", [pk.check_graph, pk.compare_modes])
def test_what_cannot_be_called(call, manager) -> None:
    with pytest.raises(ExecutionModeError, match="got a list, which cannot be called"):
        call([], manager=manager)


@pytest.mark.parametrize("repeat", [0, -1, 1.5, True, None])
def test_a_number_of_runs(repeat, manager) -> None:
    with pytest.raises(ExecutionModeError, match="repeat is"):
        pk.compare_modes(print, repeat=repeat, manager=manager)


@pytest.mark.parametrize("call", [pk.check_graph, pk.compare_modes])
def test_a_framework_without_graph_mode(call, manager, clean_launch) -> None:
    clean_launch()
    plain = FakePlugin("plain", features=FEATURES - {"execution.graph"})
    manager.register(plain, name="plain")
    with pytest.raises(UnsupportedFeatureError, match=r"execution\.graph"):
        call(print, manager=manager)


@pytest.mark.parametrize(
    ("hook", "call"),
    [("parallelkit_check_graph", "check_graph"), ("parallelkit_compare_modes", "compare_modes")],
)
def test_a_wrong_answer_is_blamed_on_the_plugin(hook, call, manager, clean_launch) -> None:
    clean_launch()

    class Wrong(FakePlugin):
        pass

    setattr(Wrong, hook, hookimpl(lambda self, spec: "fine"))
    getattr(Wrong, hook).__name__ = hook
    manager.register(Wrong("wrong"), name="wrong")
    with pytest.raises(PluginContractError, match=f"'wrong'.*{hook} answered str"):
        getattr(pk, call)(print, manager=manager)


def test_options_of_the_framework_may_be_called_mode(manager, clean_launch) -> None:
    clean_launch()
    manager.register(FakePlugin("one"), name="one")
    made = pk.execution_mode("graph", mode="max-autotune", manager=manager)
    assert made.spec.options == {"mode": "max-autotune"}  # type: ignore[attr-defined]
    assert (made.graphs, made.recompiles, made.graph_breaks) == (0, 0, 0)
    assert "graph" in made.explain()


def test_a_mode_of_an_engine_is_had_by_its_name(manager, clean_launch) -> None:
    """Its plugin opens no group, so nothing else is to be had of it."""
    clean_launch()
    manager.register(FakePlugin("engine", score=0, reason="takes weights"), name="engine")
    made = pk.execution_mode("graph", framework="engine", manager=manager)
    assert made.spec.framework == "engine"  # type: ignore[attr-defined]
    for call in (
        lambda: pk.execution_mode("graph", manager=manager),
        lambda: pk.check_graph(print, framework="engine", manager=manager),
        lambda: pk.init_process_group(framework="engine", manager=manager),
    ):
        with pytest.raises(NoBackendError, match="takes weights"):
            call()


def test_what_cannot_be_used_has_no_modes(manager, clean_launch) -> None:
    clean_launch()
    gone = FakePlugin("gone", score=0, reason="not installed", features=frozenset())
    manager.register(gone, name="gone")
    with pytest.raises(NoBackendError, match="not installed"):
        pk.execution_mode("eager", framework="gone", manager=manager)
