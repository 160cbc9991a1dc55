"""Whether all ranks mean the same, asked before they do something that would hang otherwise."""

from __future__ import annotations

import torch

from parallelkit.protocols import Plain, ProcessGroup


def same_everywhere(mine: Plain, group: ProcessGroup) -> tuple[bool, Plain]:
    """Compare a plain object with rank 0's. Collective over `group`.

    Returns:
        Whether it is the same on every rank, which all ranks are told alike; and rank 0's.
    """
    first = group.broadcast_object(mine, 0)
    differ = torch.tensor([int(first != mine)], device=group.device)
    return not int(group.all_reduce(differ, "max")), first
