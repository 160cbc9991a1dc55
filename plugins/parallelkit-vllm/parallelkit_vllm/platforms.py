"""What vLLM runs on here, found out without importing vLLM where that can be."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Final, final

import attrs

from parallelkit.errors import ExecutionModeError
from parallelkit_vllm.errors import EngineVersionError
from parallelkit_vllm.versions import installed, need

#: Entry points by which others bring a platform; vLLM takes theirs before its own.
PLATFORM_PLUGINS: Final = "vllm.platform_plugins"


@final
@attrs.frozen(kw_only=True)
class Platform:
    """What of a platform decides how an engine executes.

    Attributes:
        kind: vLLM's name of its device: `"cpu"`, `"cuda"`, `"npu"`, ...
        static_graphs: whether vLLM records device graphs (CUDA graphs) there.
        compiler: whether the C++ compiler is there that inductor needs on a CPU; True elsewhere.
        compile_disabled: whether `TORCH_COMPILE_DISABLE=1` turns `torch.compile` off.
        traced_only: whether `VLLM_CPU_CI_ENV=1` keeps inductor out of what is compiled on a CPU.
    """

    kind: str
    static_graphs: bool
    compiler: bool = True
    compile_disabled: bool = False
    traced_only: bool = False


def platform(environ: Mapping[str, str] | None = None) -> Platform:
    """The platform that vLLM chooses in this process.

    Of a build for the CPU that is known by its metadata. Else vLLM is asked, which imports it
    (seconds), unless it is imported already.

    Raises:
        EngineVersionError: vLLM cannot be imported, or says nothing of its platform.
        ExecutionModeError: a variable of vLLM's has a value that vLLM would fail at.
    """
    environ = os.environ if environ is None else environ
    if "vllm.platforms" not in sys.modules and _built_for_cpu(environ):
        kind, graphs = "cpu", False
    else:
        kind, graphs = _ask()
    on_cpu = kind == "cpu"
    return Platform(
        kind=kind,
        static_graphs=graphs,
        compiler=not on_cpu or shutil.which(environ.get("CXX", "g++")) is not None,
        compile_disabled=environ.get("TORCH_COMPILE_DISABLE") == "1",
        traced_only=on_cpu and _flag(environ, "VLLM_CPU_CI_ENV"),
    )


def _built_for_cpu(environ: Mapping[str, str]) -> bool:
    if list(entry_points(group=PLATFORM_PLUGINS)):
        return False
    if environ.get("VLLM_TARGET_DEVICE", "").lower() == "cpu":
        return True
    found = installed()
    return found is not None and (found[0] == "vllm-cpu" or "cpu" in found[1])


def _ask() -> tuple[str, bool]:
    try:
        module: Any = import_module("vllm.platforms")
    except ImportError as error:
        raise EngineVersionError(f"vLLM cannot be imported: {error}") from error
    current = need(module, "current_platform", "execution_mode")
    kind = need(current, "device_type", "execution_mode") or "unknown"
    graphs = getattr(current, "support_static_graph_mode", None)
    return str(kind), bool(graphs()) if callable(graphs) else False


def _flag(environ: Mapping[str, str], name: str) -> bool:
    text = environ.get(name, "0")
    try:
        return bool(int(text))
    except ValueError:
        raise ExecutionModeError(f"{name} is {text!r}; vLLM takes a number, 0 or 1") from None
