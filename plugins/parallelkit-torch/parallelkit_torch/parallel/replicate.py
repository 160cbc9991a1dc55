"""Replicas of a whole model: `DistributedDataParallel`, by mean or by sum."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from parallelkit.protocols import ProcessGroup

#: Arguments of DDP that the context sets, or that are of no use in it.
OURS: Final = frozenset(
    {"module", "device_ids", "output_device", "dim", "process_group", "device_mesh"}
    | {"check_reduction"}
)


def replicate(
    model: nn.Module, group: ProcessGroup, *, reduce: str, options: Mapping[str, Any]
) -> DistributedDataParallel:
    """Wrap `model`, whose gradients combine over `group` by `reduce`. Collective over it."""
    wrapped = DistributedDataParallel(model, process_group=group.native, **options)
    if reduce == "sum":
        wrapped.register_comm_hook(group.native, _sum_gradients)
    return wrapped


def _sum_gradients(
    group: dist.ProcessGroup, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Sum a bucket over ranks; without a hook of its own DDP divides by the world size."""
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    future: torch.futures.Future[Any] = work.get_future()
    return future.then(lambda done: done.value()[0])


_sum_gradients.__annotations__.clear()  # DDP compares them with types, and these are strings
