"""Two ranks: MindSpore's group, opened by parallelkit, beside a gloo group in one process."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

import parallelkit as pk

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
with pk.init_process_group("mindspore", device="cpu", timeout=90) as group:
    import mindspore as ms

    dist.init_process_group(
        "gloo", store=dist.FileStore(sys.argv[1], world), rank=rank, world_size=world
    )
    for _ in range(2):
        total = torch.ones(2)
        dist.all_reduce(total)
        assert total.tolist() == [world] * 2
        assert group.all_reduce(ms.Tensor([1.0])).asnumpy() == world
        assert ms.ops.AllReduce(group=group.native)(ms.Tensor([1.0])).asnumpy() == world
    dist.destroy_process_group()
    group.barrier()
