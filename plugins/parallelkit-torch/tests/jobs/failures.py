"""What a rank sees when others are late, killed, stopped, or never come. `argv[1]` is the case."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch

import parallelkit as pk
from parallelkit.errors import CollectiveError, CollectiveTimeoutError, RendezvousTimeoutError

case = sys.argv[1]
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
last = world - 1
me = os.getpid()

if case == "never":
    if rank == last:
        time.sleep(5)
        sys.exit(0)
    began = time.monotonic()
    try:
        pk.init_process_group(device="cpu", timeout=3)
    except RendezvousTimeoutError as error:
        assert error.missing == (last,), error.missing
        assert time.monotonic() - began < 6
        sys.exit(0)
    raise AssertionError("no error")

group = pk.init_process_group(device="cpu", timeout=20)
group.barrier()
began = time.monotonic()
try:
    if case == "late":
        if rank == last:
            time.sleep(2.2)
        group.barrier(timeout=1.5)
    elif case == "object":
        if rank == last:
            time.sleep(2.2)
        group.broadcast_object("x", timeout=1.5)
    elif case == "killed":
        if rank == int(sys.argv[2]):
            os.kill(me, signal.SIGKILL)
        group.all_reduce(torch.ones(4))
    elif case == "stopped":
        if rank == 0:  # the host of the store: nothing may wait for it without end
            helper = os.fork()
            if helper == 0:
                time.sleep(6)
                os.kill(me, signal.SIGCONT)
                os._exit(0)
            os.kill(me, signal.SIGSTOP)
        group.barrier(timeout=1.5)
    raise SystemExit("no error")
except CollectiveError as error:
    seconds = time.monotonic() - began
    print(f"{type(error).__name__} after {seconds:.1f} s: {error}")
    if case in ("late", "object") and rank != last:
        assert isinstance(error, CollectiveTimeoutError)
        assert error.missing == (last,), error
        assert 1.4 < seconds < 4
    elif case in ("late", "object"):
        assert "too late" in str(error) or "timed out" in str(error).lower(), error
    elif case == "killed":
        assert not isinstance(error, CollectiveTimeoutError)
        gone = int(sys.argv[2])
        assert (f"rank(s) {gone} are gone" in str(error)) or (
            gone == 0 and "rank 0" in str(error)
        ), error
        assert seconds < 5
    elif case == "stopped" and rank:
        assert isinstance(error, CollectiveTimeoutError), error
        assert seconds < 5
try:
    group.barrier()
except CollectiveError as error:
    assert "broken group" in str(error)
else:
    raise AssertionError("a broken group goes on")
