"""Walk through the code that MindSpore would parse: a function, and what it calls.

MindSpore stops at the first error. So that one look shows them all, the syntax trees of the
function and of the user's functions and cells that it calls are searched here, as far as names
resolve without running anything. A call under a condition may be one that MindSpore drops, since
it compiles no branch whose condition is constant; what is found there is marked as uncertain.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import linecache
import site
import sysconfig
import textwrap
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import attrs
import mindspore as ms
from mindspore import nn

from parallelkit_mindspore.graph import syntax

_LIMIT: Final = 500  # functions; a bound, far beyond what a model has
_UNKNOWN: Final = object()
_CALLABLE: Final = (nn.Cell, types.FunctionType, types.MethodType, functools.partial)
_LIBRARIES: Final = (
    str(Path(ms.__file__).parent),
    str(Path(__file__).parents[1]),
    *site.getsitepackages(),
    sysconfig.get_path("stdlib"),
)


@attrs.frozen(kw_only=True)
class Finding:
    """A construct that MindSpore refuses.

    Attributes:
        kind: row of `syntax`.
        file, line: where. last: its last line.
        certain: whether MindSpore comes there, whatever the branches.
    """

    kind: str
    file: str
    line: int
    last: int
    certain: bool

    @property
    def source(self) -> str:
        return linecache.getline(self.file, self.line).strip()


def walk(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Finding]:
    """Find what MindSpore refuses in `target`, called with these arguments, in parse order."""
    walker = _Walker()
    walker.visit(target, certain=True, given=(args, kwargs))
    return walker.found


def function_of(target: Any) -> tuple[Any, Any]:
    """The Python function that a call of `target` runs, and what its first argument is bound to.

    Both None where there is none.
    """
    while isinstance(target, functools.partial):
        target = target.func
    if isinstance(target, nn.Cell):
        target = target.construct
    elif not isinstance(target, types.FunctionType | types.MethodType | type):
        target = getattr(target, "__call__", None)  # noqa: B004
    owner = getattr(target, "__self__", None)
    function = inspect.unwrap(getattr(target, "__func__", target)) if callable(target) else None
    return (function, owner) if isinstance(function, types.FunctionType) else (None, None)


def tree_of(function: types.FunctionType) -> Any:
    """The tree of a function's `def` or `lambda`, with lines as in its file; None without source.

    None too for a lambda that shares its line with another.
    """
    try:
        lines, first = inspect.getsourcelines(function)
    except (OSError, TypeError):
        return None
    try:
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except SyntaxError:  # a lambda in the middle of an expression
        return None
    ast.increment_lineno(tree, max(first, 1) - 1)
    kinds = (
        ast.Lambda if function.__name__ == "<lambda>" else ast.FunctionDef | ast.AsyncFunctionDef
    )
    found = [node for node in ast.walk(tree) if isinstance(node, kinds)]
    if function.__name__ == "<lambda>" and len(found) != 1:
        return None
    return found[0] if found else None


class _Walker:
    def __init__(self) -> None:
        self.found: list[Finding] = []
        self._seen: dict[tuple[int, int], bool] = {}

    def visit(self, target: Any, *, certain: bool, given: Any = ((), {})) -> None:
        """Search what a call of `target` runs, once for each function and owner."""
        while isinstance(target, functools.partial):
            given = ((*target.args, *given[0]), {**target.keywords, **given[1]})
            target = target.func
        function, owner = function_of(target)
        if isinstance(target, nn.Cell) and function is not None and is_library(function):
            for cell in target.cells():  # a container or a wrapper: it calls what is inside
                self.visit(cell, certain=certain)
            return
        key = (id(function), id(owner))
        if function is None or key in self._seen or len(self._seen) > _LIMIT:
            return
        self._seen[key] = certain
        if is_library(function):
            for callee in _enclosed(function):  # what `value_and_grad` and its like were given
                self.visit(callee, certain=certain)
            return
        tree = tree_of(function)
        if tree is None:
            if not _has_source(function):
                self._add("Source", function.__code__.co_firstlineno, None, function, certain)
            return
        scope = _Scope(function, tree, owner, given)
        places = list(syntax.scan(tree, scope.refuses_with))
        if _first_argument_is_wrong(tree, owner):
            places.insert(0, syntax.Place("FirstArgument", tree))
        for place in places:
            node = place.node
            self._add(place.kind, node.lineno, node.end_lineno, function, certain)
        if not isinstance(tree, ast.AsyncFunctionDef):
            for callee, surely in scope.called():
                self.visit(callee, certain=certain and surely)

    def _add(
        self, kind: str, line: int, last: int | None, function: types.FunctionType, certain: bool
    ) -> None:
        file = function.__code__.co_filename
        finding = Finding(kind=kind, file=file, line=line, last=last or line, certain=certain)
        if finding not in self.found:
            self.found.append(finding)


class _Scope:
    """What names mean in a function, as far as that is known without running it."""

    def __init__(self, function: types.FunctionType, tree: Any, owner: Any, given: Any) -> None:
        self._tree = tree
        self._globals = function.__globals__
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        self._names: dict[str, Any] = {}
        for name, cell in cells:
            try:
                self._names[name] = cell.cell_contents
            except ValueError:  # not assigned yet
                self._names[name] = _UNKNOWN
        locals_ = set(function.__code__.co_varnames) | set(function.__code__.co_cellvars)
        self._names |= dict.fromkeys(locals_, _UNKNOWN)
        for parameter in inspect.signature(function).parameters.values():
            if isinstance(parameter.default, _CALLABLE):
                self._names[parameter.name] = parameter.default
        self._owner = owner
        first = ([owner] if owner is not None else []) + list(given[0])
        try:
            self._names |= inspect.signature(function).bind_partial(*first, **given[1]).arguments
        except TypeError:
            if owner is not None and tree.args.args:
                self._names[tree.args.args[0].arg] = owner

    def refuses_with(self, expression: ast.expr) -> bool:
        """Whether `with expression` is surely nothing that MindSpore takes."""
        if isinstance(expression, ast.Call):
            made = self._value(expression.func)
            name = getattr(made, "__name__", "")
            if made is _UNKNOWN or name in ("StreamCtx", "StreamLimitCtx"):
                return False
            return not (isinstance(made, type) and hasattr(made, "__ms_class__"))
        value = self._value(expression)
        return value is not _UNKNOWN and not hasattr(value, "__ms_class__")

    def called(self) -> Iterator[tuple[Any, bool]]:
        """What the function calls and reads, and whether that is under no open condition."""
        body = [self._tree.body] if isinstance(self._tree, ast.Lambda) else self._tree.body
        yield from self._in(body, True)

    def _in(self, body: list[Any], surely: bool) -> Iterator[tuple[Any, bool]]:
        for node in body:
            if isinstance(node, ast.If | ast.IfExp):
                yield from self._in([node.test], surely)
                truth = self._truth(node.test)
                for branch, when in ((node.body, True), (node.orelse, False)):
                    if truth in (when, None):
                        inner = branch if isinstance(branch, list) else [branch]
                        yield from self._in(inner, surely and truth is not None)
                continue
            if isinstance(node, ast.Name | ast.Attribute):
                yield from ((thing, surely) for thing in self._targets(node))
            # a function inside, a loop's body or the rest of an `and` may never be run
            opens = isinstance(
                node, ast.FunctionDef | ast.Lambda | ast.While | ast.BoolOp | ast.ClassDef
            )
            for child in ast.iter_child_nodes(node):
                yield from self._in([child], surely and not opens)
            if isinstance(node, ast.Return):
                return

    def _targets(self, node: ast.expr) -> Iterator[Any]:
        value = self._value(node, properties=True)
        if isinstance(value, dict):
            value = list(value.values())
        if isinstance(value, _CALLABLE):
            yield value
        elif isinstance(value, list | tuple) and len(value) < _LIMIT:
            yield from (item for item in value if isinstance(item, nn.Cell))

    def _truth(self, test: ast.expr) -> bool | None:
        """What a condition is, where it is a plain constant."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            inner = self._truth(test.operand)
            return None if inner is None else not inner
        if isinstance(test, ast.Compare) and len(test.ops) == 1:
            left, right = self._value(test.left), self._value(test.comparators[0])
            if left is _UNKNOWN or right is not None:
                return None
            if isinstance(test.ops[0], ast.Is | ast.IsNot):
                return (left is None) == isinstance(test.ops[0], ast.Is)
            return None
        value = self._value(test)
        return bool(value) if value is None or isinstance(value, bool | int | str) else None

    def _value(self, node: ast.AST, *, properties: bool = False) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            if node.id in self._names:
                return self._names[node.id]
            builtins = self._globals.get("__builtins__", {})
            builtins = builtins if isinstance(builtins, dict) else vars(builtins)
            return self._globals.get(node.id, builtins.get(node.id, _UNKNOWN))
        if isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Call):
                return self._of_super(node.value, node.attr)
            owner = self._value(node.value)
            return _UNKNOWN if owner is _UNKNOWN else _attribute(owner, node.attr, properties)
        return _UNKNOWN

    def _of_super(self, call: ast.Call, name: str) -> Any:
        """A method of `super()`."""
        inside = self._names.get("__class__")
        is_super = isinstance(call.func, ast.Name) and call.func.id == "super" and not call.args
        if not is_super or not isinstance(inside, type) or not isinstance(self._owner, inside):
            return _UNKNOWN
        method = getattr(super(inside, self._owner), name, None)
        return method if isinstance(method, types.MethodType) else _UNKNOWN


