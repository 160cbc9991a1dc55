"""Eager, or `torch.compile`: as asked, as it is, and what became of it."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable, Mapping
from typing import Any, Final, final

import attrs
import torch
from torch import nn

from parallelkit import options as opts
from parallelkit.errors import ExecutionModeError, UnsupportedFeatureError
from parallelkit.graphs import GraphBreak
from parallelkit.nesting import Nesting
from parallelkit.specs import ExecutionSpec
from parallelkit_torch import names
from parallelkit_torch.graph import regions
from parallelkit_torch.graph.apart import title
from parallelkit_torch.graph.settings import Settings, settle
from parallelkit_torch.graph.watch import Tally, watch

_NO_SETTINGS: Final = Settings(options={}, without={})
_open: Final = Nesting()


def set_execution_mode(spec: ExecutionSpec) -> TorchExecutionMode:
    """Prepare the mode that `spec` asks for. Changes nothing yet; not collective.

    Raises:
        UnsupportedFeatureError: an unknown option; or graph mode or CUDA graphs cannot run here
            and `spec.fallback` is off.
        ExecutionModeError: an unknown compile backend, or options that contradict each other.
    """
    if spec.mode == "eager":
        opts.check(spec.options, (), what="execution mode 'eager'")
        return TorchExecutionMode("eager", "eager", "as asked", _NO_SETTINGS)
    settings = settle(spec.options)
    problem = _problem(settings)
    if problem is not None:
        if not spec.fallback:
            raise UnsupportedFeatureError(
                f"execution mode 'graph' cannot run here: {problem}. Use execution_mode('eager'), "
                "fallback=True, or backend='aot_eager'"
            )
        return TorchExecutionMode("graph", "eager", problem, _NO_SETTINGS)
    reason = f"torch.compile with {settings.backend}"
    if settings.cuda_graphs and not torch.cuda.is_available():
        missing = "torch sees no CUDA device"
        if not spec.fallback:
            raise UnsupportedFeatureError(
                f"cuda_graphs=True cannot run here: {missing}. Leave cuda_graphs out, or pass "
                "fallback=True to go on without"
            )
        settings = attrs.evolve(settings, options=settings.without, cuda_graphs=False)
        reason += f", without CUDA graphs: {missing}"
    return TorchExecutionMode("graph", "graph", reason, settings, fallback=spec.fallback)


@attrs.frozen(kw_only=True, eq=False)
class Target:
    """Something that `compile` was given.

    Attributes:
        title: the function's or the model's name.
        steps: what was done to it, in order: sharded, replicated, compiled.
        tally: what dynamo compiled for it.
    """

    title: str
    steps: tuple[str, ...]
    tally: Tally = attrs.field(factory=Tally)

    @property
    def graphs(self) -> int:
        return self.tally.graphs

    @property
    def recompiles(self) -> int:
        return self.tally.recompiles

    @property
    def breaks(self) -> tuple[GraphBreak, ...]:
        return self.tally.breaks


@final
class TorchExecutionMode:
    """A `parallelkit.protocols.ExecutionMode` for torch.

    As a context manager it says how functions that are compiled already run inside the block:
    `eager` runs them uncompiled, `graph` runs them compiled even inside an eager block. What was
    is restored at the end; blocks nest, and leaving them in another order is an
    `ExecutionModeError`.

    Example:
        >>> eager = set_execution_mode(ExecutionSpec(mode="eager"))
        >>> with eager:
        ...     eager.effective
        'eager'
    """

    def __init__(
        self,
        requested: str,
        effective: str,
        reason: str,
        settings: Settings,
        *,
        fallback: bool = False,
    ) -> None:
        self._requested = requested
        self._effective = effective
        self._reason = reason
        self._settings = settings
        self._fallback = fallback
        self._targets: list[Target] = []
        self._uncounted: UnsupportedFeatureError | None = None

    @property
    def requested(self) -> str:
        return self._requested

    @property
    def effective(self) -> str:
        return self._effective

    @property
    def reason(self) -> str:
        return self._reason

    @property
    def compile_options(self) -> dict[str, Any]:
        """What `torch.compile` is given, a copy."""
        return _copied(self._settings.options)

    @property
    def targets(self) -> tuple[Target, ...]:
        """What `compile` was given so far, in order, each with its own counts.

        Raises:
            UnsupportedFeatureError: this torch is not one whose compilations can be counted.
        """
        if self._uncounted is not None:
            raise self._uncounted
        return tuple(self._targets)

    @property
    def graphs(self) -> int:
        """Graphs compiled so far; errors as `targets`."""
        return sum(target.graphs for target in self.targets)

    @property
    def recompiles(self) -> int:
        """Compilations of code that was compiled for the same target before."""
        return sum(target.recompiles for target in self.targets)

    @property
    def graph_breaks(self) -> int:
        """Places where a graph ended early, those met so far."""
        return sum(len(target.breaks) for target in self.targets)

    def compile(self, target: Any) -> Any:
        """Return `target`, a function or a module, ready to run in this mode.

        Graph: compiled at the first call, names of parameters as before. Parallelize before,
        never after. A plain or tensor-parallel module comes back wrapped by `torch.compile`. One
        that is replicated or that FSDP2 shards, and one whose `regions` are compiled, is compiled
        in place and comes back itself. Eager: `target` itself, or what was compiled if it is
        compiled; what was compiled in place is so no longer.

        Under data parallel torch compiles what the replicated module's own `forward` does; where
        that module is a bare container of torch's (`nn.Sequential`) it compiles nothing, so give
        the model a class of its own.

        Raises:
            ExecutionModeError: `target` cannot be called, was compiled before it was replicated,
                has no such regions, or is not where its CUDA graphs would be.
        """
        if not callable(target):
            raise ExecutionModeError(
                f"a {type(target).__qualname__} cannot be compiled; give a function or a module"
            )
        original = names.uncompiled(target)
        regions.refuse_compiled_inside(original)
        parts = self.parts_of(original)
        options, note = self._options_for(original)
        undone = regions.undo(original)
        steps = regions.history(original)
        if self._effective == "eager":
            steps.append("compiled no longer" if undone or original is not target else "as it is")
            self._targets.append(Target(title=title(original), steps=tuple(steps)))
            return original
        tally = Tally()
        if parts:
            for _, part in parts:
                self._compile_in_place(part, options, tally)
            steps.append(f"compiled in place: {_range(parts)}{note}")
            compiled = original
        else:
            compiled = torch.compile(original, **_copied(options))
            self._watch(compiled, tally)
            steps.append(f"compiled as a whole{note}")
        self._targets.append(Target(title=title(original), steps=tuple(steps), tally=tally))
        return compiled

    def parts_of(self, original: Any) -> list[tuple[str, nn.Module]]:
        """Which parts of a model are compiled one by one, by name; none: it is a whole.

        Raises:
            ExecutionModeError: the mode's `regions` do not fit it.
        """
        chosen = self._settings.regions
        if self._effective == "eager":
            return []
        if isinstance(original, nn.Module):
            found = regions.parts(original, chosen)
            return found or regions.whole_in_place(original)
        if chosen not in ("auto", "whole"):
            raise ExecutionModeError(
                f"regions={chosen!r} names parts of a module, and {title(original)} is none"
            )
        return []

    def explain(self) -> str:
        """Say what runs and why, and for each target what was done, in order, and counted."""
        lines = [f"execution mode {self._requested!r}, effective {self._effective!r}"]
        lines[0] += f": {self._reason}"
        shown = {name: v for name, v in self._settings.options.items() if name != "backend"}
        if shown:
            lines.append("options: " + ", ".join(f"{k}={v!r}" for k, v in sorted(shown.items())))
        for target in self._targets:
            lines.append(f"{target.title}, what was done to it:")
            lines += [f"  {n}. {done}" for n, done in enumerate(target.steps, 1)]
            if self._effective == "eager":
                continue
            if self._uncounted is not None:
                lines.append(f"  {self._uncounted}")
                continue
            lines.append(
                f"  {target.graphs} graph(s), {target.recompiles} recompile(s), "
                f"{len(target.breaks)} break(s)"
            )
            lines += [f"  break: {b.construct}, {b.place}" for b in target.breaks]
        return "\n".join(lines)

    def _options_for(self, original: Any) -> tuple[Mapping[str, Any], str]:
        """Options for this target; without CUDA graphs, and a note, where it is on no GPU."""
        if not self._settings.cuda_graphs or not isinstance(original, nn.Module):
            return self._settings.options, ""
        types = {tensor.device.type for tensor in original.parameters()}
        if not types or "cuda" in types:
            return self._settings.options, ""
        found = ", ".join(sorted(types))
        if not self._fallback:
            raise ExecutionModeError(
                f"cuda_graphs=True cannot run {title(original)}: its parameters are on {found}. "
                "Move it to a CUDA device first, or pass fallback=True to go on without"
            )
        return self._settings.without, f", without CUDA graphs: parameters are on {found}"

    def _compile_in_place(
        self, module: nn.Module, options: Mapping[str, Any], tally: Tally
    ) -> None:
        module.compile(**_copied(options))
        compiled = module._compiled_call_impl
        assert compiled is not None
        self._watch(compiled, tally)

    def _watch(self, compiled: Callable[..., Any], tally: Tally) -> None:
        try:
            watch(compiled, tally)
        except UnsupportedFeatureError as error:  # compiling works all the same
            self._uncounted = error

    def __enter__(self) -> TorchExecutionMode:
        stance = "force_eager" if self._effective == "eager" else "default"
        # torch sets a stance where it is made, and remembers what was before
        taken = torch.compiler.set_stance(stance)
        _open.enter(self, lambda: taken.__exit__(None, None, None))
        return self

    def __exit__(self, *exc: object) -> None:
        _open.leave(self)

    def __repr__(self) -> str:
        return f"<execution mode {self._effective}: {self._reason}>"


def _range(parts: list[tuple[str, nn.Module]]) -> str:
    found = [name or "the whole" for name, _ in parts]
    if len(found) <= 3:
        return ", ".join(found)
    return f"{len(found)} parts, {found[0]}, ..., {found[-1]}"


def _copied(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as `torch.compile` may have them: it takes entries out of the inner dict."""
    return {k: dict(v) if isinstance(v, Mapping) else v for k, v in options.items()}


def _problem(settings: Settings) -> str | None:
    """Why graph mode cannot run here, or None."""
    if settings.backend == "inductor" and not torch.cuda.is_available():
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
