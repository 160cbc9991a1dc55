"""Replicas of a whole model: `DistributedDataParallel`, by mean or by sum."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn
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
    if reduce == "sum":
        # DDP averages what is in `.grad`, earlier batches included: only what is new may be scaled.
        scale = _Times(group.world_size)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_hook(scale)  # type: ignore[no-untyped-call]
    return DistributedDataParallel(model, process_group=group.native, **options)


class _Times:
    """Multiplies a gradient; a class, so that a model with it can be copied."""

    def __init__(self, factor: int) -> None:
        self._factor = factor

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * self._factor