def _enclosed(function: types.FunctionType) -> Iterator[Any]:
    """Functions and cells in the closure of a library's function."""
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # not assigned yet
            if isinstance(cell.cell_contents, _CALLABLE):
                yield cell.cell_contents


def _attribute(owner: Any, name: str, properties: bool) -> Any:
    """Read an attribute without running code of the user's; of a property its getter."""
    static = inspect.getattr_static(type(owner), name, None)
    if isinstance(static, property):
        getter = static.fget
        return types.MethodType(getter, owner) if properties and getter else _UNKNOWN
    if static is not None and not isinstance(
        static, types.FunctionType | staticmethod | classmethod | bool | int | str | None
    ):
        return _UNKNOWN
    own_lookup = getattr(type(owner), "__getattr__", None)
    if own_lookup is not None and not isinstance(owner, nn.Cell | types.ModuleType):
        return _UNKNOWN
    try:
        return getattr(owner, name)
    except AttributeError:
        return _UNKNOWN


def _first_argument_is_wrong(tree: Any, owner: Any) -> bool:
    if owner is None or isinstance(tree, ast.Lambda) or not tree.args.args:
        return False
    return isinstance(owner, nn.Cell | type) and tree.args.args[0].arg != "self"


def _has_source(function: types.FunctionType) -> bool:
    try:
        inspect.getsourcelines(function)
    except (OSError, TypeError):
        return False
    return True


def is_library(function: types.FunctionType) -> bool:
    """Whether a function is MindSpore's, Python's or of an installed package, not the user's."""
    file = function.__code__.co_filename
    return file.startswith(("<frozen", "<__array_function__", *_LIBRARIES))
