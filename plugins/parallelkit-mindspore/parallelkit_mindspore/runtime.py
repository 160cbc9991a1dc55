"""MindSpore itself: imported on first use, checked, and owned by one thread.

MindSpore is not thread safe: two threads that run it at once get wrong values or end the process.
So the first thread that comes here owns it, and calls from others are refused.
"""

from __future__ import annotations

import importlib
import re
import sys
import threading
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from parallelkit.errors import UnsupportedFeatureError, WrongThreadError

#: The oldest MindSpore that is accepted; the plugin is tested with 2.10.
MINIMUM: Final = (2, 9)

_owner: threading.Thread | None = None


def mindspore(what: str = "parallelkit") -> Any:
    """Return the module `mindspore`, for the thread that owns it.

    Args:
        what: the call that needs it, for the message.

    Raises:
        WrongThreadError: another thread used MindSpore before, and is alive.
        UnsupportedFeatureError: MindSpore is missing, too old, or beside a NumPy it fails with.
    """
    own(what)
    loaded = sys.modules.get("mindspore")
    return loaded if loaded is not None and hasattr(loaded, "Tensor") else _load()


def own(what: str) -> None:
    """Take MindSpore for this thread, or raise.

    Raises:
        WrongThreadError: another thread used MindSpore before, and is alive.
    """
    global _owner
    here = threading.current_thread()
    if _owner is None or not _owner.is_alive():
        _owner = here
    if _owner is not here:
        raise WrongThreadError(
            f"{what} was called in thread {here.name!r}, and thread {_owner.name!r} uses MindSpore "
            "already, which is not thread safe. Make all calls in one thread"
        )


def synchronize() -> None:
    """Wait until everything that PyNative mode was asked for is done; memory may then be read."""
    ms = mindspore("synchronize")
    importlib.import_module("mindspore.graph.api")._pynative_executor.sync()
    if ms.get_context("device_target") != "CPU":  # there, the device's streams too
        ms.runtime.synchronize()


def installed() -> str | None:
    """MindSpore's version by its metadata, or None; nothing is imported."""
    try:
        return version("mindspore")
    except PackageNotFoundError:
        return None


def problem() -> str | None:
    """Why MindSpore cannot be used here, as far as metadata tell; None if it can."""
    found = installed()
    if found is None:
        return "MindSpore is not installed: pip install mindspore 'numpy<2'"
    if _numbers(found) < MINIMUM:
        least = ".".join(map(str, MINIMUM))
        return f"MindSpore {found} is installed; parallelkit needs {least} or newer"
    numpy = version("numpy")
    if _numbers(numpy) >= (2, 0):
        return (
            f"MindSpore {found} fails with NumPy {numpy}: it was built for NumPy 1. "
            "pip install 'numpy<2'"
        )
    return None


def _load() -> Any:
    wrong = problem()
    if wrong is not None:
        raise UnsupportedFeatureError(wrong)
    try:
        return importlib.import_module("mindspore")  # writes environment variables of its own
    except ImportError as error:
        raise UnsupportedFeatureError(f"MindSpore cannot be imported: {error}") from error


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])
