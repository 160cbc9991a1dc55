"""Choose how functions run: eagerly, or as a graph."""

from __future__ import annotations

from typing import Any

from parallelkit import groups, hooks
from parallelkit.loader import PluginManager
from parallelkit.protocols import ExecutionMode
from parallelkit.selection import require, select
from parallelkit.specs import ExecutionSpec, ProbeRequest


def execution_mode(
    mode: str,
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
    held = groups.open_group()
    if manager is None and held is not None:
        manager = held.manager
    if held is not None and framework in ("auto", held.framework):
        plugin, candidate = held.selection.winner, held.selection.candidate
    else:
        request = ProbeRequest(framework=framework, launch=groups.read_launch())
        selection = select(request, manager=manager)
        plugin, candidate = selection.winner, selection.candidate
    if not (fallback and mode == "graph"):
        require(candidate, plugin, {f"execution.{mode}"})
    spec = ExecutionSpec(
        mode=mode, framework=candidate.framework, fallback=fallback, options=options
    )
    return hooks.set_execution_mode(plugin, spec, manager=manager)
