"""How far two results are apart, tensor by tensor."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils import _pytree as pytree

from parallelkit.errors import ExecutionModeError
from parallelkit.graphs import Difference


def compare(expected: Any, actual: Any) -> Difference:
    """Compare two trees of the same shape; numbers count as tensors, other leaves are left out.

    An element that is the same infinity, or not a number, in both is no difference.

    Raises:
        ExecutionModeError: the trees, or two tensors' shapes or dtypes, are not alike.
    """
    before, before_shape = pytree.tree_flatten_with_path(expected)
    after, after_shape = pytree.tree_flatten_with_path(actual)
    if before_shape != after_shape:
        raise ExecutionModeError(
            f"graph mode gives another structure than eager: {after_shape} and not {before_shape}"
        )
    tensors, worst, max_abs, max_rel = 0, "", 0.0, 0.0
    for (path, one), (_, other) in zip(before, after, strict=True):
        if not _is_numeric(one):
            continue
        tensors += 1
        name = _name(path)
        absolute, relative = _apart(name, torch.as_tensor(one), torch.as_tensor(other))
        if absolute > max_abs:
            max_abs, worst = absolute, name
        max_rel = max(max_rel, relative)
    return Difference(tensors=tensors, max_abs=max_abs, max_rel=max_rel, worst=worst)


def _is_numeric(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor | int | float | complex)


def _name(path: Any) -> str:
    if len(path) == 1 and isinstance(getattr(path[0], "key", None), str):
        return str(path[0].key)
    return str(pytree.keystr(path)) or "the output"


def _apart(name: str, one: torch.Tensor, other: torch.Tensor) -> tuple[float, float]:
    """Largest difference of two tensors, this rank's part of each; and over the largest element."""
    if one.shape != other.shape or one.dtype != other.dtype:
        raise ExecutionModeError(
            f"graph mode gives {name} as {other.dtype} {list(other.shape)}, and eager as "
            f"{one.dtype} {list(one.shape)}"
        )
    one, other = _local(one), _local(other)
    if one.numel() == 0:
        return 0.0, 0.0
    wide = torch.complex128 if one.is_complex() else torch.float64
    whole = not (one.is_floating_point() or one.is_complex())
    same = (one == other).to("cpu") if whole else None  # not all 64 bits fit into a float
    one, other = one.to("cpu", wide), other.to("cpu", wide)
    if same is None:
        same = (one == other) | (one.isnan() & other.isnan())
    gap = torch.where(same, 0.0, (one - other).abs())
    gap = torch.nan_to_num(gap, nan=math.inf, posinf=math.inf)
    largest = float(gap.max())
    size = float(torch.nan_to_num(one.abs(), nan=0.0, posinf=0.0).max())
    return largest, (largest / size if size else math.inf) if largest else 0.0


def _local(tensor: torch.Tensor) -> torch.Tensor:
    local = getattr(tensor, "to_local", None)
    tensor = local() if local is not None else tensor
    return tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
