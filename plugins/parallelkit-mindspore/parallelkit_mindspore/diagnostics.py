"""What `parallelkit doctor` shows of MindSpore, by its metadata; nothing is imported."""

from __future__ import annotations

from importlib.metadata import version

from parallelkit.plugin import Section
from parallelkit_mindspore import runtime


def section() -> Section:
    """MindSpore's version, and the NumPy beside it."""
    found = runtime.installed()
    return Section(
        title="MindSpore", facts={"mindspore": found or "not installed", "numpy": version("numpy")}
    )
