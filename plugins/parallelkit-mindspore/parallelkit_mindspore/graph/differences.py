"""How far two results are apart, tensor by tensor."""

from __future__ import annotations

import math
import re
from typing import Any

import mindspore as ms
import numpy as np

from parallelkit.errors import ExecutionModeError
from parallelkit.graphs import Difference
from parallelkit_mindspore.graph.tree import leaves


def compare(expected: Any, actual: Any) -> Difference:
    """Compare two trees of the same shape; numbers count as tensors, other leaves are left out.

    An element that is the same infinity, or not a number, in both is no difference. A list in
    place of a tuple is none either: graphs return tuples.

    Raises:
        ExecutionModeError: the trees, or two tensors' shapes or dtypes, are not alike.
    """
    before, after = dict(leaves(expected)), dict(leaves(actual))
    if list(before) != list(after):
        raise ExecutionModeError(
            f"graph mode gives another structure than eager: {list(after)} and not {list(before)}"
        )
    tensors, worst, max_abs, max_rel = 0, "", 0.0, 0.0
    for path, one in before.items():
        if not isinstance(one, ms.Tensor | int | float | complex):
            continue
        tensors += 1
        absolute, relative = _apart(_name(path), one, after[path])
        if absolute > max_abs:
            max_abs, worst = absolute, _name(path)
        max_rel = max(max_rel, relative)
    return Difference(tensors=tensors, max_abs=max_abs, max_rel=max_rel, worst=worst)


def _name(path: str) -> str:
    simple = re.fullmatch(r'\["([^"\]]*)"\]', path)
    return simple[1] if simple else path or "the output"


def _apart(name: str, one: Any, other: Any) -> tuple[float, float]:
    """Largest difference of two tensors; and over the largest element."""
    here, there = _shown(one), _shown(other)
    if here != there:
        raise ExecutionModeError(f"graph mode gives {name} as {there}, and eager as {here}")
    first, second = _array(one), _array(other)
    if first.size == 0:
        return 0.0, 0.0
    same = (first == second) | ((first != first) & (second != second))  # compared as they are
    wide = np.complex128 if np.iscomplexobj(first) else np.float64
    first, second = first.astype(wide), second.astype(wide)
    with np.errstate(invalid="ignore", over="ignore"):
        gap = np.where(same, 0.0, np.abs(first - second))
    gap = np.nan_to_num(gap, nan=math.inf, posinf=math.inf)
    largest = float(gap.max())
    size = float(np.nan_to_num(np.abs(first), nan=0.0, posinf=0.0).max())
    return largest, (largest / size if size else math.inf) if largest else 0.0


def _shown(value: Any) -> str:
    """Dtype and shape; a number may be a tensor without dims in a graph."""
    if isinstance(value, ms.Tensor):
        return f"{str(value.dtype).lower()} {list(value.shape)}"
    return type(value).__name__


def _array(value: Any) -> Any:
    if isinstance(value, ms.Tensor):
        narrow = str(value.dtype) in ("BFloat16", "Float8E4M3FN", "Float8E5M2", "HiFloat8")
        return (value.astype(ms.float32) if narrow else value).asnumpy()
    return np.asarray(value)
