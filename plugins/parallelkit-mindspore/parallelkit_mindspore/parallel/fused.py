"""Many tensors through few collectives: flat buffers, one a dtype up to a size.

A call of MindSpore's collectives on the CPU costs milliseconds whatever its size, so sending each
gradient by itself costs several times the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

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
        sizes = [int(tensors[index].size) for index in members]
        flats = [tensors[index].reshape(-1) for index in members]
        whole = collective(flats[0] if len(flats) == 1 else mint.cat(flats))
        # Copies, since the CPU's kernels misread views into a buffer when they copy from them.
        parts = [whole] if len(members) == 1 else [part.copy() for part in mint.split(whole, sizes)]
        for index, part in zip(members, parts, strict=True):
            results[index] = part.reshape(tensors[index].shape)
    return results


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
