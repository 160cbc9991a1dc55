"""Choose how functions run, eagerly or as a graph, and see what that does to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from parallelkit import groups, hooks
from parallelkit.errors import ExecutionModeError, NoBackendError
from parallelkit.graphs import GraphReport, ModeComparison
from parallelkit.loader import PluginManager
from parallelkit.protocols import ExecutionMode
from parallelkit.records import PluginInfo
from parallelkit.selection import require, select
from parallelkit.specs import Candidate, ComparisonSpec, ExecutionSpec, GraphSpec, ProbeRequest


def execution_mode(
    mode: str,
    /,
    *,
    framework: str = "auto",
    fallback: bool = False,
    manager: PluginManager | None = None,
    **options: Any,
) -> ExecutionMode:
    """Prepare eager or graph execution. Not collective; needs no group.

    Args:
        mode: `"eager"` or `"graph"`.
        framework: whose mode; auto: the open group's, else as `init_process_group` would choose.
            An engine's too: `"vllm"`, whose mode says how to start it.
        fallback: take eager where graph cannot run (see `.effective` and `.reason`).
        manager: plugins to use, the process's own by default.
        options: options of the framework's own, refused by name when unknown.

    Raises:
        ExecutionModeError: an unknown mode.
        UnsupportedFeatureError: the framework's plugin has no such mode.

    Example:
        >>> step = execution_mode("graph").compile(train_step)  # doctest: +SKIP
    """
    ExecutionSpec(mode=mode, framework=framework)  # a wrong mode is reported first
    plugin, candidate, manager = _chosen(framework, manager, engines=True)
    if not (fallback and mode == "graph"):
        require(candidate, plugin, {f"execution.{mode}"})
    spec = ExecutionSpec(
        mode=mode, framework=candidate.framework, fallback=fallback, options=options
    )
    return hooks.set_execution_mode(plugin, spec, manager=manager)


def check_graph(
    function: Callable[..., Any],
    *args: Any,
    framework: str = "auto",
    manager: PluginManager | None = None,
    **kwargs: Any,
) -> GraphReport:
    """Say what keeps a function or a model from being one graph: construct, file and line.

    Not collective by itself, yet `function(*args, **kwargs)` is really run, once, with whatever
    that does: its collectives, its prints, its changes of arguments and of state. What graph
    mode remembers of functions compiled elsewhere in the process is left as it was.

    Args:
        function: a function or a model, compiled or not.
        args, kwargs: what to call it with; `framework` and `manager` are this function's own.
        framework: whose graph mode; auto as in `execution_mode`.

    Raises:
        ExecutionModeError: `function` cannot be called.
        FunctionFailedError: the function itself raised; chained to its exception.
        UnsupportedFeatureError: the framework's plugin has no graph mode.

    Example:
        >>> print(check_graph(model, batch))  # doctest: +SKIP
    """
    _check_callable(function, "check_graph")
    plugin, candidate, manager = _chosen(framework, manager)
    require(candidate, plugin, {"execution.graph"})
    spec = GraphSpec(
        framework=candidate.framework, function=function, args=args, kwargs=dict(kwargs)
    )
    return hooks.check_graph(plugin, spec, manager=manager)


def compare_modes(
    function: Callable[..., Any],
    *args: Any,
    framework: str = "auto",
    repeat: int = 10,
    gradients: bool = False,
    options: Mapping[str, Any] | None = None,
    manager: PluginManager | None = None,
    **kwargs: Any,
) -> ModeComparison:
    """Run a function eagerly and as a graph: the largest difference, and the speed-up.

    Every run starts from the same arguments, the same random state and, for models, the same
    parameters and buffers; all are as before when this returns. With MindSpore that holds for the
    cells, optimisers among them, and parameters that the function comes to from its closure too.
    With PyTorch what is in the closure stays changed. So does, with both, what the function changes
    elsewhere: it is run some `2 * repeat + 2` times. Where the function is collective, so is this
    call.

    Args:
        function: a function or a model, compiled or not; the plain one is taken.
        args, kwargs: what to call it with; the names above are this function's own.
        framework: whose modes; auto as in `execution_mode`.
        repeat: timed pairs of calls, after one warm call of each.
        gradients: also run backward, from the sum of all floating-point outputs that need it,
            and compare gradients of the arguments' and the models' tensors. Times contain it.
        options: options of graph mode, as `execution_mode("graph", **options)` takes them.

    Raises:
        ExecutionModeError: `function` cannot be called, `repeat` is no positive number, or there
            is nothing to call backward on.
        FunctionFailedError: the function itself raised; chained to its exception.
        UnsupportedFeatureError: graph mode cannot run, or an option is unknown.

    Example:
        >>> compare_modes(model, batch, gradients=True).speedup  # doctest: +SKIP
    """
    _check_callable(function, "compare_modes")
    if isinstance(repeat, bool) or not isinstance(repeat, int) or repeat < 1:
        raise ExecutionModeError(f"repeat is {repeat!r}; it is a number of runs, 1 or more")
    plugin, candidate, manager = _chosen(framework, manager)
    require(candidate, plugin, {"execution.graph"})
    spec = ComparisonSpec(
        framework=candidate.framework,
        function=function,
        args=args,
        kwargs=dict(kwargs),
        repeat=repeat,
        gradients=gradients,
        options=dict(options or {}),
    )
    return hooks.compare_modes(plugin, spec, manager=manager)


def _chosen(
    framework: str, manager: PluginManager | None, *, engines: bool = False
) -> tuple[PluginInfo, Candidate, PluginManager | None]:
    """Return the open group's plugin where it serves `framework`, else the one selected.

    With `engines` also one that opens no group, and so is never selected, by its framework's name.
    """
    held = groups.open_group()
    if manager is None and held is not None:
        manager = held.manager
    if held is not None and framework in ("auto", held.framework):
        return held.selection.winner, held.selection.candidate, manager
    request = ProbeRequest(framework=framework, launch=groups.read_launch())
    try:
        selection = select(request, manager=manager)
    except NoBackendError:
        engine = _engine(request, manager) if engines else None
        if engine is None:
            raise
        return *engine, manager
    return selection.winner, selection.candidate, manager


def _engine(
    request: ProbeRequest, manager: PluginManager | None
) -> tuple[PluginInfo, Candidate] | None:
    """The plugin of the framework asked for that has modes, selected or not."""
    answers, _ = hooks.probe(request, manager=manager)
    for answer in answers:
        candidate = answer.value
        if candidate.framework == request.framework and "execution.eager" in candidate.features:
            return answer.plugin, candidate
    return None


def _check_callable(function: object, what: str) -> None:
    if not callable(function):
        raise ExecutionModeError(
            f"{what} got a {type(function).__qualname__}, which cannot be called; "
            "give a function or a model"
        )
