"""Before a process ends: let gloo's threads drop the tensors that they moved.

A thread of gloo that finished a collective may be the last to hold its tensors, and then needs
Python's lock to free them. If Python is ending by then, it stops that thread on the spot, and C++
ends the process: "terminate called without an active exception", exit code -6, after all work was
done. torch 2.13 alone does so too: seldom on a loaded machine, and in a third of all runs of two
ranks whose lock changes hands rarely (`sys.setswitchinterval(1000)`).
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

_THREAD: Final = b"(pt_gloo_runloop)"
_TASKS: Final = Path("/proc/self/task")
_LOOK_SECONDS: Final = 0.0005
_BLIND_SECONDS: Final = 0.01


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
