"""MindSpore has one process group a process life: what became of it here.

After its end MindSpore opens another one without an error, whose collectives fail or end the
process. So a second one is refused.
"""

from __future__ import annotations

from typing import Literal

from parallelkit.errors import AlreadyInitializedError

State = Literal["none", "open", "closed"]
_state: State = "none"


def state() -> State:
    """Whether parallelkit opened MindSpore's group in this process, and closed it."""
    return _state


def check_unused() -> None:
    """Raise `AlreadyInitializedError` if this process had a group of ours before."""
    if _state == "closed":
        raise AlreadyInitializedError(
            "MindSpore's process group was closed in this process before, or could not be opened, "
            "and MindSpore cannot open a second one in a process: its collectives would fail or "
            "end the process. Keep the group open to the end, or start a new process"
        )
    if _state == "open":
        raise AlreadyInitializedError(
            "MindSpore's process group is open in this process already; close it at the end, and "
            "use pk.current_group() until then"
        )


def opened() -> None:
    """A group of ours is being opened."""
    global _state
    _state = "open"


def closed() -> None:
    """It was closed, or could not be opened."""
    global _state
    _state = "closed"
