"""The device of a rank, checked and claimed before any backend starts."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from parallelkit.errors import DeviceError, UnsupportedFeatureError
from parallelkit.specs import GroupSpec


def claim(spec: GroupSpec) -> torch.device:
    """Make the rank's device the current one and return it, with its index.

    This comes before the backend: one that starts first binds every rank to device 0.

    Raises:
        DeviceError: there is no such device here, or none for this local rank.
    """
    try:
        device = torch.device(spec.device)
    except RuntimeError as error:
        raise DeviceError(f"device {spec.device!r} is unknown to torch: {error}") from error
    if device.type == "cpu":
        return torch.device("cpu")
    module: Any = getattr(torch, device.type, None)
    count = module.device_count() if module is not None and module.is_available() else 0
    if count == 0:
        raise DeviceError(
            f"device {spec.device!r} was asked for, and torch {torch.__version__} finds no "
            f"{device.type} device here; use device='cpu', or install a build of torch for it"
        )
    index = spec.local_rank if device.index is None else device.index
    if index >= count:
        raise DeviceError(
            f"local rank {spec.local_rank} needs {device.type}:{index}, and this host shows "
            f"{count} {device.type} device(s); start at most {count} ranks on it, or check "
            "LOCAL_RANK and CUDA_VISIBLE_DEVICES"
        )
    device = torch.device(device.type, index)
    module.set_device(device)
    return device


def check_backend(backend: str, device: torch.device) -> None:
    """Raise `UnsupportedFeatureError`, listing what there is, unless `backend` serves `device`."""
    name = backend.lower()
    known = [n for n in dist.Backend.backend_list if n != "undefined"]
    usable = [n for n in known if dist.is_backend_available(n) and _serves(n, device.type)]
    if name not in usable:
        raise UnsupportedFeatureError(
            f"backend {backend!r} cannot run on {device.type} with torch {torch.__version__}; "
            f"here there is {', '.join(usable) or 'none'}"
        )


def _serves(backend: str, device_type: str) -> bool:
    return device_type in dist.Backend.backend_capability.get(backend, [])
