"""Batches: tensors in tuples, lists and dicts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import mindspore as ms
import numpy as np

from parallelkit.errors import DataShardError


def leaves(tree: Any) -> Iterator[Any]:
    """Everything in a tree that is no tuple, list or dict."""
    if isinstance(tree, Mapping):
        for value in tree.values():
            yield from leaves(value)
    elif isinstance(tree, tuple | list):
        for value in tree:
            yield from leaves(value)
    else:
        yield tree


def items_in(inputs: Any, target: Any) -> int:
    """Number of items of a batch: the size of dim 0 of every tensor in it.

    Raises:
        DataShardError: there is none, no tensor, or the tensors disagree; or inputs hold an array
            of NumPy's, which no cell takes.
    """
    if any(isinstance(x, np.ndarray) for x in leaves(inputs)):
        raise DataShardError("inputs hold an array of NumPy's; make it a tensor: mindspore.Tensor")
    tensors = [x for x in leaves((inputs, target)) if isinstance(x, ms.Tensor)]
    sizes = {x.shape[0] for x in tensors if x.ndim}
    if len(sizes) != 1 or 0 in sizes:
        raise DataShardError(
            f"tensors of the batch have dim 0 of sizes {sorted(sizes)}; inputs and target need one "
            "and the same number of items, at least 1"
        )
    return int(sizes.pop())


def cut(tree: Any, start: int, stop: int) -> Any:
    """Items `start` to `stop` of every tensor with dims in a tree; plain values as they are.

    Raises:
        DataShardError: something else is in it, which may hold items and cannot be cut.
    """
    if isinstance(tree, Mapping):
        return {key: cut(value, start, stop) for key, value in tree.items()}
    if isinstance(tree, tuple | list):
        parts = [cut(value, start, stop) for value in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    if isinstance(tree, ms.Tensor):
        return tree[start:stop] if tree.ndim else tree
    if tree is None or isinstance(tree, bool | int | float | str):
        return tree
    raise DataShardError(
        f"a batch with a {type(tree).__qualname__} cannot be cut into microbatches; use tensors "
        "in tuples, lists and dicts, or microbatches=1"
    )
