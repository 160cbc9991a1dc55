"""The calls into MindSpore that modes `semi_auto` and `auto` make, and the errors that come back.

Compilation needs an Ascend or GPU backend. None was at hand: these calls were compiled for 8 ranks
against a stand-in of the backend (see the tests), and never run on a device.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from parallelkit.errors import LayoutError, ParallelKitError, UnsupportedFeatureError
from parallelkit.plan import ParallelPlan
from parallelkit_mindspore import runtime
from parallelkit_mindspore.parallel.auto_settings import AutoSettings
from parallelkit_mindspore.parallel.settings_native import kept

_FRAME: Final = re.compile(r"In file ([^\n]*?):(\d+),[^/\n]*/\s*([^\n]*?)/?\n")


def world() -> tuple[int, int]:
    """This process's rank and the number of ranks, as MindSpore has them."""
    runtime.mindspore("parallel_context")
    communication = importlib.import_module("mindspore.communication")
    return int(communication.get_rank()), int(communication.get_group_size())


def wrap(cell: Any, settings: AutoSettings, plan: ParallelPlan, rank: int, reduce: str) -> Any:
    """Wrap `cell` into MindSpore's `AutoParallel`, which carries the settings itself."""
    runtime.mindspore("parallelize")
    made = importlib.import_module("mindspore.parallel.auto_parallel").AutoParallel(
        cell, parallel_mode=settings.search_mode or "semi_auto"
    )
    made.dataset_strategy(settings.dataset_strategy)
    if reduce == "mean":
        made.enable_gradients_mean()
    if plan.pipeline > 1:
        made.pipeline(stages=plan.pipeline, scheduler=settings.pipeline_scheduler)
    if plan.data_shard > 1:
        made.hsdp(plan.data_shard, settings.optimizer_threshold, settings.optimizer_level)
    save, load = settings.files(plan, rank)
    if save is not None:
        made.save_param_strategy_file(save)
    if load is not None:
        made.load_param_strategy_file(load)
    made.set_train(cell.training)
    return made


def compile_cell(cell: Any, inputs: Sequence[Any]) -> None:
    """Compile `cell` for inputs like these, without running it.

    Raises:
        LayoutError: an operator cannot be divided as laid out; with its name.
        UnsupportedFeatureError: this backend compiles no such graph.
    """
    runtime.mindspore("compile")
    try:
        with kept():
            cell.compile(*inputs)
    except (RuntimeError, ValueError, TypeError) as error:
        known = _known(str(error), cell)
        if known is None:
            raise
        raise known from error


def is_compiled(cell: Any) -> bool:
    """Whether a graph of `cell` exists whose strategies can be read."""
    executor = importlib.import_module("mindspore.graph.api")._cell_graph_executor
    return any(executor.has_compiled(phase) for phase in cell.compile_cache)


def strategies_of(cell: Any) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Operators' degrees and parameters' layouts of a compiled cell, as MindSpore has them."""
    executor = importlib.import_module("mindspore.graph.api")._cell_graph_executor
    return executor._get_shard_strategy(cell), dict(cell.parameter_layout_dict or {})


def trained(cell: Any) -> list[str]:
    """Names of the parameters that are the model's, without an optimiser's states."""
    nn = runtime.mindspore("explain").nn
    for _, inner in cell.cells_and_names():
        if isinstance(inner, nn.Optimizer):
            return [parameter.name for parameter in inner.parameters]
    return [parameter.name for parameter in cell.get_parameters()]


def _known(text: str, cell: Any) -> ParallelKitError | None:
    if "communication backend" in text or "Invalid backend" in text:
        return UnsupportedFeatureError(
            "MindSpore compiles semi_auto and auto for Ascend and GPU only; data and hybrid run "
            f"here. MindSpore says: {text.splitlines()[0]}"
        )
    failed = re.search(r"[Oo]perator:? ?(\w+) init failed", text)
    if failed is None:
        return None
    kind = failed.group(1)
    frames = _FRAME.findall(text)
    place = [f"{file}:{line}: {code}" for file, line, code in frames[:1]]
    users = [f for f in frames if "site-packages" not in f[0]]
    place += [f"{file}:{line}: {code}" for file, line, code in users[:1] if users[0] != frames[0]]
    where = ", called from ".join(place) or "a place that MindSpore does not name"
    return LayoutError(
        f"operator {kind} cannot be divided as laid out, at {where}. Its strategies: "
        f"{_strategies(kind, cell)}. Degrees must divide the dims, and their product the ranks"
    )


def _strategies(kind: str, cell: Any) -> str:
    """The strategies of a model's operators of one kind, with the shapes of their weights."""
    from parallelkit_mindspore.parallel.operator_layouts import divided, operators

    strategies, cells = divided(cell), dict(cell.cells_and_names())
    said = []
    for name, operator in operators(cell).items():
        if operator.name == kind and name in strategies:
            owner = cells[name.rpartition(".")[0]]
            shapes = [f"{key} {list(p.shape)}" for key, p in owner._params.items() if p is not None]
            said.append(f"{name} by {strategies[name]!r} ({', '.join(shapes) or 'no parameters'})")
    return "; ".join(said[:6]) or "none was given, so MindSpore chose it"
