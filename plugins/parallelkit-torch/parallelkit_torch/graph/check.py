"""`check_graph` for torch: run once under dynamo, report all that it could not take in."""

from __future__ import annotations

import linecache
import re
from typing import Any

from torch._dynamo import utils
from torch._dynamo.exc import TorchDynamoException, TorchRuntimeError

from parallelkit.errors import FunctionFailedError
from parallelkit.graphs import GraphBreak, GraphReport
from parallelkit.specs import GraphSpec
from parallelkit_torch.graph.apart import apart, compile_apart, plain, title, uncompiled_in_place
from parallelkit_torch.graph.apart import where as place_of
from parallelkit_torch.graph.watch import Tally


def check_graph(spec: GraphSpec) -> GraphReport:
    """Run `spec.function` once, compiled with the backend `eager`, and report its breaks.

    A model wrapped in `DistributedDataParallel` is looked at without the wrapper.

    Raises:
        FunctionFailedError: the function raised, or torch says that its operations cannot run.
        UnsupportedFeatureError: this torch cannot be watched.
    """
    function = plain(spec.function)
    tally = Tally()
    failure: GraphBreak | None = None
    with apart(), uncompiled_in_place(function):
        compiled = compile_apart(function, tally, backend="eager")
        before = utils.counters["stats"]["calls_captured"]
        try:
            compiled(*spec.args, **spec.kwargs)
        except TorchRuntimeError as error:  # its own message ends with what the operation said
            raise _failed(function, error) from error
        except TorchDynamoException as error:
            failure = _internal(function, error)
        except Exception as error:
            raise _failed(function, error) from error
        operations = utils.counters["stats"]["calls_captured"] - before
    found = list(tally.breaks)
    if failure is not None:
        found.append(failure)
    if not found and not tally.graphs:
        found.append(_nothing(function, tally))
    return GraphReport(
        function=title(function),
        framework="torch",
        graphs=tally.graphs,
        operations=operations,
        breaks=tuple(found),
    )


def _failed(function: Any, error: BaseException) -> FunctionFailedError:
    return FunctionFailedError(
        f"{title(function)} itself raised {type(error).__name__}: {_first_line(error)}. "
        "Make it run eagerly with these arguments first"
    )


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    said = re.search(r"got (\w+)\((['\"])(.*?)\2\)\s*$", text, re.MULTILINE)
    return f"{said[1]}: {said[3].rstrip(chr(46))}" if said else text.split("\n", 1)[0].rstrip(".")


def _internal(function: Any, error: Exception) -> GraphBreak:
    stack = getattr(error, "real_stack", None) or []
    file, line = (stack[-1].filename, stack[-1].lineno or 0) if stack else place_of(function)
    return GraphBreak(
        construct="code that torch.compile fails on",
        reason=f"{type(error).__name__}: {_first_line(error)}",
        file=file,
        line=line,
        source=linecache.getline(file, line).strip(),
    )


def _nothing(function: Any, tally: Tally) -> GraphBreak:
    file, line = place_of(function)
    why = tally.skipped[0] if tally.skipped else "no frame of it was compiled"
    return GraphBreak(
        construct="nothing to compile",
        reason=f"no operation on tensors went into a graph: {why}",
        file=file,
        line=line,
        source=linecache.getline(file, line).strip(),
    )
