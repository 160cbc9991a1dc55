"""What MindSpore's parser refuses: found in the syntax tree, named in plain words.

The table is not MindSpore's own. Each row was compiled for real with MindSpore 2.10, and a test
compiles every row again, with constructs that must not be reported beside them.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from typing import Any, Final

import attrs

_TABLE: Final[dict[str, tuple[str, str]]] = {
    "Try": ("try statement", "catch the error outside of the compiled function"),
    "TryStar": ("try statement", "catch the error outside of the compiled function"),
    "Yield": ("generator (yield)", "return a list or a tuple"),
    "YieldFrom": ("generator (yield from)", "return a list or a tuple"),
    "Delete": ("del statement", "leave it out; a graph frees what it no longer needs"),
    "Match": ("match statement", "write it as if and elif"),
    "NamedExpr": ("assignment expression (:=)", "assign in a statement of its own"),
    "Nonlocal": ("nonlocal statement", "pass the value in, and return the new one"),
    "ClassDef": ("class definition", "define the class outside of the compiled function"),
    "Import": ("import statement", "import at the top of the file"),
    "ImportFrom": ("import statement", "import at the top of the file"),
    "Set": ("set display", "use a tuple or a list"),
    "SetComp": ("set comprehension", "use a list comprehension"),
    "AsyncFunctionDef": ("coroutine (async)", "use a plain function"),
    "WhileElse": ("while loop with else", "move the else part behind the loop"),
    "ForElse": ("for loop with else", "move the else part behind the loop"),
    "Comprehension": ("comprehension with two loops", "nest two comprehensions, or use loops"),
    "PositionalOnly": ("positional-only argument", "leave out the / in the arguments"),
    "Complex": ("complex constant", "use a complex tensor"),
    "With": (
        "with statement",
        "move it outside of the compiled function; inside, MindSpore takes only objects of "
        "classes marked with mindspore.jit_class",
    ),
    "FirstArgument": (
        "method whose first argument is not self",
        "name the first argument self, and pass classes as values: MindSpore goes by that name",
    ),
    "Lambda": ("lambda inside a call", "give it a name on a line of its own, or use def"),
    "Source": (
        "function without source",
        "write the function into a file: MindSpore compiles the source text",
    ),
}
_LEAVES: Final = (ast.Return, ast.Break, ast.Continue)


@attrs.frozen
class Place:
    """A construct of the table: its row, and the node that it is."""

    kind: str
    node: Any


def words(kind: str) -> str:
    """Name a row of the table in plain words."""
    return _TABLE[kind][0]


def hint(kind: str) -> str:
    """What to write instead."""
    return _TABLE[kind][1]


def known(kind: str) -> bool:
    """Whether the table has such a row."""
    return kind in _TABLE


def scan(function: Any, with_refused: Callable[[ast.expr], bool]) -> Iterator[Place]:
    """Find what MindSpore refuses in a function's tree (`FunctionDef` or `Lambda`), in order.

    Dead branches count, since MindSpore parses them; what stands behind a `return` does not.

    Args:
        with_refused: whether an expression after `with` is surely none that MindSpore takes.
    """
    if isinstance(function, ast.AsyncFunctionDef):
        yield Place("AsyncFunctionDef", function)
        return
    if function.args.posonlyargs:
        yield Place("PositionalOnly", function)
    body = [function.body] if isinstance(function, ast.Lambda) else function.body
    for node in parsed(body):
        kind = _kind(node, with_refused)
        if kind is not None:
            yield Place(kind, node)


def parsed(body: list[Any]) -> Iterator[ast.AST]:
    """All nodes that MindSpore comes to in a list of statements, in order."""
    for statement in body:
        yield statement
        for name, field in ast.iter_fields(statement):
            yield from _field(statement, name, field)
        if isinstance(statement, _LEAVES):
            return


def _field(owner: ast.AST, name: str, field: Any) -> Iterator[ast.AST]:
    if name in ("annotation", "returns", "decorator_list", "type_comment"):
        return
    if isinstance(owner, ast.ClassDef | ast.AsyncFunctionDef):
        return  # refused as a whole: what is inside it is fine elsewhere
    if isinstance(field, list) and field and isinstance(field[0], ast.AST):
        yield from parsed(field)
    elif isinstance(field, ast.AST):
        yield from parsed([field])


def _kind(node: ast.AST, with_refused: Callable[[ast.expr], bool]) -> str | None:
    if isinstance(node, ast.With):
        refused = any(with_refused(item.context_expr) for item in node.items)
        return "With" if refused else None
    if isinstance(node, ast.While | ast.For) and node.orelse:
        return "WhileElse" if isinstance(node, ast.While) else "ForElse"
    if isinstance(node, ast.ListComp | ast.GeneratorExp | ast.DictComp):
        return "Comprehension" if len(node.generators) > 1 else None
    if isinstance(node, ast.Constant) and isinstance(node.value, complex):
        return "Complex"
    if isinstance(node, ast.FunctionDef | ast.Lambda):
        return "PositionalOnly" if node.args.posonlyargs else None
    name = type(node).__name__
    return name if name in _TABLE and name not in ("With", "Lambda") else None
