"""The transfer plan: which bytes of which publisher rank go where in one member's memory.

A pure function of the manifest and of what the member keeps. Both ends compute it apart and compare
digests. Tensors of one kind of which the same is kept are planned once, and moved to where each
lies: the work is linear in the pieces that are asked for, not in ranks times tensors.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Final, NamedTuple

import attrs
import numpy as np

from parallelkit.errors import ManifestError
from parallelkit.weights.exports import ALIGNMENT, export, handed_out
from parallelkit.weights.layout import Region, overlaps
from parallelkit.weights.manifest import Kind, Manifest
from parallelkit.weights.needs import Needs
from parallelkit.weights.regions import Span, distances, intersection, span_along

#: Bytes that share a digest and a request, at most.
BUCKET_BYTES: Final = 4 << 20


class Piece(NamedTuple):
    """A box of one tensor that travels from one rank.

    Attributes:
        tensor: index among the manifest's unique tensors.
        rank: whose arena it comes from.
        source: its bytes in that arena.
        target: its bytes in the member's memory of what it keeps of the tensor. Both spans list
            the same elements in the same order.
    """

    tensor: int
    rank: int
    source: Span
    target: Span


class Bucket(NamedTuple):
    """Pieces of one rank that are requested, hashed and repeated together.

    Attributes:
        rank: whose; pieces: in the order of their digest; nbytes: of all, without gaps.
    """

    rank: int
    pieces: tuple[Piece, ...]
    nbytes: int


class _Cut(NamedTuple):
    """A piece of any tensor of a class: `source` counts from where the rank's part begins."""

    source: Span
    target: Span
    nbytes: int


