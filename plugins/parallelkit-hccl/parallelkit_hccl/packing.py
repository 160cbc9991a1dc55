"""Which tensors share a broadcast: pure functions that both ends compute alike.

The rule is vllm-ascend's (`packed_tensor.py`): tensors are appended in order, without padding,
until the buffer holds *more* than its size; then it is sent. So a buffer may be larger than its
size by one tensor, a tensor is never cut, and one larger than the buffer ends the buffer it is in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import attrs

from parallelkit.weights.manifest import DTYPE_BYTES, TensorSpec
from parallelkit_hccl.errors import HcclArgumentError

#: vllm-ascend's defaults; both ends must have the same.
BUFFER_BYTES: Final = 1 << 30
BUFFERS: Final = 2


def _positive(packing: Any, attribute: attrs.Attribute[int], value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 50:
        raise HcclArgumentError(f"{attribute.name} is {value!r}; it is an integer of at least 1")


@attrs.frozen(kw_only=True)
class Packing:
    """How tensors are packed. Every rank must have the same.

    Attributes:
        buffer_bytes: a buffer is sent once it holds more than this.
        buffers: how many of them vllm-ascend's worker keeps, to unpack one while the next arrives.
            Nothing on the wire depends on it. This package keeps one: packing is a copy within the
            device, at a hundred times the speed of the link.
    """

    buffer_bytes: int = attrs.field(default=BUFFER_BYTES, validator=_positive)
    buffers: int = attrs.field(default=BUFFERS, validator=_positive)


@attrs.frozen
class Piece:
    """One tensor in a buffer.

    Attributes:
        index: of the tensor in the order given.
        offset, nbytes: where it lies in the buffer.
    """

    index: int
    offset: int
    nbytes: int


@attrs.frozen
class Chunk:
    """The tensors of one broadcast, in order and without gaps."""

    pieces: tuple[Piece, ...]
    nbytes: int


def plan_chunks(sizes: Sequence[int], buffer_bytes: int) -> tuple[Chunk, ...]:
    """Divide tensors of these sizes, in bytes, into buffers. Empty tensors have their place, too.

    Takes time in proportion to the number of tensors.
    """
    chunks: list[Chunk] = []
    pieces: list[Piece] = []
    filled = 0
    for index, size in enumerate(sizes):
        pieces.append(Piece(index, filled, size))
        filled += size
        if filled > buffer_bytes:
            chunks.append(Chunk(tuple(pieces), filled))
            pieces, filled = [], 0
    if pieces:
        chunks.append(Chunk(tuple(pieces), filled))
    return tuple(chunks)


def staging_bytes(chunks: Sequence[Chunk]) -> int:
    """Device memory that packing needs; a tensor that is alone in its buffer is not copied."""
    return max((c.nbytes for c in chunks if len(c.pieces) > 1), default=0)


def misaligned(specs: Sequence[TensorSpec], chunks: Sequence[Chunk]) -> list[str]:
    """Names of the tensors that start where their dtype cannot: no view of them is possible."""
    return [
        specs[piece.index].name
        for chunk in chunks
        for piece in chunk.pieces
        if piece.offset % DTYPE_BYTES[specs[piece.index].dtype]
    ]
