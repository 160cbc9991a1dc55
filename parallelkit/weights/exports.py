"""What each rank of a publisher hands out, and where in its arena that lies.

A pure function of the manifest, so that no offsets travel over the wire and no side trusts the
other's arithmetic. A rank hands out the part that it holds of a tensor if it is the lowest of those
that hold the same; of a tensor without a layout, rank 0 hands out everything.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import attrs
import numpy as np

from parallelkit.errors import ManifestError
from parallelkit.weights.layout import Region, region, servers, serves, summary
from parallelkit.weights.manifest import Kind, Manifest
from parallelkit.weights.regions import whole

#: Every part starts at a multiple of this many bytes: any dtype, any vector unit.
ALIGNMENT: Final = 256

Offsets = np.ndarray[Any, np.dtype[np.int64]]


class Part(NamedTuple):
    """What a rank hands out of one tensor.

    Attributes:
        tensor: index among the manifest's unique tensors.
        region: which elements; never without any.
        offset: first byte in the rank's arena; nbytes: how many bytes they are, row-major.
    """

    tensor: int
    region: Region
    offset: int
    nbytes: int


@attrs.frozen(kw_only=True, slots=False, eq=False)
class Export:
    """The arena of one rank.

    Attributes:
        manifest, rank: what is published, and who this is.
        nbytes: size of the arena, a multiple of the alignment; 0 where the rank hands out nothing.
        offsets: int64, where the part of each unique tensor begins; without meaning for tensors of
            which the rank hands out nothing.
        boxes: what it hands out of each of the manifest's kinds, or None.
    """

    manifest: Manifest
    rank: int
    nbytes: int
    offsets: Offsets
    boxes: tuple[Region | None, ...]

    def parts(self) -> list[Part]:
        """Every part, in the order of the manifest, which is that of the arena."""
        kinds, which = self.manifest.kinds
        nbytes = [_nbytes(box, kind) for box, kind in zip(self.boxes, kinds, strict=True)]
        parts = []
        for tensor, (kind, offset) in enumerate(zip(which, self.offsets.tolist(), strict=True)):
            box = self.boxes[kind]
            if box is not None:
                parts.append(Part(tensor, box, offset, nbytes[kind]))
        return parts

    def offset(self, tensor: int) -> int:
        """Where the part of unique tensor number `tensor` begins.

        Raises:
            ManifestError: the rank hands out nothing of it.
        """
        if self.boxes[self.manifest.kinds[1][tensor]] is None:
            raise ManifestError(
                f"rank {self.rank} hands out nothing of {self.manifest.unique[tensor].name!r}"
            )
        return int(self.offsets[tensor])


def export(manifest: Manifest, rank: int, *, alignment: int = ALIGNMENT) -> Export:
    """Lay out what a rank hands out, in the order of the manifest, each part aligned.

    Raises:
        ManifestError: the mesh has no such rank.
    """
    check_rank(manifest, rank)
    kinds, which = manifest.kinds
    boxes = tuple(handed_out(manifest, kind, rank) for kind in kinds)
    sizes = [_nbytes(box, kind) for box, kind in zip(boxes, kinds, strict=True)]
    room = np.array([-(-size // alignment) * alignment for size in sizes], np.int64)
    ends = np.cumsum(room[np.frombuffer(which, np.int32)])
    offsets = np.concatenate((np.zeros(1, np.int64), ends))
    return Export(
        manifest=manifest, rank=rank, nbytes=int(offsets[-1]), offsets=offsets[:-1], boxes=boxes
    )


def check_rank(manifest: Manifest, rank: int) -> None:
    """Raise `ManifestError` unless the publisher can have such a rank."""
    mesh = manifest.mesh
    if rank < 0 or (mesh is not None and rank >= mesh.size):
        raise ManifestError(
            f"rank {rank} is not one of the publisher's; "
            + (f"its mesh has ranks 0 to {mesh.size - 1}" if mesh else "ranks count from 0")
        )


def handed_out(manifest: Manifest, kind: Kind, rank: int) -> Region | None:
    """What a rank hands out of a tensor of a kind; None where that is nothing."""
    layout, mesh = kind.layout, manifest.mesh
    if not serves(layout, mesh, rank):
        return None
    if layout is None or mesh is None:
        box: Region | None = whole(kind.shape)
    else:
        box = region(layout, mesh, kind.shape, rank)
    return box if box is not None and box.elements else None


def _nbytes(box: Region | None, kind: Kind) -> int:
    return 0 if box is None else box.elements * kind.itemsize


def exporting_ranks(manifest: Manifest) -> list[int]:
    """The publisher ranks that hand anything out, ascending; rank 0 is always among them."""
    ranks = servers({kind.layout for kind in manifest.kinds[0]}, manifest.mesh)
    return [0, *(rank for rank in ranks if rank and any(_boxes(manifest, rank)))]


def explain_exports(manifest: Manifest) -> list[str]:
    """Say how tensors are spread and what each rank hands out, in a few lines; none if rank 0
    hands out everything."""
    if manifest.mesh is None:
        return []
    kinds, which = manifest.kinds
    counts = np.bincount(np.frombuffer(which, np.int32), minlength=len(kinds)).tolist()
    nbytes = [
        sum(
            n * _nbytes(box, k)
            for n, box, k in zip(counts, _boxes(manifest, r), kinds, strict=True)
        )
        for r in exporting_ranks(manifest)
    ]
    each = f"{min(nbytes) / 1e6:.1f} to {max(nbytes) / 1e6:.1f} MB"
    return [
        summary((t.layout for t in manifest.tensors), manifest.mesh),
        f"mesh of {manifest.mesh.size} ranks: {manifest.mesh.describe()}",
        f"{len(nbytes)} ranks hand out their own parts, {each} each",
    ]


def _boxes(manifest: Manifest, rank: int) -> list[Region | None]:
    """What a rank hands out of each of the manifest's kinds."""
    return [handed_out(manifest, kind, rank) for kind in manifest.kinds[0]]