@attrs.frozen(kw_only=True, slots=False, eq=False)
class TransferPlan:
    """What moves to one member.

    Attributes:
        manifest, needs: what is published, and what the member keeps.
        only: the publisher ranks that are planned; None: all that hand out something needed.
        bucket_bytes: largest bucket, but for a fusion group or an element that is larger.
        alignment: of parts in an arena.
    """

    manifest: Manifest
    needs: Needs
    only: tuple[int, ...] | None = None
    bucket_bytes: int = BUCKET_BYTES
    alignment: int = ALIGNMENT

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The publisher ranks that bytes come from, ascending."""
        return tuple(sorted({rank for shares in self._shares for rank in shares}))

    @cached_property
    def nbytes(self) -> int:
        """Bytes that move: those that are needed from the planned ranks, each once."""
        counts = np.bincount(self._classes, minlength=len(self._shares)).tolist()
        each = [sum(box.elements for box in shares.values()) for shares in self._shares]
        return sum(
            count * elements * kind.itemsize
            for count, elements, (kind, _) in zip(counts, each, self._pairs, strict=True)
        )

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """All buckets, by rank ascending."""
        return tuple(bucket for rank in self.ranks for bucket in self.of(rank))

    def of(self, rank: int) -> tuple[Bucket, ...]:
        """The buckets of one planned rank, in order: the same whichever ranks were planned.

        Pieces follow the manifest, except that tensors of a fusion group come together, where the
        first of them is.
        """
        return tuple(_packed(self._groups(rank), rank, self.bucket_bytes))

    def names_in(self, bucket: Bucket) -> list[str]:
        """Names of the tensors that have bytes in a bucket, each once."""
        unique = self.manifest.unique
        return list(dict.fromkeys(unique[piece.tensor].name for piece in bucket.pieces))

    @cached_property
    def digest(self) -> bytes:
        """16 bytes that two ends compare: manifest, needs and constants, whatever the ranks."""
        h = hashlib.blake2b(self.manifest.digest(), digest_size=16)
        h.update(self.needs.digest)
        h.update(repr((self.alignment, self.bucket_bytes)).encode())
        return h.digest()

    def describe(self) -> str:
        """`12.3 MB of 49.2 MB from 8 ranks`, for people."""
        ranks = f"rank {self.ranks[0]}" if len(self.ranks) == 1 else f"{len(self.ranks)} ranks"
        return f"{self.nbytes / 1e6:.1f} MB of {self.manifest.nbytes / 1e6:.1f} MB from {ranks}"

    @cached_property
    def _pairs(self) -> list[tuple[Kind, Region | None]]:
        """For each class of tensors, its kind and what is kept of it."""
        kinds, regions = self.manifest.kinds[0], self.needs.regions
        pairs = self.needs.pairs(self.manifest)
        return [(kinds[kind], regions[n] if n >= 0 else None) for _, kind, n in pairs]

    @cached_property
    def _classes(self) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        return self.needs.classes(self.manifest)

    @cached_property
    def _shares(self) -> list[dict[int, Region]]:
        """For each class, which planned rank hands out which box that is kept."""
        return [self._share(kind, kept) for kind, kept in self._pairs]

    def _share(self, kind: Kind, kept: Region | None) -> dict[int, Region]:
        if kept is None:
            return {}
        if self.only is None:
            return dict(overlaps(kind.layout, self.manifest.mesh, kind.shape, kept))
        shares = {}
        for rank in self.only:
            part = handed_out(self.manifest, kind, rank)
            common = None if part is None else intersection(part, kept)
            if common is not None:
                shares[rank] = common
        return shares

    def _groups(self, rank: int) -> Iterator[list[tuple[Piece, int]]]:
        """Pieces of a rank with their bytes; those that may not be parted in one list."""
        cuts = [self._cuts(number, rank) for number in range(len(self._shares))]
        touched = np.array([bool(c) for c in cuts], bool)[self._classes]
        tensors = np.flatnonzero(touched)
        offsets = export(self.manifest, rank, alignment=self.alignment).offsets[tensors].tolist()
        classes = self._classes[tensors].tolist()
        fused: dict[str, list[tuple[Piece, int]]] = {}
        groups: list[list[tuple[Piece, int]]] = []
        for tensor, number, base in zip(tensors.tolist(), classes, offsets, strict=True):
            pieces = [
                (Piece(tensor, rank, Span(base + s.offset, s.run, s.steps), target), nbytes)
                for s, target, nbytes in cuts[number]
            ]
            fusion = self.manifest.unique[tensor].fusion
            if fusion is None:
                groups.extend([piece] for piece in pieces)
            elif fusion in fused:
                fused[fusion].extend(pieces)
            else:
                fused[fusion] = pieces
                groups.append(pieces)
        return iter(groups)

    def _cuts(self, number: int, rank: int) -> list[_Cut]:
        """The pieces of any tensor of a class from one rank."""
        box = self._shares[number].get(rank)
        kind, kept = self._pairs[number]
        if box is None or kept is None:
            return []
        part = handed_out(self.manifest, kind, rank)
        assert part is not None
        limit = None if kind.fused else self.bucket_bytes
        return list(_cut_up(box, part, kept, kind.itemsize, limit))


def plan_transfer(
    manifest: Manifest,
    needs: Needs | None = None,
    *,
    ranks: Sequence[int] | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    alignment: int = ALIGNMENT,
) -> TransferPlan:
    """Plan what moves to one member.

    Args:
        manifest: what is published.
        needs: what the member keeps; None: everything.
        ranks: plan the buckets of these publisher ranks alone, which is what such a rank itself
            has to know; None: of all.
        bucket_bytes, alignment: the same at both ends.

    Raises:
        ManifestError: there is nothing to move.
        NeedsError: the needs do not fit the manifest.
    """
    if not manifest.tensors:
        raise ManifestError("the manifest is empty: the model has no parameters and no buffers")
    if needs is None:
        needs = Needs.whole(manifest)
    else:
        needs.check(manifest)
    only = None if ranks is None else tuple(sorted(set(ranks)))
    return TransferPlan(
        manifest=manifest, needs=needs, only=only, bucket_bytes=bucket_bytes, alignment=alignment
    )


def _packed(groups: Iterator[list[tuple[Piece, int]]], rank: int, limit: int) -> Iterator[Bucket]:
    """Fill buckets in order, each as far as the next group fits."""
    pending, size = list[Piece](), 0
    for group in groups:
        nbytes = sum(n for _, n in group)
        if pending and size + nbytes > limit:
            yield Bucket(rank, tuple(pending), size)
            pending, size = [], 0
        pending.extend(piece for piece, _ in group)
        size += nbytes
    if pending:
        yield Bucket(rank, tuple(pending), size)


def _cut_up(
    box: Region, part: Region, kept: Region, itemsize: int, limit: int | None
) -> Iterator[_Cut]:
    """Cut a box into pieces of at most `limit` bytes, along its slowest dims.

    Dims that are one run on both sides count as one, so that what is contiguous on both sides is
    cut wherever the limit falls, and anything else into boxes.
    """
    source, near = distances(box, part, itemsize)
    target, far = distances(box, kept, itemsize)
    axes = _merged(box.sizes, near, far)
    inner = [itemsize * math.prod(n for n, _, _ in axes[d + 1 :]) for d in range(len(axes))]
    whole_bytes = box.elements * itemsize
    if limit is None or whole_bytes <= limit or not axes:
        yield _cut(axes, source, target, itemsize)
        return
    d = next((d for d, nbytes in enumerate(inner) if nbytes <= limit), len(axes) - 1)
    rows = max(1, limit // inner[d])
    count, step, step_at = axes[d]
    for place in itertools.product(*(range(n) for n, _, _ in axes[:d])):
        start = source + sum(i * a for i, (_, a, _) in zip(place, axes, strict=False))
        start_at = target + sum(i * b for i, (_, _, b) in zip(place, axes, strict=False))
        for row in range(0, count, rows):
            left = [(min(rows, count - row), step, step_at), *axes[d + 1 :]]
            yield _cut(left, start + row * step, start_at + row * step_at, itemsize)


def _merged(
    sizes: Sequence[int], near: Sequence[int], far: Sequence[int]
) -> list[tuple[int, int, int]]:
    """Counts and distances on both sides, slowest first; neighbours that are one run made one."""
    axes: list[tuple[int, int, int]] = []
    for count, a, b in zip(reversed(sizes), reversed(near), reversed(far), strict=True):
        if count == 1:
            continue
        if axes and (a, b) == (axes[-1][0] * axes[-1][1], axes[-1][0] * axes[-1][2]):
            axes[-1] = (axes[-1][0] * count, *axes[-1][1:])
        else:
            axes.append((count, a, b))
    return axes[::-1]


def _cut(axes: Sequence[tuple[int, int, int]], source: int, target: int, itemsize: int) -> _Cut:
    counts = [n for n, _, _ in axes]
    return _Cut(
        span_along(source, [a for _, a, _ in axes], counts, itemsize),
        span_along(target, [b for _, _, b in axes], counts, itemsize),
        itemsize * math.prod(counts),
    )
