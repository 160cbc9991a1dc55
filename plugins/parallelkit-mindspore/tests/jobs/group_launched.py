"""What any launcher's ranks do: open, add up, print, close."""

from __future__ import annotations

import sys

import mindspore as ms

import parallelkit as pk

with pk.init_process_group("mindspore", device="cpu", timeout=90) as group:
    assert group.all_reduce(ms.Tensor([1.0])).asnumpy() == group.world_size
    assert ms.ops.AllReduce(group=group.native)(ms.Tensor([1.0])).asnumpy() == group.world_size
    print(f"rank {group.rank} of {group.world_size} done", flush=True)
    if len(sys.argv) > 1 and group.rank == 1:
        raise SystemExit(int(sys.argv[1]))
