"""For vllm-ascend's own weight-transfer engine `hccl` as the receiver; off unless imported.

What it does, read in its sources on GitHub (`vllm_ascend/distributed/weight_transfer/` and
`device_communicators/pyhccl.py`, `vllm/distributed/utils.py`): each worker connects to a TCPStore
of torch that rank 0 hosts, takes the root info from it as a *pickled* ctypes structure, joins,
makes an all-reduce of one float32, and then one broadcast for each tensor or packed buffer.

This module has to *send* that pickle. It writes the few opcodes itself, around the root info's
bytes; nothing is ever unpickled here. But whoever reaches the store's port can make the workers
unpickle what they like: use it on a network where everyone is trusted. Needs torch for the store.
Never run on an NPU, nor against vllm-ascend itself.
"""

from __future__ import annotations

import importlib
import socket
import struct
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

from parallelkit.errors import UnsupportedFeatureError
from parallelkit.weights.manifest import TensorSpec
from parallelkit_hccl.communicator import Exchange, HcclCommunicator, check_root_info
from parallelkit_hccl.errors import (
    HcclArgumentError,
    HcclTimeoutError,
    PackingError,
    RootInfoError,
)
from parallelkit_hccl.packing import Packing, misaligned, plan_chunks
from parallelkit_hccl.transfer import HcclSender

#: Where workers look for the first object that rank 0 broadcasts.
STORE_KEY: Final = "broadcast_from/0/0"
#: The structure that their side rebuilds: module and class.
STRUCTURE: Final = ("vllm_ascend.distributed.device_communicators.pyhccl_wrapper", "hcclUniqueId")
#: dtypes that their binding broadcasts as such; others only travel packed.
PEER_DTYPES: Final = frozenset(
    {"int8", "uint8", "int32", "int64", "float16", "float32", "float64", "bfloat16"}
)


def root_info_message(root_info: bytes) -> bytes:
    """The root info as vllm-ascend's workers expect it: protocol 3 of Python's object format.

    In words: call `_ctypes._unpickle` with their structure's class, no attributes, these bytes.

    Raises:
        RootInfoError: the size is not a root info's.
    """
    check_root_info(root_info)
    module, name = STRUCTURE
    return b"".join(
        (
            b"\x80\x03",  # PROTO 3
            b"c_ctypes\n_unpickle\n",  # GLOBAL
            f"c{module}\n{name}\n".encode(),  # GLOBAL
            b"}",  # EMPTY_DICT
            b"B" + struct.pack("<I", len(root_info)) + root_info,  # BINBYTES
            b"\x86",  # TUPLE2: attributes and bytes
            b"\x86",  # TUPLE2: class and the former
            b"R.",  # REDUCE, STOP
        )
    )


def open_store(host: str, port: int, world_size: int, *, timeout: float = 60.0) -> Any:
    """Host torch's TCPStore at one address; blocks until all workers are connected.

    Args:
        host: address of one interface of this host, which workers reach.
        port: as in `init_info`; workers know it beforehand, so it is not 0.

    Raises:
        HcclArgumentError: the port is no port, or cannot be listened at.
        HcclTimeoutError: not all workers connected within `timeout` seconds.
        UnsupportedFeatureError: torch is not installed.
    """
    if isinstance(port, bool) or not isinstance(port, int) or not 0 < port < 65536:
        raise HcclArgumentError(f"port is {port!r}; it is a number from 1 to 65535")
    try:
        distributed: Any = importlib.import_module("torch.distributed")
    except ImportError as error:
        raise UnsupportedFeatureError(
            f"vllm-ascend's workers meet in a TCPStore of torch, which cannot be imported: {error}"
        ) from error
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen()
    except OSError as error:
        listener.close()
        raise HcclArgumentError(
            f"cannot listen at {host}:{port}: {error}; give an address of this host and a free port"
        ) from error
    try:
        return distributed.TCPStore(
            host_name=host,
            port=port,
            world_size=world_size,
            is_master=True,
            timeout=timedelta(seconds=timeout),
            use_libuv=False,  # the other server cannot take over a listener
            master_listen_fd=listener.detach(),  # otherwise it listens at every interface
        )
    except distributed.DistStoreError as error:
        raise HcclTimeoutError(
            f"not all of {world_size - 1} workers connected to {host}:{port} within "
            f"{timeout:.3g} s: {error}. Start init_weight_transfer_engine on the engine first, "
            "in another thread or process, since both block"
        ) from error


def exchange(store: Any) -> Exchange:
    """An exchange for rank 0 over an open store (anything with `set(key, bytes)`)."""

    def give(root_info: bytes | None, seconds: float) -> bytes:
        if root_info is None:
            raise RootInfoError("only rank 0, the trainer, gives its root info to vllm-ascend")
        store.set(STORE_KEY, root_info_message(root_info))
        return root_info

    return give


def init_info(host: str, port: int, world_size: int) -> dict[str, Any]:
    """The argument of the engine's `init_weight_transfer_engine`: workers are ranks from 1."""
    return {
        "master_address": host,
        "master_port": port,
        "rank_offset": 1,
        "world_size": world_size,
    }


def update_info(specs: Sequence[TensorSpec], packing: Packing | None = None) -> dict[str, Any]:
    """The argument of the engine's `update_weights`, for tensors sent in this order.

    Raises:
        PackingError: their side could not take a tensor apart; it would fail in the middle.
    """
    check(specs, packing)
    info: dict[str, Any] = {
        "names": [spec.name for spec in specs],
        "dtype_names": [spec.dtype for spec in specs],
        "shapes": [list(spec.shape) for spec in specs],
        "packed": packing is not None,
    }
    if packing is not None:
        info["packed_buffer_size_bytes"] = packing.buffer_bytes
        info["packed_num_buffers"] = packing.buffers
    return info


def check(specs: Sequence[TensorSpec], packing: Packing | None = None) -> None:
    """Raise `PackingError` for tensors that vllm-ascend's workers cannot receive this way."""
    if packing is None:
        unknown = [f"{s.name!r} ({s.dtype})" for s in specs if s.dtype not in PEER_DTYPES]
        _refuse(unknown, "have a dtype that they cannot broadcast", "Send them packed")
        return
    scalars = [repr(spec.name) for spec in specs if not spec.shape]
    _refuse(scalars, "are scalars, which they cannot view in a buffer", "Send them unpacked")
    chunks = plan_chunks([spec.nbytes for spec in specs], packing.buffer_bytes)
    shifted = [repr(name) for name in misaligned(specs, chunks)]
    _refuse(
        shifted,
        "begin in a buffer where their dtype cannot, after tensors of an odd size",
        "Send the widest dtypes first, or unpacked",
    )


def sender(communicator: HcclCommunicator, packing: Packing | None = None) -> HcclSender:
    """A sender that speaks as vllm-ascend's trainer does: nothing is compared beforehand.

    Call `update_info` with the same tensors and packing, and give it to the engine, first.
    """
    return HcclSender(communicator, packing=packing, compare=False)


def _refuse(names: Sequence[str], why: str, instead: str) -> None:
    if names:
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        raise PackingError(f"vllm-ascend's workers cannot take {shown}: they {why}. {instead}")
