"""What any launcher's ranks do: open, add up, close, and open again."""

from __future__ import annotations

import sys

import torch

import parallelkit as pk

device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
for _ in range(2):
    with pk.init_process_group(device=device, timeout=30) as group:
        total = group.all_reduce(torch.ones(1, device=group.device))
        assert total.item() == group.world_size
print(f"rank {group.rank} of {group.world_size} done")
