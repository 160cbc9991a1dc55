"""What the transport stands on: the driver, and which of torch's devices have memory to share."""

from __future__ import annotations

from functools import cache
from typing import Protocol

import torch

from parallelkit_torch.cuda.driver import Driver
from parallelkit_torch.cuda.ipc import Memory


class Backing(Memory, Protocol):
    """What of `driver.Driver` the transport needs."""

    def count(self) -> int: ...
    def peers(self, device: int, other: int) -> bool: ...


@cache
def driver() -> Backing:
    """The driver, loaded once.

    Raises:
        CudaUnavailableError: there is none.
    """
    return Driver.load()


def shares(device: torch.device) -> bool:
    """Whether memory of such a device can be shared between processes at all."""
    return device.type == "cuda" and torch.version.cuda is not None


def index_of(device: torch.device) -> int:
    """The device's number, as the driver counts in this process."""
    return torch.cuda.current_device() if device.index is None else device.index
