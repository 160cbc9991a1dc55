"""Two ranks, of which one ends in mid-save while it replaces a checkpoint.

Arguments: a folder, and which rank ends.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from parallelkit_torch.parallel import checkpoint, checkpoint_store
from torch import nn

import parallelkit as pk
from parallelkit.errors import CollectiveError

path, victim = Path(sys.argv[1]) / "crash", int(sys.argv[2])
group: Any = pk.init_process_group(device="cpu", timeout=30)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
checkpoint.save(path, model, group=group, plan=pk.plan(2), extra={"step": 1})
with torch.no_grad():
    for parameter in model.parameters():
        parameter.add_(1.0)
if group.rank == victim:
    checkpoint_store._Writer._read_back = lambda *_: os._exit(7)  # type: ignore[method-assign]
try:
    checkpoint.save(path, model, group=group, plan=pk.plan(2), extra={"step": 2}, overwrite=True)
except CollectiveError as error:
    print("told:", error)
else:
    raise AssertionError("a rank ended and the save did not fail")
group.close()
