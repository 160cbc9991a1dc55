"""Options of graph mode: those of `mindspore.jit`, checked by name and by value beforehand."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from typing import Any, Final

import attrs
import mindspore as ms

from parallelkit import options as opts
from parallelkit.errors import ExecutionModeError, UnsupportedFeatureError
from parallelkit_mindspore.graph.switch import set_by_user

#: Options that `mindspore.jit` takes as `**options`; it only warns of others, and ignores them.
BACKEND_OPTIONS: Final = (
    "auto_offload",
    "disable_format_transform",
    "exec_order",
    "ge_options",
    "infer_boost",
)
CAPTURE_MODES: Final = ("ast", "bytecode", "trace")
_BACKENDS: Final = ("", "ms_backend", "GE")


@attrs.frozen(kw_only=True)
class Settings:
    """How to compile.

    Attributes:
        options: for `mindspore.jit`.
    """

    options: Mapping[str, Any]

    @property
    def capture_mode(self) -> str:
        """How MindSpore gets its graph out of the code: `"ast"`, `"bytecode"` or `"trace"`."""
        return str(self.options.get("capture_mode", "ast"))


def settle(given: Mapping[str, Any]) -> Settings:
    """Check options and return settings.

    `dynamic` may be True, False or None as with torch; MindSpore has 1 and 0. A backend that is
    none of MindSpore's own is tried on one addition.

    Raises:
        UnsupportedFeatureError: an unknown option, the nearest known one is named.
        ExecutionModeError: a value that is not allowed.
    """
    allowed = [*opts.accepted(ms.jit, ours=("function", "options")), *BACKEND_OPTIONS]
    options = opts.check(given, allowed, what="execution mode 'graph' (mindspore.jit)")
    dynamic = options.get("dynamic", 0)
    if dynamic not in (None, 0, 1):
        raise ExecutionModeError(f"dynamic is {dynamic!r}; it is True, False or left out")
    if "dynamic" in options:
        options["dynamic"] = int(dynamic or 0)
    capture = options.get("capture_mode", "ast")
    if capture not in CAPTURE_MODES:
        raise ExecutionModeError(
            f"capture_mode is {capture!r}; it is {', '.join(map(repr, CAPTURE_MODES))}"
        )
    try:  # making a decorator checks values; that for bytecode changes MindSpore's settings
        ms.jit(**(options | {"capture_mode": "ast"}))
    except (TypeError, ValueError) as error:
        raise ExecutionModeError(f"mindspore.jit refuses {options}: {error}") from error
    backend = options.get("backend", "")
    if backend not in _BACKENDS:
        _try(backend)
    return Settings(options=options)


def problem(settings: Settings) -> str | None:
    """Why graph mode cannot run here, or None."""
    if set_by_user() == "0":
        return "the environment variable MS_JIT=0 turns compiling off; unset it"
    if settings.capture_mode == "bytecode" and sys.version_info >= (3, 12):
        return "capture_mode='bytecode' of MindSpore needs Python 3.11 or older"
    if settings.capture_mode == "trace" and any(f.code_context is None for f in inspect.stack()):
        return (
            "capture_mode='trace' of MindSpore fails where a caller has no source text, as in a "
            "program started by python -m or in an interactive session"
        )
    return None


def _try(backend: Any) -> None:
    if not isinstance(backend, str):
        raise ExecutionModeError(f"backend is {backend!r}; it is the name of a backend")
    try:
        ms.jit(_add_one, backend=backend)(ms.Tensor([1.0])).asnumpy()
    except RuntimeError as error:
        raise ExecutionModeError(
            f"mindspore.jit has no backend {backend!r}: {str(error).splitlines()[0]}. It has "
            "'ms_backend', and those registered with register_custom_backend"
        ) from error


def _add_one(x: Any) -> Any:
    return x + 1


def refusal(reason: str) -> UnsupportedFeatureError:
    """The error for graph mode that cannot run here."""
    return UnsupportedFeatureError(
        f"execution mode 'graph' cannot run here: {reason}. Use execution_mode('eager') or "
        "fallback=True"
    )
