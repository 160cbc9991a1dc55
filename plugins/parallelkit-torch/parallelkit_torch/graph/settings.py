"""Options of graph mode: checked, and CUDA graphs put into `torch.compile`'s own words."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, Final

import attrs
import torch

from parallelkit import options as opts
from parallelkit.errors import ExecutionModeError

#: Options of ours beside those of `torch.compile`.
OURS: Final = ("cuda_graphs", "regions")
_NOT_OPTIONS: Final = frozenset({"model", "disable"})
_CUDA_GRAPHS: Final = "triton.cudagraphs"
#: Taken out of `options` by torch.compile itself, so inductor does not list them.
_UNLISTED: Final = ("guard_filter_fn", "use_aoti")


@attrs.frozen(kw_only=True)
class Settings:
    """How to compile.

    Attributes:
        options: for `torch.compile`.
        without: the same without CUDA graphs, for what is not on a CUDA device.
        cuda_graphs: whether they were asked for by name.
        regions: `"auto"`, `"whole"`, `"blocks"`, or patterns of module names.
    """

    options: Mapping[str, Any]
    without: Mapping[str, Any]
    cuda_graphs: bool = False
    regions: str | tuple[str, ...] = "auto"

    @property
    def backend(self) -> str:
        """The backend's name, for people."""
        backend = self.options.get("backend") or "inductor"
        return backend if isinstance(backend, str) else getattr(backend, "__name__", "own function")


def settle(given: Mapping[str, Any]) -> Settings:
    """Check options and return settings.

    Raises:
        UnsupportedFeatureError: an unknown option, the nearest known one is named.
        ExecutionModeError: a value that is not allowed, or options that contradict each other.
    """
    allowed = [*opts.accepted(torch.compile, ours=_NOT_OPTIONS), *OURS]
    options = opts.check(given, allowed, what="execution mode 'graph' (torch.compile)")
    regions = _regions(options.pop("regions", "auto"))
    cuda_graphs = options.pop("cuda_graphs", None)
    for name, value in (("cuda_graphs", cuda_graphs), ("dynamic", options.get("dynamic"))):
        if value not in (None, True, False):
            raise ExecutionModeError(f"{name} is {value!r}; it is True, False or left out")
    if not isinstance(options.get("fullgraph", False), bool):
        raise ExecutionModeError(f"fullgraph is {options['fullgraph']!r}; it is True or False")
    _check_backend(options.get("backend") or "inductor")
    _check_inductor(options)
    without = dict(options)
    if cuda_graphs is not None:
        options = _with_cuda_graphs(options) if cuda_graphs else _without_cuda_graphs(options)
    return Settings(
        options=options, without=without, cuda_graphs=cuda_graphs is True, regions=regions
    )


def _regions(value: Any) -> str | tuple[str, ...]:
    if isinstance(value, str):
        if value not in ("auto", "whole", "blocks"):
            raise ExecutionModeError(
                f"regions is {value!r}; it is 'auto', 'whole', 'blocks' or a list of patterns of "
                "module names, such as ['layers.*']"
            )
        return value
    if isinstance(value, Sequence) and value and all(isinstance(item, str) for item in value):
        return tuple(value)
    raise ExecutionModeError(
        f"regions is {value!r}; it is 'auto', 'whole', 'blocks' or a list of patterns"
    )


def _check_backend(backend: Any) -> None:
    if not isinstance(backend, str):
        return
    known = torch._dynamo.list_backends(exclude_tags=())
    if backend not in known:
        raise ExecutionModeError(
            f"torch.compile has no backend {backend!r}; it has {', '.join(known)}"
        )


def _check_inductor(options: Mapping[str, Any]) -> None:
    """Refuse what inductor would refuse at the first compilation, and say what it knows."""
    mode, details = options.get("mode"), options.get("options")
    if mode is not None and details is not None:
        raise ExecutionModeError(
            f"mode={mode!r} and options={details!r} exclude each other: a mode is a set of "
            f"options. Give one of them; torch._inductor.list_mode_options({mode!r}) lists the set"
        )
    if (options.get("backend") or "inductor") != "inductor":
        return
    modes = torch._inductor.list_mode_options()
    if mode is not None and mode not in modes:
        raise ExecutionModeError(f"mode is {mode!r}; inductor has {', '.join(sorted(modes))}")
    known = [*torch._inductor.list_options(), *_UNLISTED]
    for name in details or ():
        if name.replace("-", "_") not in known:
            close = difflib.get_close_matches(name, known, n=3)
            near = f"; near are {', '.join(close)}" if close else ""
            raise ExecutionModeError(
                f"inductor has no option {name!r}{near}. torch._inductor.list_options() lists all"
            )


def _with_cuda_graphs(options: dict[str, Any]) -> dict[str, Any]:
    backend, mode, details = (options.get(name) for name in ("backend", "mode", "options"))
    if backend == "cudagraphs":
        return options
    if backend not in (None, "inductor"):
        raise ExecutionModeError(
            f"cuda_graphs=True contradicts backend={backend!r}: inductor makes CUDA graphs. Leave "
            "backend out, or take backend='cudagraphs', which only records them"
        )
    if mode is not None:
        if not torch._inductor.list_mode_options()[mode].get(_CUDA_GRAPHS):
            raise ExecutionModeError(
                f"cuda_graphs=True contradicts mode={mode!r}, which makes none. Leave mode out, "
                "or take 'reduce-overhead' or 'max-autotune'"
            )
        return options
    if details is None:
        return options | {"mode": "reduce-overhead"}
    if details.get(_CUDA_GRAPHS, True) is False:
        raise ExecutionModeError(
            f"cuda_graphs=True contradicts options={{{_CUDA_GRAPHS!r}: False}}; give one of them"
        )
    return options | {"options": dict(details) | {_CUDA_GRAPHS: True}}


def _without_cuda_graphs(options: dict[str, Any]) -> dict[str, Any]:
    """With `cuda_graphs=False` nothing is added; what asks for them elsewhere is refused."""
    mode, details = options.get("mode"), options.get("options") or {}
    inductor = (options.get("backend") or "inductor") == "inductor"
    asked = None
    if options.get("backend") == "cudagraphs":
        asked = "backend='cudagraphs'"
    elif inductor and mode and torch._inductor.list_mode_options()[mode].get(_CUDA_GRAPHS):
        asked = f"mode={mode!r}"
    elif details.get(_CUDA_GRAPHS):
        asked = f"options={{{_CUDA_GRAPHS!r}: True}}"
    if asked:
        raise ExecutionModeError(f"cuda_graphs=False contradicts {asked}; give one of them")
    return options
