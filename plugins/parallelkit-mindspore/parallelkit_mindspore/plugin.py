"""The hooks of the MindSpore plugin. Importing this module imports no MindSpore."""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING, Any

from parallelkit.plugin import (
    Candidate,
    ComparisonSpec,
    ContextSpec,
    ExecutionSpec,
    GraphReport,
    GraphSpec,
    GroupSpec,
    LaunchSpec,
    ModeComparison,
    ProbeRequest,
    Section,
    hookimpl,
)

if TYPE_CHECKING:
    from parallelkit.protocols import (
        ExecutionMode,
        ParallelContext,
        ProcessGroup,
        WeightSink,
        WeightSource,
    )

parallelkit_api = 1

NAME = "mindspore"

FEATURES = frozenset(
    {
        "group.cpu",
        "context.standalone",
        "context.data",
        "context.hybrid",
        "axis.data",
        "axis.tensor",
        "execution.eager",
        "execution.graph",
        "weights.source",
        "weights.sink",
    }
)


@hookimpl
def parallelkit_probe(request: ProbeRequest) -> Candidate:
    """Answer from the file system and the package's metadata; MindSpore is not imported."""
    if importlib.util.find_spec(NAME) is None:
        return Candidate(
            name=NAME,
            framework=NAME,
            reason="MindSpore is not installed: pip install mindspore 'numpy<2'",
        )
    return Candidate(
        name=NAME,
        framework=NAME,
        devices=("cpu",),
        backends={"cpu": "mccl", "cuda": "nccl", "npu": "hccl"},
        features=FEATURES,
        score=40,
        reason="MindSpore is installed",
    )


@hookimpl
def parallelkit_init_process_group(spec: GroupSpec) -> ProcessGroup | None:
    if spec.framework != NAME:
        return None
    from parallelkit_mindspore.group import init_process_group

    return init_process_group(spec)


@hookimpl
def parallelkit_setup_parallel_context(
    spec: ContextSpec, group: ProcessGroup
) -> ParallelContext | None:
    if group.framework != NAME:
        return None
    from parallelkit_mindspore.parallel.setup import setup_parallel_context

    return setup_parallel_context(spec, group)


@hookimpl
def parallelkit_set_execution_mode(spec: ExecutionSpec) -> ExecutionMode | None:
    if spec.framework != NAME:
        return None
    from parallelkit_mindspore.execution import set_execution_mode

    return set_execution_mode(spec)


@hookimpl
def parallelkit_check_graph(spec: GraphSpec) -> GraphReport | None:
    if spec.framework != NAME:
        return None
    from parallelkit_mindspore.graph.check import check_graph

    return check_graph(spec)


@hookimpl
def parallelkit_compare_modes(spec: ComparisonSpec) -> ModeComparison | None:
    if spec.framework != NAME:
        return None
    from parallelkit_mindspore.graph.compare import compare_modes

    return compare_modes(spec)


@hookimpl
def parallelkit_launch(spec: LaunchSpec) -> list[str] | None:
    """Give msrun's command line."""
    if spec.framework != NAME:
        return None
    from parallelkit_mindspore.launcher import command

    return command(spec)


@hookimpl
def parallelkit_weight_source(model: Any) -> WeightSource | None:
    if not _is_cell(model):
        return None
    from parallelkit_mindspore.weights import CellSource

    return CellSource(model)


@hookimpl
def parallelkit_weight_sink(target: Any) -> WeightSink | None:
    if not _is_cell(target):
        return None
    from parallelkit_mindspore.weights import CellSink

    return CellSink(target)


@hookimpl
def parallelkit_diagnostics() -> list[Section]:
    from parallelkit_mindspore.diagnostics import section

    return [section()]


def _is_cell(thing: Any) -> bool:
    """Whether it is a Cell, or a `mindspore.Model`, whose network is one."""
    ms = sys.modules.get(NAME)
    kinds = (getattr(getattr(ms, "nn", None), "Cell", None), getattr(ms, "Model", None))
    return isinstance(thing, tuple(kind for kind in kinds if kind is not None))
