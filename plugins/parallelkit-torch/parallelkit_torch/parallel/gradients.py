"""Gradients over the axes of a plan: when they are reduced, their norm, and what weighs what."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from parallelkit.errors import CollectiveError
from parallelkit.protocols import ProcessGroup


@contextlib.contextmanager
def synchronised(
    units: Sequence[FSDPModule], replicas: DistributedDataParallel | None, *, sync: bool
) -> Iterator[None]:
    """Let backward passes inside reduce gradients over the data axes, or only add them up here.

    Args:
        units: of FSDP2, whose gradients stay whole on each rank until they are reduced.
        replicas: of DDP.
        sync: whether to reduce.
    """
    with contextlib.ExitStack() as stack:
        if replicas is not None and not sync:
            stack.enter_context(replicas.no_sync())
        if units and not sync:
            _set_sync(units, False)
            stack.callback(_set_sync, units, True)
        yield


def _set_sync(units: Sequence[FSDPModule], sync: bool) -> None:
    for unit in units:
        unit.set_requires_gradient_sync(sync, recurse=False)


def clip_grad_norm_(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    *,
    norm_type: float,
    error_if_nonfinite: bool,
    stages: ProcessGroup | None,
) -> torch.Tensor:
    """Scale gradients so that the norm of all of them, over every shard and stage, is at most so.

    Collective over the meshes of the parameters, and over `stages`.

    Args:
        parameters: of this rank's part of the model; those without a gradient are skipped.
        max_norm: largest norm allowed; infinity scales nothing and only measures.
        norm_type: p of the p-norm, or infinity.
        error_if_nonfinite: raise instead of scaling by a norm that is no finite number.
        stages: the group over the pipeline axis, where there is one.

    Returns:
        The norm before scaling, a scalar on this rank's device, the same on every rank.
    """
    with_gradient = [p for p in parameters if p.grad is not None]
    total = _local_norm(with_gradient, norm_type)
    if stages is not None:
        total = _over_stages(total, norm_type, stages)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise CollectiveError(
            f"the norm of the gradients is {float(total)}; with error_if_nonfinite=False they "
            "are scaled all the same"
        )
    # Not by torch in one call: it cannot scale tensors of different meshes together.
    for group in _by_mesh(with_gradient).values():
        torch.nn.utils.clip_grads_with_norm_(group, max_norm, _like(total, group[0]))
    return total


def _local_norm(parameters: Sequence[nn.Parameter], norm_type: float) -> torch.Tensor:
    """Norm over every shard of the given parameters: the same on all ranks of one stage."""
    norms = []
    for group in _by_mesh(parameters).values():
        gradients = [p.grad for p in group if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients, norm_type)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    if not norms:
        return torch.zeros(())
    device = norms[0].device
    whole: torch.Tensor = torch.linalg.vector_norm(
        torch.stack([norm.to(device) for norm in norms]), norm_type
    )
    return whole


def _over_stages(norm: torch.Tensor, norm_type: float, stages: ProcessGroup) -> torch.Tensor:
    device = torch.device(stages.device)
    norm = norm.to(device=device, dtype=torch.float32)
    if math.isinf(norm_type):
        largest: torch.Tensor = stages.all_reduce(norm, "max")
        return largest
    powers: torch.Tensor = stages.all_reduce(norm**norm_type)
    root: torch.Tensor = powers ** (1.0 / norm_type)
    return root


def _by_mesh(
    parameters: Iterable[nn.Parameter],
) -> dict[DeviceMesh | torch.device, list[nn.Parameter]]:
    groups: dict[DeviceMesh | torch.device, list[nn.Parameter]] = {}
    for parameter in parameters:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else parameter.device
        groups.setdefault(mesh, []).append(parameter)
    return groups


def _like(total: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    """`total` as something that gradients like this one's can be multiplied with."""
    return total.to(parameter.device)
