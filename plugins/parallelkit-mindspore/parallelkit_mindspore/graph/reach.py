"""What a function can come to: the cells and parameters behind it, its owner, its arguments.

Nothing is run: attributes are read from instances' own dictionaries. Looked through are bound
objects, arguments, closures, defaults, partials, containers, and the globals that code names, of
the user's functions and of the methods of the user's classes.
"""

from __future__ import annotations

import functools
import sys
import types
from collections import deque
from collections.abc import Iterator
from typing import Any, Final

import attrs
import mindspore as ms
import numpy as np
from mindspore import nn

from parallelkit_mindspore.graph.walk import is_library

#: Objects looked at, a bound: a closure may name a whole program.
LIMIT: Final = 50_000
#: Types of these packages hold no cells of the user's.
_FOREIGN: Final = frozenset(sys.stdlib_module_names) | {"numpy", "pytest", "_pytest", "torch"}
_CONTAINERS: Final = (list, tuple, set, frozenset, deque)
_PLAIN: Final = (int, float, complex, str, bytes, type(None), np.ndarray, np.generic)


@attrs.frozen(kw_only=True, eq=False)
class Reached:
    """What was found, each once.

    Attributes:
        cells: the outermost cells on each way, in the order they were met; optimisers are cells.
        tensors: parameters and buffers of the cells, and parameters that stand alone.
        complete: whether all was looked at.
    """

    cells: tuple[Any, ...]
    tensors: tuple[Any, ...]
    complete: bool


def reach(*roots: Any) -> Reached:
    """Look through what `roots` hold, name and are bound to."""
    cells: dict[int, Any] = {}
    tensors: dict[int, Any] = {}
    seen: dict[int, Any] = {}  # the objects too: an id is good as long as its object lives
    inner: set[int] = set()
    todo = deque(roots)
    while todo and len(seen) < LIMIT:
        one = todo.popleft()
        if isinstance(one, _PLAIN) or id(one) in seen:
            continue
        seen[id(one)] = one
        if isinstance(one, ms.Parameter):
            tensors[id(one)] = one
        if isinstance(one, nn.Cell):
            if id(one) not in inner:
                cells[id(one)] = one
            inner.update(id(part) for _, part in one.cells_and_names())
            own = (*one.get_parameters(expand=False), *one.buffers(recurse=False))
            tensors |= {id(tensor): tensor for tensor in own}
            todo.extend(part for _, part in one.cells_and_names())
        todo.extend(_held(one))
    return Reached(cells=tuple(cells.values()), tensors=tuple(tensors.values()), complete=not todo)


def _held(one: Any) -> Iterator[Any]:
    """What an object holds or names."""
    if isinstance(one, dict):
        yield from one.values()
    elif isinstance(one, _CONTAINERS):
        yield from one
    elif isinstance(one, functools.partial):
        yield from (one.func, *one.args, *one.keywords.values())
    elif isinstance(one, types.MethodType):
        yield from (one.__func__, one.__self__)
    elif isinstance(one, types.FunctionType):
        yield from _named(one)
    elif not isinstance(one, ms.Tensor | type | types.ModuleType):
        yield from _attributes(one)


def _named(function: types.FunctionType) -> Iterator[Any]:
    yield getattr(function, "__wrapped__", None)
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    if is_library(function):
        return
    names = set(_names(function.__code__))
    for name in names & function.__globals__.keys():
        value = function.__globals__[name]
        if not isinstance(value, types.ModuleType):
            yield value
        elif _is_users(value.__name__):
            yield from (vars(value)[inner] for inner in names & vars(value).keys())


def _names(code: types.CodeType) -> Iterator[str]:
    """Global and attribute names in a function's code and in that of functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _attributes(one: Any) -> Iterator[Any]:
    """An instance's attributes, and the methods of its class that the user wrote."""
    kind = type(one)
    if isinstance(one, types.SimpleNamespace):
        yield from vars(one).values()
        return
    if not _is_users(kind.__module__) and kind.__module__.partition(".")[0] != "mindspore":
        return
    yield from getattr(one, "__dict__", {}).values()
    for base in kind.__mro__:
        if not _is_users(base.__module__):
            continue
        for name, value in vars(base).items():
            if isinstance(value, types.MemberDescriptorType):  # of __slots__
                yield getattr(one, name, None)
            elif isinstance(value, property):
                yield value.fget
            elif isinstance(value, staticmethod | classmethod):
                yield value.__func__
            else:
                yield value


def _is_users(module: str) -> bool:
    top = module.partition(".")[0]
    return top not in _FOREIGN and top != "mindspore"
