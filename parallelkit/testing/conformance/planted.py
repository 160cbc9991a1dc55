"""Functions of one tensor that some graph mode cannot take whole; an adapter picks one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs


@attrs.frozen(kw_only=True)
class Planted:
    """A function that cannot become one graph, and where it cannot.

    Attributes:
        function: of one tensor; it runs eagerly.
        file, line: place of the construct.
        construct: a word that `check_graph` must use for it.
    """

    function: Callable[[Any], Any]
    file: str
    line: int
    construct: str


def _prints(x: Any) -> Any:
    y = x + 1
    print("here")
    return y * 2


def _tries(x: Any) -> Any:
    y = x + 1
    try:
        return y * 2
    except ValueError:
        return y


def _planted(function: Callable[[Any], Any], construct: str) -> Planted:
    line = function.__code__.co_firstlineno + 2
    return Planted(function=function, file=__file__, line=line, construct=construct)


#: A call of print.
prints = _planted(_prints, "print")
#: A `try` statement.
tries = _planted(_tries, "try")
