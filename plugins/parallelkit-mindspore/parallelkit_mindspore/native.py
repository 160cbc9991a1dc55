"""Every call into MindSpore's communication: plain functions, so that a test can put others here.

Nothing is checked or decided here. Of the three backends only MCCL, on the CPU, was ever run; the
calls for HCCL and NCCL are what MindSpore documents.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

#: MindSpore's name of a device type of ours, and the backend that serves it.
TARGETS: Final = {"cpu": "CPU", "cuda": "GPU", "npu": "Ascend"}
BACKENDS: Final = {"cpu": "mccl", "cuda": "nccl", "npu": "hccl"}
#: MindSpore's names of our reductions; a mean is a sum that we divide.
OPS: Final = {"sum": "sum", "mean": "sum", "max": "max", "min": "min", "product": "prod"}


def set_device(kind: str, index: int) -> None:
    """Choose the device of this process; it cannot be changed afterwards.

    Raises:
        RuntimeError, ValueError: MindSpore has no such device, or uses another already.
    """
    ms = importlib.import_module("mindspore")
    if kind == "cpu":
        ms.set_device("CPU")
    else:
        ms.set_device(TARGETS[kind], index)


def device_target() -> str:
    """MindSpore's name of the device type in use."""
    return str(importlib.import_module("mindspore").get_context("device_target"))


def open_store(host: str, port: int, world_size: int, master: bool, timeout: float) -> Any:
    """Open MindSpore's store, on rank 0 as `master`, which listens; `host` is an IPv4 address.

    Raises:
        RuntimeError: the port is taken, or nobody answers in time.
    """
    return _distributed().TCPStore(
        host,
        port,
        world_size=world_size,
        is_master=master,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
    )


def close_store(store: Any) -> None:
    """Let go of a store's connection while Python runs, not at some point of the process's end."""
    if hasattr(store, "instance"):
        del store.instance


def init(backend: str, store: Any, rank: int, world_size: int, timeout: float) -> None:
    """Open the default group over a store; no scheduler process is needed. Collective.

    Raises:
        RuntimeError: a rank did not come in time.
    """
    _management()._init_with_store(
        backend=backend,
        timeout=timedelta(seconds=timeout),
        world_size=world_size,
        rank=rank,
        store=store,
    )


def init_cluster(backend: str) -> None:
    """Open the default group as `MS_ROLE` and its companions say, with a scheduler. Collective.

    Raises:
        RuntimeError: the scheduler or a worker did not come in time.
    """
    _management().init(backend)


def is_initialized() -> bool:
    """Whether a default group is open, whoever opened it."""
    return bool(_distributed().is_initialized())


def world_group() -> str:
    """Name of the default group."""
    return str(_management().GlobalComm.WORLD_COMM_GROUP)


def backend() -> str:
    """Backend of the default group."""
    return str(_management().GlobalComm.BACKEND)


def rank() -> int:
    """This process's rank in the default group."""
    return int(_management().get_rank())


def world_size() -> int:
    """Ranks of the default group."""
    return int(_management().get_group_size())


def name_default_group(rank: int, world_size: int) -> None:
    """Tell MindSpore's functions with a frozen default group who is in it.

    They were imported with the name of HCCL's default group, whatever the backend, and would not
    find it on the CPU.
    """
    module = importlib.import_module("mindspore.mint.distributed.distributed")
    frozen = importlib.import_module("mindspore.communication").HCCL_WORLD_COMM_GROUP
    module._GROUP_RANK_CACHE[frozen] = rank
    module._GROUP_SIZE_CACHE[frozen] = world_size


def create_group(name: str, ranks: Sequence[int]) -> str:
    """Make a group of world ranks, in rising order; on its members only.

    Raises:
        RuntimeError: a member is missing.
    """
    _management().create_group(name, list(ranks))
    return name


def destroy_group(name: str) -> None:
    """Free a group that `create_group` made."""
    _management().destroy_group(name)


def destroy() -> None:
    """Close the default group. A collective after it ends the process."""
    _distributed().destroy_process_group()


# --- collectives, on tensors of this rank's device; in place where they return nothing


def all_reduce(x: Any, op: str, group: str) -> Any:
    """Combine `x` elementwise; returns the result, which may be `x` itself."""
    if backend() == "nccl":  # whose kernels are those of the classic operators
        return _operator("AllReduce", op=OPS[op], group=group)(x)
    _distributed().all_reduce(x, OPS[op], group=group)
    return x


def broadcast(x: Any, src: int, group: str) -> Any:
    """Give all the `x` of `src`, a world rank; returns the result, which may be `x` itself."""
    if backend() == "nccl":
        return _operator("Broadcast", src, group=group)((x,))[0]
    _distributed().broadcast(x, src, group=group)
    return x


def all_gather(x: Any, world_size: int, group: str) -> list[Any]:
    """Return everybody's `x`, by rank."""
    ms = importlib.import_module("mindspore")
    if backend() == "nccl":
        return list(ms.ops.split(_operator("AllGather", group=group)(x), x.shape[0]))
    out = [ms.mint.empty_like(x) for _ in range(world_size)]
    _distributed().all_gather(out, x, group=group)
    return out


def reduce_scatter(x: Any, op: str, world_size: int, group: str) -> Any:
    """Combine `x` and return this rank's slice of dim 0."""
    ms = importlib.import_module("mindspore")
    if backend() == "nccl":
        return _operator("ReduceScatter", op=OPS[op], group=group)(x)
    out = ms.mint.empty((x.shape[0] // world_size, *x.shape[1:]), dtype=x.dtype)
    _distributed().reduce_scatter_tensor(out, x, OPS[op], group=group)
    return out


def barrier(group: str) -> None:
    """Wait for the others."""
    if backend() == "nccl":
        ms = importlib.import_module("mindspore")
        _operator("AllReduce", group=group)(ms.mint.zeros(1))
    else:
        _distributed().barrier(group=group)


def _operator(name: str, *args: Any, **options: Any) -> Any:
    return getattr(importlib.import_module("mindspore.ops"), name)(*args, **options)


def _distributed() -> Any:
    return importlib.import_module("mindspore.mint.distributed")


def _management() -> Any:
    return importlib.import_module("mindspore.communication.management")
