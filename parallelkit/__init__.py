"""parallelkit: one script for PyTorch and MindSpore, and live engines that follow its weights.

    import parallelkit as pk

    with pk.init_process_group() as group:
        context = pk.parallel_context(data=-1, reduce="mean")
        model = context.parallelize(build_model())

Importing this package loads no framework, no plugin and no entry point; every public name is
resolved on first use.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from parallelkit.context import parallel_context as parallel_context
    from parallelkit.errors import ParallelKitError as ParallelKitError
    from parallelkit.errors import PluginWarning as PluginWarning
    from parallelkit.execution import check_graph as check_graph
    from parallelkit.execution import compare_modes as compare_modes
    from parallelkit.execution import execution_mode as execution_mode
    from parallelkit.explain import Explanation as Explanation
    from parallelkit.explain import explain as explain
    from parallelkit.graphs import GraphReport as GraphReport
    from parallelkit.graphs import ModeComparison as ModeComparison
    from parallelkit.groups import current_group as current_group
    from parallelkit.groups import init_process_group as init_process_group
    from parallelkit.launch import LaunchInfo as LaunchInfo
    from parallelkit.loader import PluginManager as PluginManager
    from parallelkit.loader import plugins as plugins
    from parallelkit.loader import register as register
    from parallelkit.plan import ParallelPlan as ParallelPlan
    from parallelkit.plan import plan as plan
    from parallelkit.protocols import ExecutionMode as ExecutionMode
    from parallelkit.protocols import ParallelContext as ParallelContext
    from parallelkit.protocols import ProcessGroup as ProcessGroup
    from parallelkit.records import PluginInfo as PluginInfo
    from parallelkit.spawn import RankResult as RankResult
    from parallelkit.spawn import spawn_ranks as spawn_ranks
    from parallelkit.weights import TransferReport as TransferReport
    from parallelkit.weights import WeightPublisher as WeightPublisher
    from parallelkit.weights import WeightSubscriber as WeightSubscriber
    from parallelkit.weights import publish_weights as publish_weights
    from parallelkit.weights import subscribe_weights as subscribe_weights

#: Public name to the module that has it.
_WHERE = {
    "ExecutionMode": "protocols",
    "Explanation": "explain",
    "GraphReport": "graphs",
    "LaunchInfo": "launch",
    "ModeComparison": "graphs",
    "ParallelContext": "protocols",
    "ParallelKitError": "errors",
    "ParallelPlan": "plan",
    "PluginInfo": "records",
    "PluginManager": "loader",
    "PluginWarning": "errors",
    "ProcessGroup": "protocols",
    "RankResult": "spawn",
    "TransferReport": "weights",
    "WeightPublisher": "weights",
    "WeightSubscriber": "weights",
    "check_graph": "execution",
    "compare_modes": "execution",
    "current_group": "groups",
    "execution_mode": "execution",
    "explain": "explain",
    "init_process_group": "groups",
    "parallel_context": "context",
    "plan": "plan",
    "plugins": "loader",
    "publish_weights": "weights",
    "register": "loader",
    "spawn_ranks": "spawn",
    "subscribe_weights": "weights",
}

__all__ = [
    "ExecutionMode",
    "Explanation",
    "GraphReport",
    "LaunchInfo",
    "ModeComparison",
    "ParallelContext",
    "ParallelKitError",
    "ParallelPlan",
    "PluginInfo",
    "PluginManager",
    "PluginWarning",
    "ProcessGroup",
    "RankResult",
    "TransferReport",
    "WeightPublisher",
    "WeightSubscriber",
    "__version__",
    "check_graph",
    "compare_modes",
    "current_group",
    "execution_mode",
    "explain",
    "init_process_group",
    "parallel_context",
    "plan",
    "plugins",
    "publish_weights",
    "register",
    "spawn_ranks",
    "subscribe_weights",
]


class _Package(ModuleType):
    """The package's own type: a submodule never hides a public name.

    Importing `parallelkit.plan` makes the import system set the attribute `plan` of the package
    to the module; `pk.plan(8)` has to go on being a call.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _WHERE and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        there = f"; errors are in {__name__}.errors" if name.endswith(("Error", "Warning")) else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{there}")
    value = getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *(n for n in globals() if n.startswith("__"))})
