"""What any launcher's ranks do: open, add up, close, and open again."""

from __future__ import annotations

import torch

import parallelkit as pk

for _ in range(2):
    with pk.init_process_group(device="cpu", timeout=30) as group:
        assert group.all_reduce(torch.ones(1)).item() == group.world_size
print(f"rank {group.rank} of {group.world_size} done")
