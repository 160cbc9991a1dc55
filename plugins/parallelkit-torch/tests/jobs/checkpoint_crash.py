"""Two ranks, of which one ends or hangs in mid-save while it replaces a checkpoint.

Arguments: a folder, which rank, and "ends" or "hangs".
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from parallelkit_torch.parallel import checkpoint, checkpoint_store
from torch import nn

import parallelkit as pk
from parallelkit.errors import CollectiveError, CollectiveTimeoutError

path, victim = Path(sys.argv[1]) / "crash", int(sys.argv[2])
group: Any = pk.init_process_group(device="cpu", timeout=30)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
checkpoint.save(path, model, group=group, plan=pk.plan(2), extra={"step": 1})
with torch.no_grad():
    for parameter in model.parameters():
        parameter.add_(1.0)


def stop(*_: object) -> None:
    """End, at once or when the other rank has given up and tidied."""
    deadline = time.monotonic() + 60.0
    while sys.argv[3] == "hangs" and any(path.parent.glob(".crash.saving-*")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os._exit(7)


if group.rank == victim:
    checkpoint_store._Writer._read_back = stop  # type: ignore[assignment]
expected = CollectiveTimeoutError if sys.argv[3] == "hangs" else CollectiveError
options: dict[str, Any] = {"extra": {"step": 2}, "overwrite": True, "timeout": 5.0}
try:
    checkpoint.save(path, model, group=group, plan=pk.plan(2), **options)
except expected as error:
    print("told:", error)
else:
    raise AssertionError("a rank stopped and the save did not fail")
group.close()
