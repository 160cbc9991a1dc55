"""Weights over HCCL, by its C interface alone: neither a framework nor NumPy is needed.

Contract-tested against a library of the same interface over shared memory; never run on an NPU.
For vllm-ascend's own receivers see `parallelkit_hccl.compat`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parallelkit_hccl.communicator import Exchange, HcclCommunicator, given
    from parallelkit_hccl.errors import (
        HcclArgumentError,
        HcclError,
        HcclStateError,
        HcclTimeoutError,
        HcclUnavailableError,
        PackingError,
        RootInfoError,
    )
    from parallelkit_hccl.library import Library
    from parallelkit_hccl.packing import Packing
    from parallelkit_hccl.rendezvous import RootInfoServer, RootInfoTicket
    from parallelkit_hccl.transfer import (
        DeviceTensor,
        HcclReceiver,
        HcclReport,
        HcclSender,
        located,
    )

# Resolved on first use: the plugin is loaded without sockets.
_HOMES = {
    "DeviceTensor": "transfer",
    "Exchange": "communicator",
    "HcclArgumentError": "errors",
    "HcclCommunicator": "communicator",
    "HcclError": "errors",
    "HcclReceiver": "transfer",
    "HcclReport": "transfer",
    "HcclSender": "transfer",
    "HcclStateError": "errors",
    "HcclTimeoutError": "errors",
    "HcclUnavailableError": "errors",
    "Library": "library",
    "Packing": "packing",
    "PackingError": "errors",
    "RootInfoError": "errors",
    "RootInfoServer": "rendezvous",
    "RootInfoTicket": "rendezvous",
    "given": "communicator",
    "located": "transfer",
}

__all__ = [
    "DeviceTensor",
    "Exchange",
    "HcclArgumentError",
    "HcclCommunicator",
    "HcclError",
    "HcclReceiver",
    "HcclReport",
    "HcclSender",
    "HcclStateError",
    "HcclTimeoutError",
    "HcclUnavailableError",
    "Library",
    "Packing",
    "PackingError",
    "RootInfoError",
    "RootInfoServer",
    "RootInfoTicket",
    "given",
    "located",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
