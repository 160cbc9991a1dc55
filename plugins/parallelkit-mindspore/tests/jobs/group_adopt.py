"""Two ranks whose script opened MindSpore's group itself; or beside a group of torch's."""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import mindspore as ms
import mindspore.mint.distributed as dist
from mindspore.communication import get_rank
from mindspore.communication.management import _init_with_store

import parallelkit as pk
from parallelkit.errors import AlreadyInitializedError

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
limit = timedelta(seconds=90)
ms.set_device("CPU")
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), world, rank == 0, limit, False)
_init_with_store("mccl", limit, world, rank, store)
try:
    pk.init_process_group("mindspore", device="cpu", rank=1 - rank, world_size=world, timeout=60)
except AlreadyInitializedError as error:
    assert f"rank {rank} of {world}" in str(error), error
    assert f"asked for rank {1 - rank} of {world}" in str(error), error
else:
    raise AssertionError("another rank was accepted")
for _ in range(2):  # it is the user's, so it may be adopted again
    with pk.init_process_group("mindspore", device="cpu", timeout=90) as group:
        assert not group.ours
        assert group.native == "mccl_world_group"
        assert group.all_reduce(ms.Tensor([1.0])).asnumpy() == world
        half = group.subgroup([rank]) if rank == 0 else group.subgroup([0])
        assert (half is None) == (rank == 1)
assert dist.is_initialized()
assert get_rank() == rank
total = ms.Tensor([1.0])
dist.all_reduce(total)
assert total.asnumpy() == world
dist.barrier()
