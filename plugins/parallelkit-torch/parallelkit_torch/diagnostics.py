"""What `parallelkit doctor` shows about torch. Imports torch."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from parallelkit.specs import Section


def section() -> Section:
    """Collect the facts; not ok where no backend could open a group on the CPU."""
    from parallelkit_torch.execution import cpp_problem

    gloo = dist.is_available() and dist.is_gloo_available()
    facts = {
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "built for CUDA": torch.version.cuda or "no",
        "CUDA devices": _devices(),
        "gloo": "available" if gloo else "not in this build",
        "nccl": _nccl(),
        "threads": f"{torch.get_num_threads()} (inter-op {torch.get_num_interop_threads()})",
        "torch.compile on CPU": cpp_problem() or "C++ compiler found",
    }
    return Section(title="PyTorch", facts=facts, ok=gloo)


def _devices() -> str:
    if not torch.cuda.is_available():
        return "none"
    found = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return f"{len(found)}: {', '.join(sorted(set(found)))}"


def _nccl() -> str:
    if not (dist.is_available() and dist.is_nccl_available()):
        return "not in this build"
    version: object = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return ".".join(map(str, version)) if isinstance(version, tuple) else str(version)
