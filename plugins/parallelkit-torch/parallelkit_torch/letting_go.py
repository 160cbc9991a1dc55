"""Before a process ends: let threads that are inside torch come out of it.

A thread of gloo that finished a collective may be the last to hold its tensors, and then needs
Python's lock to free them. If Python is ending by then, it stops that thread on the spot, and C++
ends the process: "terminate called without an active exception", exit code -6, after all work was
done. torch 2.13 alone does so too: seldom on a loaded machine, and in a third of all runs of two
ranks whose lock changes hands rarely (`sys.setswitchinterval(1000)`).

A thread of ours that asks a store, whose host may be stopped, comes out of torch with the same need
when that host goes on.
"""

from __future__ import annotations

import atexit
import functools
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

_THREAD: Final = b"(pt_gloo_runloop)"
_TASKS: Final = Path("/proc/self/task")
_LOOK_SECONDS: Final = 0.0005
_BLIND_SECONDS: Final = 0.01
#: How long the end of Python waits for threads that were given up. Nothing else can free them.
_END_SECONDS: Final = 5.0

_left: list[threading.Thread] = []


def run_aside(work: Callable[[], None], name: str, seconds: float) -> bool:
    """Call what may block inside torch in a thread, and wait for it so long.

    One that is given up does not keep the process alive, but its end waits for it: for five
    seconds at most, all of them together.

    Args:
        work: what to call; name: of the thread; seconds: to wait for it.

    Returns:
        Whether it has ended.
    """
    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    thread.join(seconds)
    if not thread.is_alive():
        return True
    if not _left:
        atexit.register(_await_left)
    _left.append(thread)
    return False


def _await_left() -> None:
    end = time.monotonic() + _END_SECONDS
    for thread in _left:
        thread.join(max(0.0, end - time.monotonic()))


def await_gloo(limit: float = 1.0) -> None:
    """Wait until no thread of gloo runs in this process; a millisecond, as a rule.

    Where the system does not show threads (it is not Linux), this waits a fixed moment.

    Args:
        limit: seconds to wait at most, since another group's thread may be at work for long.
    """
    if not _TASKS.is_dir():
        time.sleep(_BLIND_SECONDS)
        return
    end, quiet = time.monotonic() + limit, 0
    while quiet < 2 and time.monotonic() < end:
        time.sleep(_LOOK_SECONDS)  # without the lock, which a thread may be waiting for
        quiet = 0 if _runs() else quiet + 1


@functools.cache
def await_gloo_at_exit() -> None:
    """Have the end of Python wait for gloo's threads; for groups that we do not close."""
    atexit.register(await_gloo, _END_SECONDS)


def _runs() -> bool:
    """Whether a thread of gloo computes or wants to, rather than wait."""
    for task in _TASKS.iterdir():
        try:
            stat = (task / "stat").read_bytes()
        except OSError:  # it has ended
            continue
        if _THREAD in stat and not stat.partition(_THREAD)[2].startswith(b" S"):
            return True
    return False
