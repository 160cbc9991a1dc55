"""What each of the demo's torch processes does first."""

from __future__ import annotations

import torch


def begin_process() -> None:
    """Use one thread and deterministic algorithms only. Call it before anything is computed.

    One thread each keeps three processes on two cores from disturbing each other, and makes the
    order of every sum the same in all of them.
    """
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    torch.use_deterministic_algorithms(True)
