"""Functions and cells compiled by `mindspore.jit`: counted, told apart, and undone.

MindSpore keeps what it compiled under a key made of the code's place and the arguments' shapes
and types. Each compiled callable of ours has a key of its own, so that two modes with different
options, or a look by `check_graph`, do not hand each other their graphs.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import os
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import attrs
import mindspore as ms
from mindspore import nn

from parallelkit.errors import ExecutionModeError
from parallelkit_mindspore import runtime
from parallelkit_mindspore.graph import apart
from parallelkit_mindspore.graph.moved import Addresses

_MINDSPORE: Final = str(Path(ms.__file__).parent)
_numbers = itertools.count(1)
_claimed = 0  # compilations that a call within the present one has counted already


@attrs.define(eq=False)
class Tally:
    """What was compiled for a target so far.

    Attributes:
        called: graphs compiled when it was called; breaks: where bytecode capture ended a graph.
        cell: the target, where it is a cell; inside a `graph` block MindSpore itself compiles it.
    """

    called: int = 0
    breaks: int = 0
    cell: Any = None
    _before: int = 0

    def watch(self, cell: Any) -> None:
        """Count what MindSpore compiles for `cell` from now on."""
        self.cell = cell
        self._before = len(cell.compile_cache)

    @property
    def graphs(self) -> int:
        """All graphs compiled for it."""
        if self.cell is None:
            return self.called
        return self.called + max(0, len(self.cell.compile_cache) - self._before)

    @property
    def recompiles(self) -> int:
        """All but the first: each is the same code for another shape, type or mode."""
        return max(0, self.graphs - 1)


def compile_function(
    function: types.FunctionType, options: Mapping[str, Any], tally: Tally
) -> Callable[..., Any]:
    """`mindspore.jit(function, **options)`, counted into `tally`.

    Graphs whose parameters lie in other memory by now, as after `load_checkpoint`, are dropped
    and compiled again. With `MS_JIT=0` in the environment, as inside an `eager` block, it runs
    uncompiled. MindSpore sees through it, so that it can be called inside other graphs.

    Raises:
        WrongThreadError: when called in a thread that does not own MindSpore.
    """
    compiled, addresses = _jit(function, options), Addresses()
    traces = options.get("capture_mode") == "trace"

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        global _claimed
        nonlocal compiled
        runtime.own(f"{function.__qualname__}, which is compiled,")
        if os.environ.get("MS_JIT") == "0":
            return function(*args, **kwargs)
        key = args[0] if args and isinstance(args[0], nn.Cell) else function
        if addresses.moved(key):
            _drop(compiled)
            addresses.forget(key)
            compiled = _jit(function, options)
        before, claimed = _compilations(compiled), _claimed
        outermost = traces and not _is_tracing()
        try:
            return compiled.call(*args, **kwargs)
        except BaseException:
            if outermost:
                _end_trace()
            raise
        finally:
            new = _compilations(compiled) - before - (_claimed - claimed)
            tally.called += new
            _claimed += new
            tally.breaks = max(tally.breaks, _extra(compiled, "break_count_"))
            if new:
                addresses.note(key, (function, args, kwargs))

    run.__dict__["_parallelkit_compiled"] = True
    return run


def compile_call(target: Any, options: Mapping[str, Any], tally: Tally) -> Callable[..., Any]:
    """Return a compiled callable that does what a call of `target` does; `target` stays as it is.

    A cell's own hooks are left out: its `construct` is what is compiled.

    Raises:
        ExecutionModeError: neither a cell, nor made of a function written in Python.
    """
    if isinstance(target, functools.partial):
        inner = compile_call(target.func, options, tally)
        return functools.partial(inner, *target.args, **target.keywords)
    if isinstance(target, types.FunctionType):
        return compile_function(target, options, tally)
    method = target
    if isinstance(target, nn.Cell):
        method = target.construct
    elif not isinstance(target, types.MethodType | type):
        method = getattr(target, "__call__", None)  # noqa: B004
    function = undone(getattr(method, "__func__", None))
    if not isinstance(function, types.FunctionType):
        raise ExecutionModeError(
            f"{title(target)} cannot be compiled: MindSpore takes cells, and functions and methods "
            "written in Python"
        )
    return types.MethodType(compile_function(function, options, tally), method.__self__)


def compile_target(target: Any, options: Mapping[str, Any], tally: Tally) -> Any:
    """Compile a cell in place, anything else into a callable of its own; errors as there."""
    compiled = compile_call(target, options, tally)
    if isinstance(target, nn.Cell):
        target.construct = compiled
        tally.watch(target)
        return target
    return compiled


def undone(target: Any) -> Any:
    """Return what the user wrote, with no compiling around it; cells stay as they are.

    `mindspore.jit(cell)` is a method of the cell: the cell comes back.
    """
    if isinstance(target, functools.partial):
        inner = undone(target.func)
        same = inner is target.func
        return target if same else functools.partial(inner, *target.args, **target.keywords)
    if isinstance(target, types.MethodType):
        function, owner = undone(target.__func__), target.__self__
        if function is target.__func__:
            return target
        if isinstance(owner, nn.Cell) and function.__name__ == "construct":
            return owner
        return types.MethodType(function, owner)
    while is_compiled(target):
        target = target.__wrapped__
    return target


def undo(target: Any) -> tuple[Any, bool]:
    """`undone`, and a cell is changed in place, with all cells inside it.

    Returns:
        The plain target, and whether anything was compiled.
    """
    plain = undone(target)
    if isinstance(plain, nn.Cell):
        found = [_undo_cell(cell) for _, cell in plain.cells_and_names()]
        return plain, any(found) or plain is not target
    return plain, plain is not target


def is_compiled(function: Any) -> bool:
    """Whether it is what `mindspore.jit` or `compile_function` made; a wrapper of that is not."""
    if not isinstance(function, types.FunctionType) or not hasattr(function, "__wrapped__"):
        return False
    if function.__code__.co_filename == __file__:
        return "_parallelkit_compiled" in function.__dict__
    in_mindspore = function.__code__.co_filename.startswith(_MINDSPORE)
    return in_mindspore and "__wrapped_by_jit__" in function.__dict__


def title(target: Any) -> str:
    """Name a function or a cell in reports."""
    if isinstance(target, nn.Cell):
        return type(target).__qualname__
    if isinstance(target, functools.partial):
        return title(target.func)
    return str(getattr(target, "__qualname__", None) or type(target).__qualname__)


def where(target: Any) -> tuple[str, int]:
    """File and line of a function, or of a cell's `construct`; empty and 0 where not Python."""
    if isinstance(target, nn.Cell):
        target = type(target).construct
    while isinstance(target, functools.partial):
        target = target.func
    code = getattr(inspect.unwrap(target), "__code__", None)
    return (code.co_filename, code.co_firstlineno) if code is not None else ("", 0)


