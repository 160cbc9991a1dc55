"""`check_graph` for MindSpore: compile once, and report all that keeps that from working."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from parallelkit.errors import ExecutionModeError, FunctionFailedError
from parallelkit.graphs import GraphReport
from parallelkit.specs import GraphSpec
from parallelkit_mindspore import runtime
from parallelkit_mindspore.graph import apart, verdict
from parallelkit_mindspore.graph.compiled import Tally, compile_call, title, undone, where
from parallelkit_mindspore.graph.walk import walk


def check_graph(spec: GraphSpec) -> GraphReport:
    """Compile `spec.function` with `mindspore.jit`, run it once, and report what is in the way.

    Where MindSpore can compile it, there is nothing to report. Where it cannot, the function is
    run once in PyNative, to tell its own errors from those of graph mode; then MindSpore's error
    and all constructs that its parser refuses are reported, in the function and in what it calls.

    Raises:
        FunctionFailedError: the function itself raises, compiled or not.
        ExecutionModeError: it is nothing that MindSpore compiles: a class, a built-in function.
        WrongThreadError: another thread uses MindSpore.
    """
    runtime.mindspore("check_graph")
    function = undone(spec.function)
    args, kwargs = spec.args, dict(spec.kwargs)
    tally = Tally()
    call = compile_call(function, {}, tally)
    cells = apart.cells_of(function, getattr(function, "__self__", None), *args, *kwargs.values())
    with apart.apart(), apart.cells_kept(cells):
        before = apart.phases()
        try:
            with apart.compiling():
                _settle(call(*args, **kwargs))
        except ExecutionModeError:
            raise
        except Exception as error:
            _run_plain(function, args, kwargs)
            said = verdict.read(error)
            found = verdict.breaks(said, walk(function, args, kwargs), where(function))
            return GraphReport(
                function=title(function), framework="mindspore", graphs=0, breaks=tuple(found)
            )
        made = apart.phases() - before
        return GraphReport(
            function=title(function),
            framework="mindspore",
            graphs=len(made),
            operations=apart.operations(made),
        )


def _run_plain(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    try:
        result = function(*args, **kwargs)
        if inspect.iscoroutine(result):
            result.close()  # or Python warns that nobody waited for it
        _settle(result)
    except Exception as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise FunctionFailedError(
            f"{title(function)} itself raised {type(error).__name__}: {first}. "
            "Make it run eagerly with these arguments first"
        ) from error


def _settle(result: Any) -> None:
    """Wait, so that errors of what runs behind the caller come here."""
    del result
    runtime.synchronize()
