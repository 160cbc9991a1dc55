"""Memory at an address, as a tensor of bytes that owns nothing."""

from __future__ import annotations

import torch

from parallelkit_torch.cuda.errors import IpcError


def bytes_at(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """A tensor of `nbytes` uint8 at `address`; valid for as long as the memory is.

    The device is the one that is to read it. That may be another than the one it lies on, which
    torch's public ways to wrap memory refuse.

    Raises:
        IpcError: this torch cannot wrap memory.
    """
    wrap = getattr(torch._C, "_construct_storage_from_data_pointer", None)
    if wrap is None:
        raise IpcError(
            f"torch {torch.__version__} cannot make a tensor of memory that it did not allocate; "
            "install Triton, which needs none"
        )
    found = torch.empty(0, dtype=torch.uint8, device=device)
    with torch.no_grad():
        return found.set_(wrap(address, device, nbytes), 0, (nbytes,), (1,))