def _undo_cell(cell: Any) -> bool:
    was = False
    own = cell.__dict__.get("construct")
    if own is not None:
        function = getattr(own, "__func__", own)
        plain = undone(function)
        if plain is function:
            return False
        was = True
        del cell.__dict__["construct"]
        if plain is not undone(type(cell).construct):  # the user had put one there before
            cell.construct = types.MethodType(plain, cell)
            return True
    if is_compiled(type(cell).construct):  # a class whose construct is marked with jit
        cell.construct = types.MethodType(undone(type(cell).construct), cell)
        return True
    return was


@attrs.frozen(eq=False)
class _Compiled:
    """What `mindspore.jit` made of `source`, under the key `name`."""

    call: Callable[..., Any]
    source: types.FunctionType
    name: str


def _jit(function: types.FunctionType, options: Mapping[str, Any]) -> _Compiled:
    """Compile under a key of its own, and from code of its own: bytecode capture keeps there."""
    source = types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    for name in ("__module__", "__qualname__", "__doc__", "__annotations__", "__kwdefaults__"):
        setattr(source, name, getattr(function, name))
    source.__dict__.update(function.__dict__)
    call: Any = ms.jit(source, **options)
    call.__jit_graph_name__ = f"parallelkit-{next(_numbers)}"
    return _Compiled(call, source, call.__jit_graph_name__)


def _drop(compiled: _Compiled) -> None:
    """Free the graphs of what `_jit` made; what an enclosing call counts stays right."""
    global _claimed
    from mindspore.graph import api

    keys = {key for key in api.ms_compile_cache if key.endswith(compiled.name)}
    apart.drop(keys)
    _claimed -= len(keys)


def _compilations(compiled: _Compiled) -> int:
    """How many graphs the process has compiled for callables, and for this one from bytecode."""
    from mindspore.graph import api, jit_trace

    traced = len(getattr(jit_trace, "_trace_compile_cache", ()))
    return len(api.ms_compile_cache) + traced + _extra(compiled, "compile_count_")


def _extra(compiled: _Compiled, what: str) -> int:
    """What bytecode capture notes on a function's code object."""
    from mindspore._c_expression import get_code_extra

    noted = get_code_extra(compiled.source)
    return int(noted.get(what, 0)) if isinstance(noted, dict) else 0


def _is_tracing() -> bool:
    from mindspore.graph import jit_trace

    return bool(jit_trace._using_trace)


def _end_trace() -> None:
    """After an exception MindSpore believes that it still traces, and would refuse ever after.

    So the half graph is ended, with an argument as its output, and forgotten.
    """
    from mindspore._c_expression import TraceRecorder
    from mindspore.graph import jit_trace
    from mindspore.graph.jit_config import _DEFAULT_JIT_CONFIG
    from mindspore.graph.jit_context import set_jit_context

    if not _is_tracing():
        return
    begun = jit_trace._trace_jit_context
    with contextlib.suppress(RuntimeError):  # it had ended, and running it failed
        outputs = (begun.args or (ms.Tensor(0),))[:1]
        TraceRecorder.get_instance().end_graph([__file__], [0], _DEFAULT_JIT_CONFIG, *outputs)
    jit_trace._trace_compile_cache.discard(begun.phase)
    set_jit_context(None)
    jit_trace._using_trace = False
