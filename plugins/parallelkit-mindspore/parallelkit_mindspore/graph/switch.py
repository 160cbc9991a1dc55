"""MindSpore's mode, and the variable that turns compiling off: switched and put back."""

from __future__ import annotations

import contextlib
import os
from typing import Final

import mindspore as ms

from parallelkit.environ import scoped_environ

_MODES: Final = {"eager": ms.PYNATIVE_MODE, "graph": ms.GRAPH_MODE}
_outer: list[str | None] = []  # MS_JIT before each block that is open, the outermost first


def set_by_user() -> str | None:
    """The value of `MS_JIT` outside of all blocks of ours."""
    return _outer[0] if _outer else os.environ.get("MS_JIT")


def switched(mode: str, **environ: str | None) -> contextlib.ExitStack:
    """Switch to `"eager"` or `"graph"` now; closing what is returned puts back what was.

    Eager sets `MS_JIT=0`, which MindSpore reads at each call of something compiled. Graph sets
    it to what the user had.

    Args:
        environ: other environment variables for the time until then.
    """
    before = ms.get_context("mode")
    user = set_by_user()
    stack = contextlib.ExitStack()
    _outer.append(os.environ.get("MS_JIT"))
    stack.callback(_outer.pop)
    stack.enter_context(scoped_environ(MS_JIT="0" if mode == "eager" else user, **environ))
    stack.callback(ms.set_context, mode=before)
    ms.set_context(mode=_MODES[mode])
    return stack
