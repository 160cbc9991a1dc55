"""What a rank sees when others are late, killed, stopped, or never come. `argv[1]` is the case."""

from __future__ import annotations

import os
import signal
import sys
import time

import mindspore as ms
import numpy as np

import parallelkit as pk
from parallelkit.errors import CollectiveError, CollectiveTimeoutError, RendezvousTimeoutError

case = sys.argv[1]
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
last = world - 1
me = os.getpid()


def stop(seconds: float) -> None:
    """Stop this process, and let a child wake it."""
    helper = os.posix_spawn(
        sys.executable,
        [sys.executable, "-c", f"import os, time; time.sleep({seconds}); os.kill({me}, 18)"],
        os.environ,
    )
    os.kill(me, signal.SIGSTOP)
    os.waitpid(helper, 0)


if case == "never":
    if rank == last:
        sys.exit(0)
    try:
        pk.init_process_group("mindspore", device="cpu", timeout=5)
    except RendezvousTimeoutError as error:
        assert error.missing == (last,), error.missing
        sys.exit(0)
    raise AssertionError("no error")

group = pk.init_process_group("mindspore", device="cpu", timeout=90)
x = ms.Tensor(np.full(4, 1.0 + rank, np.float32))
assert group.all_reduce(x).asnumpy().tolist() == [world * (world + 1) / 2] * 4
group.barrier()
group.inner._star.timeout = 4.0  # type: ignore[attr-defined]  # what follows is soon over
if case == "killed" and rank == int(sys.argv[2]):
    os.kill(me, signal.SIGKILL)
if case == "stopped" and rank == int(sys.argv[2]):
    stop(12)
began = time.monotonic()
try:
    y = group.all_reduce(x)
except CollectiveError as error:
    print(f"{type(error).__name__} after {time.monotonic() - began:.1f} s: {error}")
    who = int(sys.argv[2])
    if case == "killed":
        assert not isinstance(error, CollectiveTimeoutError)
        assert f"rank(s) {who} are gone" in str(error), error
    elif rank == who:
        assert "this rank came too late" in str(error), error
    else:
        assert isinstance(error, CollectiveTimeoutError), error
        assert error.missing == (who,), error
else:
    raise SystemExit(f"no error, but {y}")
try:
    group.barrier()
except CollectiveError as error:
    assert "broken group" in str(error)
else:
    raise AssertionError("a broken group goes on")
