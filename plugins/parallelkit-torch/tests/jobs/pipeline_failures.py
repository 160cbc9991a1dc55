"""Two ranks of a pipeline of which one fails in the middle. `argv[1]` is the case."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import torch
from models import mlp
from parallelkit_torch.parallel import pipeline
from torch import nn

import parallelkit as pk
from parallelkit.errors import CollectiveError, CollectiveTimeoutError

case = sys.argv[1]
group: Any = pk.init_process_group(device="cpu", timeout=3)
rank = group.rank
calls = 0


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Fails on the last stage, at the second batch's second microbatch."""
    global calls
    calls += 1
    if calls == 6:
        if case == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if case == "stopped":
            time.sleep(7)
        if case == "raises":
            raise ValueError("no such class")
    return nn.functional.cross_entropy(output, target)


model = pipeline.cut_for(mlp(), pipeline.assign(mlp(), 2), group=group)
x, y = torch.ones(8, 6), torch.zeros(8, dtype=torch.int64)
pipeline.step(model, x, y, loss=loss, microbatches=4)
began = time.monotonic()
try:
    pipeline.step(model, x, y, loss=loss, microbatches=4)
except Exception as error:
    seconds, text = time.monotonic() - began, str(error)
    print(f"rank {rank}: {type(error).__name__} after {seconds:.1f} s: {text}")
    if rank == 1 and case == "raises":
        assert isinstance(error, ValueError)
        assert "in the loss, on rank 1" in "".join(error.__notes__)
        time.sleep(7)  # not gone, but late: the other rank has to give up by itself
    elif rank == 0:
        assert isinstance(error, CollectiveError)
        assert "a batch of the pipeline (rank k has stage k of 2)" in text
        assert isinstance(error, CollectiveTimeoutError) == (case != "killed"), text
        assert "rank(s) 1 " in text, text
        if case == "raises":
            time.sleep(4)  # rank 0 has the store that the other one asks
    try:
        pipeline.step(model, x, y, loss=loss, microbatches=4)
    except CollectiveError as again:
        assert "earlier" in str(again) or "gone" in str(again) or rank == 1, again
        sys.exit(0)
    raise AssertionError("a broken pipeline ran") from error
raise AssertionError("no error")
