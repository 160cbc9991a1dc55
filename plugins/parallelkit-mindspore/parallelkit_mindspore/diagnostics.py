"""What `parallelkit doctor` shows of MindSpore, by its metadata; nothing is imported."""

from __future__ import annotations

import os
import sys
from importlib.metadata import PackageNotFoundError, version

from parallelkit.plugin import ProbeRequest, Section
from parallelkit_mindspore import plugin, runtime


def section() -> Section:
    """MindSpore's version, the NumPy beside it, its devices; not ok if it cannot be used."""
    wrong = runtime.problem()
    candidate = plugin.parallelkit_probe(ProbeRequest())
    limit = os.environ.get("MS_CPU_COMM_OP_TIMEOUT")
    return Section(
        title="MindSpore",
        facts={
            "mindspore": runtime.installed() or "not installed",
            "numpy": _numpy(),
            "python": sys.version.split()[0],
            "devices": ", ".join(candidate.devices) or "none",
            "mccl time limit": f"{limit} s (MS_CPU_COMM_OP_TIMEOUT)" if limit else "the group's",
            "Ascend and GPU": "this plugin was never run on them",
            "usable": wrong or "yes",
        },
        ok=wrong is None,
    )


def _numpy() -> str:
    try:
        return version("numpy")
    except PackageNotFoundError:
        return "not installed"
