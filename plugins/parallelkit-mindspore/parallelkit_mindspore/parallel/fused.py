"""Many tensors through few collectives: flat buffers, one a dtype up to a size.

A call of MindSpore's collectives on the CPU costs milliseconds whatever its size, so sending each
gradient by itself costs several times the whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import mindspore as ms
import numpy as np
from mindspore import mint

from parallelkit_mindspore.tensors import nbytes

#: Bytes of a buffer at most, unless one tensor has more.
LIMIT: Final = 64 << 20


def fused(
    tensors: Sequence[Any], collective: Callable[[Any], Any], *, limit: int = LIMIT
) -> list[Any]:
    """Run `collective` on flat buffers that hold `tensors`, and cut the results up again.

    Every rank gives tensors of the same shapes and dtypes in the same order, so all make the same
    buffers.

    Args:
        tensors: of any shapes and dtypes; empty ones are passed over.
        collective: maps a tensor of one dim to another of the same size.
        limit: bytes of a buffer.

    Returns:
        The results, in the order and the shapes of `tensors`.
    """
    results = list(tensors)
    for members in _buffers(tensors, limit):
        flats = [tensors[index].reshape(-1) for index in members]
        whole = collective(flats[0] if len(flats) == 1 else mint.cat(flats))
        parts = _cut(whole, [tuple(tensors[index].shape) for index in members])
        for index, part in zip(members, parts, strict=True):
            results[index] = part
    return results


def _cut(whole: Any, shapes: Sequence[tuple[int, ...]]) -> list[Any]:
    """Tensors of these shapes from a flat one, each with memory of its own.

    On the CPU by NumPy, at a tenth of the cost of MindSpore's operators; its kernels also misread
    views into a buffer when they copy from them.
    """
    sizes = [math.prod(shape) for shape in shapes]
    if len(sizes) == 1:
        return [whole.reshape(shapes[0])]
    if ms.get_context("device_target") == "CPU":
        cuts = np.split(whole.asnumpy(), np.cumsum(sizes)[:-1])
        return [ms.Tensor(cut.reshape(shape)) for cut, shape in zip(cuts, shapes, strict=True)]
    views = mint.split(whole, sizes)
    return [view.copy().reshape(shape) for view, shape in zip(views, shapes, strict=True)]


def _buffers(tensors: Sequence[Any], limit: int) -> Iterator[list[int]]:
    """Indices of the tensors that share a buffer."""
    by_dtype: dict[str, list[int]] = {}
    for index, tensor in enumerate(tensors):
        if tensor.size:
            by_dtype.setdefault(str(tensor.dtype), []).append(index)
    for indices in by_dtype.values():
        members: list[int] = []
        filled = 0
        for index in indices:
            size = nbytes(tensors[index])
            if members and filled + size > limit:
                yield members
                members, filled = [], 0
            members.append(index)
            filled += size
        yield members
