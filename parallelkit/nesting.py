"""Blocks that must be left in the order opposite to that in which they were entered."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import final

from parallelkit.errors import ExecutionModeError


@final
class Nesting(threading.local):
    """Which blocks of a kind are open in this thread, the innermost last.

    Example:
        >>> blocks = Nesting()
        >>> blocks.enter("a", lambda: print("a is left"))
        >>> blocks.leave("a")
        a is left
    """

    def __init__(self) -> None:
        self._open: list[tuple[object, Callable[[], object]]] = []

    def enter(self, owner: object, undo: Callable[[], object]) -> None:
        """`owner` has entered a block; `undo` puts back what was."""
        self._open.append((owner, undo))

    def leave(self, owner: object) -> None:
        """Leave the innermost block, which must be `owner`'s.

        Raises:
            ExecutionModeError: it has none open in this thread, or another's lies inside it;
                nothing was changed.
        """
        if not any(one is owner for one, _ in self._open):
            raise ExecutionModeError(
                f"{owner!r} was left without being entered in this thread; use it as `with mode:`"
            )
        innermost, undo = self._open[-1]
        if innermost is not owner:
            raise ExecutionModeError(
                f"{owner!r} was left while {innermost!r}, entered later, is open; leave that first"
            )
        self._open.pop()
        undo()
