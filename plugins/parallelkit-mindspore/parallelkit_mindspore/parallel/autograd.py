"""MindSpore's record of operations for gradients, where it would be in the way.

A gradient function that ends by an exception leaves MindSpore recording: every later write in
place to a parameter is refused, as one within a differentiated function would be.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def ended() -> Iterator[None]:
    """Within, an exception ends the recording that it interrupts; not one that was on before."""
    executor = _executor()
    outer = executor.grad_flag()
    try:
        yield
    except BaseException:
        if not outer:
            executor.clear_res()
        raise


@contextlib.contextmanager
def unrecorded() -> Iterator[None]:
    """Within, nothing is recorded, so that parameters can be written, whatever failed before."""
    executor = _executor()
    before = executor.enable_grad()
    executor.set_enable_grad(False)
    try:
        yield
    finally:
        executor.set_enable_grad(before)


def _executor() -> Any:
    return importlib.import_module("mindspore.graph.api")._pynative_executor
