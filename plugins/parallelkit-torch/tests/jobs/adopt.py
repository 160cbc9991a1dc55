"""Two ranks whose script opened torch's default group itself; under any launcher."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

import parallelkit as pk

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
store = dist.FileStore(sys.argv[1], world)
dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
with pk.init_process_group(device="cpu", timeout=20) as group:
    assert group.native is dist.group.WORLD
    assert group.all_reduce(torch.ones(1)).item() == world
    context = pk.parallel_context(data=-1)
    model = context.parallelize(torch.nn.Linear(1, 1))
    model(torch.ones(1, 1)).sum().backward()
assert dist.is_initialized()
total = torch.ones(1)
dist.all_reduce(total)
assert total.item() == world
dist.destroy_process_group()
