"""Eager, or `torch.compile`: as asked, as it is, and why."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Mapping
from typing import Any, Final, final

import torch

from parallelkit.errors import ExecutionModeError, UnsupportedFeatureError
from parallelkit.specs import ExecutionSpec
from parallelkit_torch import names
from parallelkit_torch import options as opts

_OURS: Final = frozenset({"model", "disable"})


def set_execution_mode(spec: ExecutionSpec) -> TorchExecutionMode:
    """Prepare the mode that `spec` asks for. Changes nothing yet; not collective.

    Raises:
        UnsupportedFeatureError: an unknown option; or graph cannot run here and
            `spec.fallback` is off.
        ExecutionModeError: an unknown compile backend.
    """
    if spec.mode == "eager":
        opts.check(spec.options, (), what="execution mode 'eager'")
        return TorchExecutionMode("eager", "eager", "as asked", {})
    allowed = opts.accepted(torch.compile, ours=_OURS)
    options = opts.check(spec.options, allowed, what="execution mode 'graph' (torch.compile)")
    problem = _problem(options)
    if problem is None:
        backend = options.get("backend") or "inductor"
        shown = backend if isinstance(backend, str) else getattr(backend, "__name__", "a function")
        return TorchExecutionMode("graph", "graph", f"torch.compile with {shown}", options)
    if not spec.fallback:
        raise UnsupportedFeatureError(
            f"execution mode 'graph' cannot run here: {problem}. Use execution_mode('eager'), "
            "fallback=True, or backend='aot_eager'"
        )
    return TorchExecutionMode("graph", "eager", problem, {})


@final
class TorchExecutionMode:
    """A `parallelkit.protocols.ExecutionMode` for torch.

    As a context manager it says how functions that are compiled already run inside the block:
    `eager` runs them uncompiled, `graph` runs them compiled even inside an eager block. What was
    is restored at the end; blocks nest.

    Example:
        >>> eager = set_execution_mode(ExecutionSpec(mode="eager"))
        >>> with eager:
        ...     eager.effective
        'eager'
    """

    def __init__(
        self, requested: str, effective: str, reason: str, options: Mapping[str, Any]
    ) -> None:
        self._requested = requested
        self._effective = effective
        self._reason = reason
        self._options = dict(options)
        self._stances: list[Any] = []

    @property
    def requested(self) -> str:
        return self._requested

    @property
    def effective(self) -> str:
        return self._effective

    @property
    def reason(self) -> str:
        return self._reason

    def compile(self, target: Any) -> Any:
        """Return `target`, a function or a module, ready to run in this mode.

        Graph: `torch.compile(target)`, which compiles at the first call. A module keeps its
        parameters; parallelize before, never after. Eager: `target` itself, or what was compiled
        if it is compiled.

        Under data parallel torch compiles what the replicated module's own `forward` does; where
        that module is a bare container of torch's (`nn.Sequential`) it compiles nothing, so give
        the model a class of its own.

        Raises:
            ExecutionModeError: `target` cannot be called.
        """
        if not callable(target):
            raise ExecutionModeError(
                f"a {type(target).__qualname__} cannot be compiled; give a function or a module"
            )
        original = names.uncompiled(target)
        if self._effective == "eager":
            return original
        return torch.compile(original, **self._options)

    def __enter__(self) -> TorchExecutionMode:
        stance = "force_eager" if self._effective == "eager" else "default"
        # torch sets a stance where it is made, and remembers what was before
        self._stances.append(torch.compiler.set_stance(stance))
        return self

    def __exit__(self, *exc: object) -> None:
        self._stances.pop().__exit__(None, None, None)

    def __repr__(self) -> str:
        return f"<execution mode {self._effective}: {self._reason}>"


def _problem(options: Mapping[str, Any]) -> str | None:
    """Why graph mode cannot run here, or None."""
    backend = options.get("backend") or "inductor"
    if isinstance(backend, str):
        known = torch._dynamo.list_backends(exclude_tags=())
        if backend not in known:
            raise ExecutionModeError(
                f"torch.compile has no backend {backend!r}; it has {', '.join(known)}"
            )
    if backend == "inductor" and not torch.cuda.is_available():
        return cpp_problem()
    return None


def cpp_problem() -> str | None:
    """Why inductor cannot compile for the CPU here, or None; also for `doctor`."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "inductor finds no C++ compiler (it looks for CXX, else g++); install one or set CXX"
    header = os.path.join(sysconfig.get_paths()["include"], "Python.h")
    if not os.path.exists(header):
        return f"inductor needs the headers of Python, and {header} does not exist"
    return None
