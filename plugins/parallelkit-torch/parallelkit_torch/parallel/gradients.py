"""Gradients over the axes of a plan: when they are reduced, and their norm over every shard."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from parallelkit.errors import GradientError, NonFiniteGradientError, UnsupportedFeatureError
from parallelkit.protocols import ProcessGroup


@contextlib.contextmanager
def synchronised(
    units: Sequence[Any], replicas: DistributedDataParallel | None, *, sync: bool
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


def _set_sync(units: Sequence[Any], sync: bool) -> None:
    for unit in units:
        unit.set_requires_gradient_sync(sync, recurse=False)


def apply(optimizer: torch.optim.Optimizer) -> None:
    """Let the optimiser use the gradients, and forget them.

    Raises:
        GradientError: none of its parameters has one.
    """
    trained = [p for g in optimizer.param_groups for p in g["params"] if p.requires_grad]
    if trained and all(p.grad is None for p in trained):
        raise GradientError(
            "apply_gradients found no gradient in any parameter of the optimiser; call train_step "
            "first, lastly with sync=True, and build the optimiser after parallelize"
        )
    optimizer.step()
    optimizer.zero_grad()


class _Part(NamedTuple):
    """This rank's part of a gradient, and the axes over which the gradient is divided."""

    local: torch.Tensor
    axes: frozenset[str]


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    *,
    norm_type: float,
    error_if_nonfinite: bool,
    group: ProcessGroup,
    degrees: Mapping[str, int],
) -> torch.Tensor:
    """Scale gradients so that the norm of all of them, over every shard and stage, is at most so.

    Collective over `group`: one reduction of one number, however many tensors there are.

    Args:
        parameters: of this rank's part of the model; those without a gradient are skipped.
        max_norm: largest norm allowed; infinity scales nothing and only measures.
        norm_type: p of the p-norm, or infinity.
        error_if_nonfinite: raise instead of scaling by a norm that is no finite number.
        group: over the axes of `degrees`.
        degrees: the axes that may divide a gradient: pipeline, data_shard, tensor.

    Returns:
        The norm before scaling, a scalar on this rank's device, the same on every rank.

    Raises:
        NonFiniteGradientError: on every rank alike; nothing was scaled.
        UnsupportedFeatureError: a gradient was not reduced over the tensor axis.
    """
    parts = [_part(p.grad) for p in parameters if p.grad is not None]
    total = _total(parts, norm_type, group, degrees)
    if error_if_nonfinite and not math.isfinite(total):
        raise NonFiniteGradientError(
            f"the norm of the gradients is {float(total)}, and nothing was scaled; with "
            "error_if_nonfinite=False they are scaled all the same"
        )
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for (device, _), tensors in _alike([part.local for part in parts]).items():
        torch._foreach_mul_(tensors, factor.to(device))
    return total


def _part(gradient: torch.Tensor) -> _Part:
    if not hasattr(gradient, "placements"):  # no DTensor
        return _Part(gradient, frozenset())
    spread: Any = gradient
    if any(placement.is_partial() for placement in spread.placements):
        raise UnsupportedFeatureError(
            f"a gradient is a sum that was not made yet ({spread.placements}); reduce it first"
        )
    # What is neither is divided: some of torch's kinds of shards do not call themselves one.
    names = spread.device_mesh.mesh_dim_names
    axes = {name for name, p in zip(names, spread.placements, strict=True) if not p.is_replicate()}
    return _Part(spread.to_local(), frozenset(axes))


def _total(
    parts: Sequence[_Part], norm_type: float, group: ProcessGroup, degrees: Mapping[str, int]
) -> torch.Tensor:
    """The norm over all ranks. What several ranks hold alike counts as a fraction on each."""
    device = torch.device(group.device)
    whole = torch.zeros((), dtype=torch.float32, device=device)
    for axes in dict.fromkeys(part.axes for part in parts):
        tensors = [part.local for part in parts if part.axes == axes and part.local.numel()]
        norms = [
            norm.to(device=device, dtype=torch.float32)
            for alike in _alike(tensors).values()
            for norm in torch._foreach_norm(alike, norm_type)
        ]
        if not norms:
            continue
        norm = torch.linalg.vector_norm(torch.stack(norms), norm_type)
        if math.isinf(norm_type):
            whole = torch.maximum(whole, norm)
        else:
            holders = math.prod(d for axis, d in degrees.items() if axis not in axes | {"pipeline"})
            whole = whole + norm**norm_type / holders
    if math.isinf(norm_type):
        largest: torch.Tensor = group.all_reduce(whole, "max")
        return largest
    powers: torch.Tensor = group.all_reduce(whole)
    root: torch.Tensor = powers ** (1.0 / norm_type)
    return root


def _alike(
    tensors: Iterable[torch.Tensor],
) -> dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]:
    """Tensors that one call can take together."""
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return groups
