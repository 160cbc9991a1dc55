"""Options of graph mode for an engine: checked, and put into vLLM's own arguments."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from importlib import import_module
from typing import Any, Final, final

import attrs

from parallelkit import options as opts
from parallelkit.errors import ExecutionModeError
from parallelkit_vllm.errors import EngineVersionError
from parallelkit_vllm.platforms import Platform
from parallelkit_vllm.versions import need

#: The one option beside those of vLLM's `CompilationConfig`; it has the same name with Torch.
CUDA_GRAPHS: Final = "cuda_graphs"
#: vLLM's compilation modes by number.
MODES: Final = ("NONE", "STOCK_TORCH_COMPILE", "DYNAMO_TRACE_ONCE", "VLLM_COMPILE")
_STOCK, _TRACE, _COMPILE = 1, 2, 3
_ALL_GRAPHS: Final = "FULL_AND_PIECEWISE"


@final
@attrs.frozen(kw_only=True)
class Outcome:
    """What an engine is started with, and what comes of it.

    Attributes:
        effective: `"eager"` or `"graph"`.
        reason: why, in words.
        arguments: keyword arguments of `LLM` and of vLLM's engine arguments.
        refused: what of the options cannot be had on this platform; "" for nothing.
    """

    effective: str
    reason: str
    arguments: Mapping[str, Any]
    refused: str = ""


def eager(given: Mapping[str, Any]) -> Outcome:
    """Eager mode takes no options.

    Raises:
        UnsupportedFeatureError: one was given.
    """
    opts.check(given, (), what="execution mode 'eager' (vllm)")
    return Outcome(effective="eager", reason="as asked", arguments={"enforce_eager": True})


def graph(given: Mapping[str, Any], platform: Platform) -> Outcome:
    """Graph mode on a platform. `refused` of the outcome is for the caller to judge.

    Raises:
        UnsupportedFeatureError: an unknown option; the nearest known one is named.
        ExecutionModeError: a value that is not allowed, or options that contradict each other.
        EngineVersionError: vLLM has no `CompilationConfig`, or cannot be imported.
    """
    options = dict(given)
    wanted = options.pop(CUDA_GRAPHS, None)
    if wanted not in (None, True, False):
        raise ExecutionModeError(f"{CUDA_GRAPHS} is {wanted!r}; it is True, False or left out")
    if options:
        options = _checked(options)
    mode = _mode(options.pop("mode", None))
    _contradictions(mode, options, wanted)
    problem = _problem(mode, options, platform)
    if problem:
        arguments: dict[str, Any] = {"enforce_eager": True}
        return Outcome(effective="eager", reason=problem, arguments=arguments, refused=problem)
    options, refused = _device_graphs(options, wanted, platform)
    if mode is None:
        # vLLM on a CPU puts inductor in the place of any other backend, unless it only traces
        mode = _TRACE if platform.kind == "cpu" and _backend(options) != "inductor" else _COMPILE
    arguments = {"enforce_eager": False, "compilation_config": {"mode": mode, **options}}
    how = _words(mode, options, platform)
    return Outcome(
        effective="graph",
        reason=f"{how}; {refused}" if refused else how,
        arguments=arguments,
        refused=refused,
    )


def _config() -> Any:
    """vLLM's class of these options."""
    try:
        module: Any = import_module("vllm.config")
    except ImportError as error:
        raise EngineVersionError(f"vLLM cannot be imported: {error}") from error
    return need(module, "CompilationConfig", "execution_mode")


def _checked(options: dict[str, Any]) -> dict[str, Any]:
    config = _config()
    known = [name for name in inspect.signature(config).parameters if name != "self"]
    opts.check(
        options,
        [*known, CUDA_GRAPHS],
        what="execution mode 'graph' (vLLM's CompilationConfig)",
    )
    try:
        config(**options)
    except (TypeError, ValueError, KeyError, AssertionError) as error:
        text = " ".join(str(error).split())
        raise ExecutionModeError(f"vLLM's CompilationConfig refuses {options}: {text}") from error
    return options


def _mode(value: Any) -> int | None:
    """A compilation mode, as vLLM takes it, as its number."""
    if value is None:
        return None
    found = MODES.index(value.upper()) if isinstance(value, str) else int(value)
    if found == 0:
        raise ExecutionModeError(
            f"mode is {value!r}, which compiles nothing; that is execution_mode('eager'). Others "
            f"are {', '.join(MODES[1:])}"
        )
    return found


def _backend(options: Mapping[str, Any]) -> str:
    return str(options.get("backend") or "inductor")


def _contradictions(mode: int | None, options: Mapping[str, Any], wanted: bool | None) -> None:
    asked = options.get("cudagraph_mode")
    if wanted is not None and asked is not None:
        raise ExecutionModeError(
            f"{CUDA_GRAPHS}={wanted} and cudagraph_mode={asked!r} say the same thing twice; give "
            "one of them"
        )
    if mode == _TRACE and wanted:
        raise ExecutionModeError(
            f"{CUDA_GRAPHS}=True contradicts mode='DYNAMO_TRACE_ONCE', whose one graph vLLM does "
            "not cut where CUDA graphs must end; leave mode out"
        )


def _problem(mode: int | None, options: Mapping[str, Any], platform: Platform) -> str:
    """Why nothing would be compiled; "" if something would."""
    if platform.compile_disabled:
        return "the environment variable TORCH_COMPILE_DISABLE=1 turns compiling off; unset it"
    if platform.kind != "cpu":
        return ""
    if mode == _STOCK:
        return (
            "vLLM's runner for the CPU compiles nothing with mode='STOCK_TORCH_COMPILE'; leave "
            "mode out"
        )
    backend = _backend(options)
    if mode == _COMPILE and backend != "inductor":
        raise ExecutionModeError(
            f"backend={backend!r} contradicts mode='VLLM_COMPILE': vLLM puts inductor in its place "
            "on a CPU; leave mode out"
        )
    if backend == "inductor" and not platform.compiler and not platform.traced_only:
        return "inductor needs a C++ compiler on a CPU: install g++, or name one by CXX"
    return ""


def _device_graphs(
    options: dict[str, Any], wanted: bool | None, platform: Platform
) -> tuple[dict[str, Any], str]:
    """Options with what was wanted of CUDA graphs, and what of it cannot be had."""
    if platform.static_graphs:
        if wanted is not None:
            options = options | {"cudagraph_mode": _ALL_GRAPHS if wanted else "NONE"}
        return options, ""
    asked = [name for name, value in options.items() if _asks_for_graphs(name, value)]
    kept = {name: value for name, value in options.items() if name not in asked}
    if wanted:
        asked.append(CUDA_GRAPHS)
    if not asked:
        return kept, ""
    return kept, f"without {', '.join(asked)}: vLLM records no graphs on a {platform.kind} device"


def _asks_for_graphs(name: str, value: Any) -> bool:
    if name == "cudagraph_mode":
        return str(getattr(value, "name", value)).upper() != "NONE"
    return "cudagraph" in name and bool(value)


def _words(mode: int, options: Mapping[str, Any], platform: Platform) -> str:
    backend = _backend(options)
    if platform.kind == "cpu":
        shown = "eager" if platform.traced_only and mode == _COMPILE else backend
        return f"torch.compile with {shown}, one graph for all shapes; no CUDA graphs on a CPU"
    graphs = options.get("cudagraph_mode")
    recorded = "no device graphs"
    if platform.static_graphs and mode != _TRACE:
        recorded = "CUDA graphs as vLLM chooses" if graphs is None else f"CUDA graphs {graphs}"
    return f"torch.compile with {backend} ({MODES[mode]}); {recorded}"
