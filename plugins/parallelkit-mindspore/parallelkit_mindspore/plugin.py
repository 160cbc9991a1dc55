"""The hooks of the MindSpore plugin. Importing this module imports no MindSpore."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parallelkit.plugin import (
    Candidate,
    ComparisonSpec,
    ContextSpec,
    DemoSpec,
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

#: What runs on the CPU.
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
#: What an accelerator adds, besides its group. None of it was ever run on one.
ACCELERATED = frozenset({"context.semi_auto", "context.auto", "axis.pipeline", "axis.data_shard"})
_SCORES = {"npu": 70, "cuda": 45, "cpu": 40}
_DEVICES = Path("/dev")


@hookimpl
def parallelkit_probe(request: ProbeRequest) -> Candidate:
    """Answer from the file system and the package's metadata; MindSpore is not imported."""
    from parallelkit_mindspore.runtime import problem

    wrong = problem()
    if wrong is not None:
        return Candidate(name=NAME, framework=NAME, reason=wrong)
    here = _accelerators()
    features = FEATURES | {f"group.{kind}" for kind in here} | (ACCELERATED if here else set())
    found = f"{' and '.join(here)} found, on which this plugin was never run"
    absent = (
        "no Ascend NPU or GPU that it can use, without which it has no modes semi_auto and auto, "
        "and no axes but data and tensor"
    )
    return Candidate(
        name=NAME,
        framework=NAME,
        devices=(*here, "cpu"),
        backends={"cpu": "mccl", "cuda": "nccl", "npu": "hccl"},
        features=features,
        score=_SCORES[(*here, "cpu")[0]],
        reason=f"MindSpore {_version()} is installed; {found if here else absent}",
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
    from parallelkit_mindspore.divided_weights import weight_source

    return weight_source(model)


@hookimpl
def parallelkit_weight_sink(target: Any) -> WeightSink | None:
    if not _is_cell(target):
        return None
    from parallelkit_mindspore.divided_weights import weight_sink

    return weight_sink(target)


@hookimpl
def parallelkit_demo(spec: DemoSpec) -> int | None:
    if spec.framework != NAME:
        return None
    from parallelkit.demo.main import run

    return run(spec, "parallelkit_mindspore.demo")


@hookimpl
def parallelkit_diagnostics() -> list[Section]:
    from parallelkit_mindspore.diagnostics import section

    return [section()]


def _accelerators() -> list[str]:
    """Device types that are present here and that MindSpore's wheel has a library for."""
    found = importlib.util.find_spec(NAME)
    if found is None or found.origin is None:
        return []
    plugins = Path(found.origin).parent / "lib" / "plugin"
    looked = {"npu": ("davinci[0-9]*", "ascend*"), "cuda": ("nvidia[0-9]*", "gpu*")}
    return [
        kind
        for kind, (device, library) in looked.items()
        if any(_DEVICES.glob(device)) and any(plugins.glob(library))
    ]


def _version() -> str:
    from parallelkit_mindspore.runtime import installed

    return installed() or "of an unknown version"


def _is_cell(thing: Any) -> bool:
    """Whether it is a Cell, or a `mindspore.Model`, whose network is one."""
    ms = sys.modules.get(NAME)
    kinds = (getattr(getattr(ms, "nn", None), "Cell", None), getattr(ms, "Model", None))
    return isinstance(thing, tuple(kind for kind in kinds if kind is not None))
