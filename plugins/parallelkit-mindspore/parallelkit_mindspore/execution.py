"""PyNative, or compiled by MindSpore: as asked, as it is, and what became of it."""

from __future__ import annotations

from typing import Any, Final, final

import attrs
from mindspore import nn

from parallelkit import options as opts
from parallelkit.errors import ExecutionModeError
from parallelkit.nesting import Nesting
from parallelkit.specs import ExecutionSpec
from parallelkit_mindspore import runtime
from parallelkit_mindspore.graph.compiled import Tally, compile_target, title, undo
from parallelkit_mindspore.graph.settings import Settings, problem, refusal, settle
from parallelkit_mindspore.graph.switch import switched

_NO_SETTINGS: Final = Settings(options={})
_open: Final = Nesting()


def set_execution_mode(spec: ExecutionSpec) -> MindSporeExecutionMode:
    """Prepare the mode that `spec` asks for. Changes nothing yet; not collective.

    Raises:
        UnsupportedFeatureError: an unknown option; or graph mode cannot run here (`MS_JIT=0`, or
            bytecode capture on a Python too new for it) and `spec.fallback` is off.
        ExecutionModeError: a value that is not allowed.
        WrongThreadError: another thread uses MindSpore.
    """
    runtime.mindspore("execution_mode")
    if spec.mode == "eager":
        opts.check(spec.options, (), what="execution mode 'eager'")
        return MindSporeExecutionMode("eager", "eager", "as asked", _NO_SETTINGS)
    settings = settle(spec.options)
    reason = problem(settings)
    if reason is not None:
        if not spec.fallback:
            raise refusal(reason)
        return MindSporeExecutionMode("graph", "eager", reason, _NO_SETTINGS)
    reason = f"mindspore.jit with capture_mode {settings.capture_mode!r}"
    return MindSporeExecutionMode("graph", "graph", reason, settings)


@attrs.frozen(kw_only=True, eq=False)
class Target:
    """Something that `compile` was given.

    Attributes:
        title: the function's or the cell's name.
        steps: what was done to it, in order.
        tally: what MindSpore compiled for it.
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
    def breaks(self) -> int:
        return self.tally.breaks


@final
class MindSporeExecutionMode:
    """A `parallelkit.protocols.ExecutionMode` for MindSpore.

    As a context manager it switches MindSpore's mode, which is the process's: inside a `graph`
    block every cell that is called is compiled as a whole by MindSpore itself; inside an `eager`
    block nothing is compiled and what was compiled runs as plain Python (by `MS_JIT=0`, which
    processes started inside the block inherit). What was is restored at the end, after exceptions
    too; blocks nest, and leaving them in another order is an `ExecutionModeError`.

    All methods are for the thread that owns MindSpore; others get `WrongThreadError`.

    Example:
        >>> eager = set_execution_mode(ExecutionSpec(mode="eager"))
        >>> with eager:
        ...     eager.effective
        'eager'
    """

    def __init__(self, requested: str, effective: str, reason: str, settings: Settings) -> None:
        self._requested = requested
        self._effective = effective
        self._reason = reason
        self._settings = settings
        self._targets: list[Target] = []

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
        """What `mindspore.jit` is given, a copy."""
        return dict(self._settings.options)

    @property
    def targets(self) -> tuple[Target, ...]:
        """What `compile` was given so far, in order, each with its own counts."""
        return tuple(self._targets)

    @property
    def graphs(self) -> int:
        """Graphs compiled so far for what `compile` was given; one per shape, type and mode.

        A graph compiled for a gradient counts as one, forward and backward together.
        """
        return sum(target.graphs for target in self._targets)

    @property
    def recompiles(self) -> int:
        """Compilations of a target that was compiled before; constant over constant shapes."""
        return sum(target.recompiles for target in self._targets)

    @property
    def graph_breaks(self) -> int:
        """Places where bytecode capture ended a graph early, as MindSpore counts them.

        Always 0 with `capture_mode="ast"`: there the whole call is one graph, or an error.
        """
        return sum(target.breaks for target in self._targets)

    def compile(self, target: Any) -> Any:
        """Return `target`, a function or a cell, ready to run in this mode.

        Graph: compiled at the first call. A cell comes back itself, with a compiled `construct`;
        names of parameters, hooks and `trainable_params()` are as before, and everything outside
        of it goes on in PyNative. A function, method or partial comes back as a new callable. What
        is compiled runs compiled in PyNative mode too, with no `with` block around it.

        Eager: `target` itself, or what was compiled if it is compiled; cells compiled in place,
        and cells inside them, are so no longer.

        Parallelize before, never after: MindSpore reads the parallel context as it compiles.

        Raises:
            ExecutionModeError: `target` cannot be called, or is not made of Python functions.
            WrongThreadError: another thread uses MindSpore.
        """
        runtime.own("ExecutionMode.compile")
        if not callable(target):
            raise ExecutionModeError(
                f"a {type(target).__qualname__} cannot be compiled; give a function or a cell"
            )
        original, undone = undo(target)
        if self._effective == "eager":
            step = "compiled no longer" if undone else "as it is"
            self._targets.append(Target(title=title(original), steps=(step,)))
            return original
        tally = Tally()
        compiled = compile_target(original, self._settings.options, tally)
        how = "construct compiled in place" if isinstance(original, nn.Cell) else "compiled"
        self._targets.append(Target(title=title(original), steps=(how,), tally=tally))
        return compiled

    def explain(self) -> str:
        """Say what runs and why, and for each target what was done, in order, and counted."""
        lines = [f"execution mode {self._requested!r}, effective {self._effective!r}"]
        lines[0] += f": {self._reason}"
        shown = {k: v for k, v in self._settings.options.items() if k != "capture_mode"}
        if shown:
            lines.append("options: " + ", ".join(f"{k}={v!r}" for k, v in sorted(shown.items())))
        for target in self._targets:
            lines.append(f"{target.title}, what was done to it:")
            lines += [f"  {n}. {done}" for n, done in enumerate(target.steps, 1)]
            if self._effective == "graph":
                lines.append(
                    f"  {target.graphs} graph(s), {target.recompiles} recompile(s), "
                    f"{target.breaks} break(s)"
                )
        return "\n".join(lines)

    def __enter__(self) -> MindSporeExecutionMode:
        runtime.own("entering an execution mode")
        _open.enter(self, switched(self._effective).close)
        return self

    def __exit__(self, *exc: object) -> None:
        runtime.own("leaving an execution mode")
        _open.leave(self)

    def __repr__(self) -> str:
        return f"<execution mode {self._effective}: {self._reason}>"
