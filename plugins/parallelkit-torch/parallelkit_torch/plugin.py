"""The hooks of the torch plugin. Importing this module imports no torch."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parallelkit.plugin import (
    Candidate,
    ComparisonSpec,
    ContextSpec,
    DemoSpec,
    DevicePublisher,
    DeviceSink,
    DeviceSpec,
    DeviceSubscriber,
    ExecutionSpec,
    GraphReport,
    GraphSpec,
    GroupSpec,
    LaunchSpec,
    ModeComparison,
    ProbeRequest,
    Section,
    TransportCandidate,
    TransportRequest,
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

FEATURES = frozenset(
    {
        "group.cpu",
        "group.cuda",
        "context.standalone",
        "context.data",
        "context.hybrid",
        "context.semi_auto",
        "context.auto",
        "axis.pipeline",
        "axis.data",
        "axis.data_shard",
        "axis.tensor",
        "execution.eager",
        "execution.graph",
        "weights.source",
        "weights.sink",
    }
)


@hookimpl
def parallelkit_probe(request: ProbeRequest) -> Candidate:
    """Answer from the file system and the package's metadata; torch is not imported."""
    if importlib.util.find_spec("torch") is None:
        return Candidate(
            name="torch", framework="torch", reason="torch is not installed: pip install torch"
        )
    cuda, why = _cuda_usable()
    return Candidate(
        name="torch",
        framework="torch",
        devices=("cuda", "cpu") if cuda else ("cpu",),
        backends={"cpu": "gloo", "cuda": "nccl"},
        features=FEATURES,
        score=60 if cuda else 50,
        reason=f"torch {_version('torch')} is installed; {why}",
    )


@hookimpl
def parallelkit_init_process_group(spec: GroupSpec) -> ProcessGroup | None:
    if spec.framework != "torch":
        return None
    from parallelkit_torch.group import init_process_group

    return init_process_group(spec)


@hookimpl
def parallelkit_setup_parallel_context(
    spec: ContextSpec, group: ProcessGroup
) -> ParallelContext | None:
    if group.framework != "torch":
        return None
    from parallelkit_torch.parallel.setup import setup_parallel_context

    return setup_parallel_context(spec, group)


@hookimpl
def parallelkit_set_execution_mode(spec: ExecutionSpec) -> ExecutionMode | None:
    if spec.framework != "torch":
        return None
    from parallelkit_torch.execution import set_execution_mode

    return set_execution_mode(spec)


@hookimpl
def parallelkit_check_graph(spec: GraphSpec) -> GraphReport | None:
    if spec.framework != "torch":
        return None
    from parallelkit_torch.graph.check import check_graph

    return check_graph(spec)


@hookimpl
def parallelkit_compare_modes(spec: ComparisonSpec) -> ModeComparison | None:
    if spec.framework != "torch":
        return None
    from parallelkit_torch.graph.compare import compare_modes

    return compare_modes(spec)


@hookimpl
def parallelkit_launch(spec: LaunchSpec) -> list[str] | None:
    """Give torchrun's command line: its own rendezvous, on a free port."""
    if spec.framework != "torch":
        return None
    return [
        spec.python,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={spec.ranks}",
        spec.script,
        *spec.args,
    ]


@hookimpl
def parallelkit_weight_source(model: Any) -> WeightSource | None:
    if not _is_module(model):
        return None
    from parallelkit_torch.sharded_weights import weight_source

    return weight_source(model)


@hookimpl
def parallelkit_weight_sink(target: Any, loader: Callable[..., Any] | None) -> WeightSink | None:
    if not _is_module(target):
        return None
    if loader is not None:
        from parallelkit_torch.placement import LoadedModule

        return LoadedModule(target, loader)
    from parallelkit_torch.sharded_target import weight_sink

    return weight_sink(target)


@hookimpl
def parallelkit_transports(request: TransportRequest) -> list[TransportCandidate]:
    """List `cuda_ipc`; torch is imported where weights of it are on a GPU alone."""
    if request.publisher.accelerator is None and "torch" not in sys.modules:
        reason = f"weights on {request.device} are not in memory that GPUs share"
        return [
            TransportCandidate(
                name="cuda_ipc",
                reach=False,
                cost=0.0005,
                reason=reason,
                lane="device",
                publish_options=(),
                subscribe_options=(),
            )
        ]
    from parallelkit_torch.cuda import transport

    return [transport.candidate(request)]


@hookimpl
def parallelkit_open_device(spec: DeviceSpec) -> DevicePublisher | None:
    if spec.name != "cuda_ipc":
        return None
    from parallelkit_torch.cuda.transport import CudaIpcPublisher

    return CudaIpcPublisher(spec)


@hookimpl
def parallelkit_connect_device(
    name: str, offer: bytes, key: bytes, sink: DeviceSink
) -> DeviceSubscriber | None:
    if name != "cuda_ipc":
        return None
    from parallelkit_torch.cuda.transport import CudaIpcSubscriber

    return CudaIpcSubscriber(offer, key, sink)


@hookimpl
def parallelkit_diagnostics() -> list[Section]:
    from parallelkit_torch.diagnostics import section

    return [section()]


@hookimpl
def parallelkit_demo(spec: DemoSpec) -> int | None:
    if spec.framework != "torch":
        return None
    from parallelkit.demo.main import run

    return run(spec, "parallelkit_torch.demo")


def _is_module(thing: Any) -> bool:
    torch = sys.modules.get("torch")
    module_type = getattr(getattr(torch, "nn", None), "Module", None)
    return module_type is not None and isinstance(thing, module_type)


def _cuda_usable() -> tuple[bool, str]:
    """Tell whether CUDA can be used, and how that is known.

    torch itself is asked where it is loaded already. Else its version file and the driver's
    files decide: `import torch` takes seconds and a probe may not.
    """
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "cuda"):
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return count > 0, f"torch sees {count} CUDA device(s)"
    found = importlib.util.find_spec("torch")
    origin = found.origin if found is not None else None
    if origin and _built_for_cuda(Path(origin).with_name("version.py")) is False:
        return False, "a build without CUDA"
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False, "CUDA_VISIBLE_DEVICES hides every CUDA device"
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        return False, "no NVIDIA device is present"
    if not Path("/proc/driver/nvidia/version").exists():
        return False, "NVIDIA devices are present but the driver is not loaded"
    return True, "NVIDIA devices and their driver are present"


def _built_for_cuda(version_file: Path) -> bool | None:
    """What torch's own version file says; None where it does not."""
    try:
        text = version_file.read_text()
    except OSError:
        return None
    said = re.search(r"^cuda\b[^=]*=\s*(\S+)", text, re.MULTILINE)
    return None if said is None else said[1] != "None"


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "of an unknown version"
