"""The transfer plan: where every tensor lies in the arena, and how the arena is cut into blocks.

A pure function of the manifest. Publisher and subscriber compute it apart and compare digests, so
no offsets travel over the wire and no side trusts the other's arithmetic.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator
from functools import cached_property
from typing import Final

import attrs

from parallelkit.errors import ManifestError
from parallelkit.weights.manifest import Manifest

#: Every tensor starts at a multiple of this many bytes: any dtype, any vector unit, any page.
ALIGNMENT: Final = 256
#: The arena is cut into blocks of this many bytes; each has a digest of its own.
BLOCK_BYTES: Final = 4 << 20


@attrs.frozen
class Piece:
    """A run of one tensor's bytes inside one block.

    Attributes:
        tensor: index among the manifest's unique tensors.
        start: first byte within the tensor; offset: first byte within the arena; nbytes: length.
    """

    tensor: int
    start: int
    offset: int
    nbytes: int


@attrs.frozen(kw_only=True, slots=False)
class TransferPlan:
    """The arena's layout.

    Attributes:
        manifest: what is moved.
        offsets: first arena byte of each unique tensor; sizes: its bytes.
        nbytes: size of the arena in bytes, padding included, a multiple of `alignment`.
        alignment, block_bytes: the constants it was made with.
    """

    manifest: Manifest
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    nbytes: int
    alignment: int = ALIGNMENT
    block_bytes: int = BLOCK_BYTES

    @property
    def blocks(self) -> int:
        """Number of blocks; the last may be shorter."""
        return -(-self.nbytes // self.block_bytes)

    def block_span(self, block: int) -> tuple[int, int]:
        """First arena byte of a block, and one past its last."""
        start = block * self.block_bytes
        return start, min(start + self.block_bytes, self.nbytes)

    def pieces(self, block: int) -> Iterator[Piece]:
        """The tensor bytes inside a block, by offset; what lies between is zero padding."""
        start, stop = self.block_span(block)
        i = max(bisect_right(self.offsets, start) - 1, 0)
        for tensor in range(i, len(self.offsets)):
            offset, size = self.offsets[tensor], self.sizes[tensor]
            if offset >= stop:
                return
            low, high = max(offset, start), min(offset + size, stop)
            if low < high:
                yield Piece(tensor, low - offset, low, high - low)

    def names_in(self, block: int) -> list[str]:
        """Names of the tensors that have bytes in a block."""
        unique = self.manifest.unique
        return [unique[p.tensor].name for p in self.pieces(block)]

    @cached_property
    def digest(self) -> bytes:
        """16 bytes that two ends compare: manifest and layout."""
        h = hashlib.blake2b(self.manifest.digest(), digest_size=16)
        h.update(repr((self.alignment, self.block_bytes, self.nbytes, self.offsets)).encode())
        return h.digest()


def plan_transfer(
    manifest: Manifest, *, alignment: int = ALIGNMENT, block_bytes: int = BLOCK_BYTES
) -> TransferPlan:
    """Lay out the unique tensors of `manifest` one after another, each aligned.

    Tensors keep the manifest's order; a tensor larger than a block spans several. Linear in the
    number of tensors.

    Raises:
        ManifestError: there is nothing to move.
    """
    if not manifest.tensors:
        raise ManifestError("the manifest is empty: the model has no parameters and no buffers")
    offsets, sizes, end = [], [], 0
    for tensor in manifest.unique:
        offsets.append(end)
        sizes.append(tensor.nbytes)
        end += -(-tensor.nbytes // alignment) * alignment
    return TransferPlan(
        manifest=manifest,
        offsets=tuple(offsets),
        sizes=tuple(sizes),
        nbytes=max(end, alignment),
        alignment=alignment,
        block_bytes=block_bytes,
    )
