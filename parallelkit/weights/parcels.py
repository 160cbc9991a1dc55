"""What each rank of a publisher sends to rank 0 for whole tensors: parts, packed into parcels.

Pure: from the manifest alone a rank knows what it sends, and rank 0 what it gets from whom and
where it goes. Small parts share a message, a large part is one of its own, so that the number of
messages follows the bytes and no rank needs more memory than one parcel or one part.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from parallelkit.weights.layout import Region, ShardLayout, region, servers, serves, summary
from parallelkit.weights.manifest import DTYPE_BYTES, Manifest, TensorSpec

#: Parts are packed up to this many bytes; a larger one travels alone.
PARCEL_BYTES: Final = 16 << 20

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
#: Something of the right size to copy elements as, whatever they are.
_ITEMS: Final = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}


class Part(NamedTuple):
    """A rank's part of one tensor.

    Attributes:
        tensor: index among the manifest's unique tensors.
        region: which elements; nbytes: how many bytes they are, row-major.
    """

    tensor: int
    region: Region
    nbytes: int


class Parcel(NamedTuple):
    """Parts that travel in one message, one after the other without gaps."""

    rank: int
    parts: tuple[Part, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the message."""
        return sum(part.nbytes for part in self.parts)


def parcels(manifest: Manifest, rank: int, limit: int = PARCEL_BYTES) -> Iterator[Parcel]:
    """Everything that a rank hands out, in the order of the manifest.

    Rank 0's own are what it need not ask for. A tensor without elements is in no parcel.
    """
    pending, size = list[Part](), 0
    for index, box, nbytes in _parts(manifest, rank):
        if pending and size + nbytes > limit:
            yield Parcel(rank, tuple(pending))
            pending, size = [], 0
        pending.append(Part(index, box, nbytes))
        size += nbytes
    if pending:
        yield Parcel(rank, tuple(pending))


def inbound(manifest: Manifest, limit: int = PARCEL_BYTES) -> Iterator[Parcel]:
    """Every parcel that rank 0 has to ask others for, by the first tensor in it.

    Linear in the number of parts; those of one parcel for each rank are held at a time.
    """
    ranks = servers((t.layout for t in manifest.unique), manifest.mesh)
    each = [parcels(manifest, rank, limit) for rank in ranks if rank]
    return heapq.merge(*each, key=lambda parcel: parcel.parts[0].tensor)


def split_bytes(manifest: Manifest) -> tuple[int, int]:
    """Bytes that rank 0 holds itself, and bytes that it has to get, of each tensor once."""
    here = sum(nbytes for _, _, nbytes in _parts(manifest, 0))
    return here, manifest.nbytes - here


def explain_parts(manifest: Manifest) -> list[str]:
    """Say how a manifest's tensors are spread, in a few lines; none where they are not."""
    if manifest.mesh is None:
        return []
    here, there = split_bytes(manifest)
    return [
        summary((t.layout for t in manifest.tensors), manifest.mesh),
        f"mesh of {manifest.mesh.size} ranks: {manifest.mesh.describe()}",
        f"gathered for each update: {there / 1e6:.1f} MB from other ranks to rank 0, which holds "
        f"{here / 1e6:.1f} MB",
    ]


def span(box: Region, shape: Sequence[int]) -> tuple[int, int] | None:
    """First element and number of elements of a box that is one run of the tensor; else None.

    Example:
        >>> span(Region((2, 0), (2, 5)), (8, 5)), span(Region((0, 1), (8, 2)), (8, 5))
        ((10, 10), None)
    """
    whole = len(shape)
    while whole and box.sizes[whole - 1] == shape[whole - 1]:
        whole -= 1
    if any(n != 1 for n in box.sizes[: max(whole - 1, 0)]):
        return None
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    first = sum(low * stride for low, stride in zip(box.offsets, strides, strict=True))
    return first, box.elements


def window(whole: Bytes, spec: TensorSpec, box: Region) -> Bytes | None:
    """The bytes of a box inside a whole tensor's row-major bytes; None where it is no one run."""
    run = span(box, spec.shape)
    if run is None:
        return None
    item = DTYPE_BYTES[spec.dtype]
    return whole[run[0] * item : (run[0] + run[1]) * item]


def place(whole: Bytes, spec: TensorSpec, box: Region, data: Bytes) -> None:
    """Write a box's row-major bytes to where they belong in a whole tensor's row-major bytes."""
    run = window(whole, spec, box)
    if run is not None:
        np.copyto(run, data)
        return
    item = _ITEMS[DTYPE_BYTES[spec.dtype]]
    inside = tuple(slice(low, low + n) for low, n in zip(box.offsets, box.sizes, strict=True))
    whole.view(item).reshape(spec.shape)[inside] = data.view(item).reshape(box.sizes)


def _parts(manifest: Manifest, rank: int) -> Iterator[tuple[int, Region, int]]:
    """Index, region and bytes of everything that a rank hands out and that has elements.

    Models repeat their layers: what was computed for one layout and shape is kept.
    """
    mesh = manifest.mesh
    boxes: dict[tuple[ShardLayout | None, tuple[int, ...]], Region | None] = {}
    for index, spec in enumerate(manifest.unique):
        key = (spec.layout, spec.shape)
        if key not in boxes:
            box: Region | None = None
            if serves(spec.layout, mesh, rank):
                if spec.layout is None or mesh is None:
                    box = Region((0,) * len(spec.shape), spec.shape)
                else:
                    box = region(spec.layout, mesh, spec.shape, rank)
            boxes[key] = box if box is not None and box.elements else None
        found = boxes[key]
        if found is not None:
            yield index, found, found.elements * DTYPE_BYTES[spec.dtype]
