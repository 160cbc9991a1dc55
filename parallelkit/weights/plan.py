"""The transfer plan: which bytes of which publisher rank go where in one member's memory.

A pure function of the manifest and of what the member keeps. Both ends compute it apart and compare
digests. Tensors of one kind of which the same is kept are planned once, and moved to where each
lies: the work is linear in the pieces that are asked for, not in ranks times tensors.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Final, NamedTuple

import attrs
import numpy as np

from parallelkit.errors import ManifestError
from parallelkit.weights.exports import ALIGNMENT, check_rank, export, handed_out
from parallelkit.weights.layout import Region, overlaps
from parallelkit.weights.manifest import Kind, Manifest
from parallelkit.weights.needs import Needs, Numbers
from parallelkit.weights.regions import Span, distances, intersection, span_along

#: Bytes that share a digest and a request, at most.
BUCKET_BYTES: Final = 4 << 20


class Cut(NamedTuple):
    """A piece of any tensor of a class: `source` counts from where the rank's part begins."""

    source: Span
    target: Span
    nbytes: int


class Piece(NamedTuple):
    """A box of one tensor that travels from one rank.

    Attributes:
        tensor: index among the manifest's unique tensors.
        rank: whose arena it comes from.
        base: where that rank's part of the tensor begins in its arena.
        cut: which bytes of the part, shared by all tensors of a class.
    """

    tensor: int
    rank: int
    base: int
    cut: Cut

    @property
    def source(self) -> Span:
        """Its bytes in the arena of the rank."""
        offset, run, steps = self.cut.source
        return Span(self.base + offset, run, steps)

    @property
    def target(self) -> Span:
        """Its bytes in the member's memory of what it keeps of the tensor, in the same order."""
        return self.cut.target


class Bucket(NamedTuple):
    """Pieces of one rank that are requested, hashed and repeated together.

    Attributes:
        rank: whose; pieces: in the order of their digest; nbytes: of all, without gaps.
    """

    rank: int
    pieces: tuple[Piece, ...]
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
        return tuple(sorted(self._shares))

    @cached_property
    def nbytes(self) -> int:
        """Bytes that move: those that are needed from the planned ranks, each once."""
        counts = np.bincount(self._classes, minlength=len(self._pairs)).tolist()
        return sum(
            counts[number] * box.elements * self._pairs[number][0].itemsize
            for shares in self._shares.values()
            for number, box in shares.items()
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
        cuts: list[list[Cut]] = [[] for _ in self._pairs]
        for number, box in self._shares.get(rank, {}).items():
            cuts[number] = self._cuts(number, rank, box)
        tensors = self._order[np.array([bool(c) for c in cuts], bool)[self._classes[self._order]]]
        offsets = export(self.manifest, rank, alignment=self.alignment).offsets[tensors].tolist()
        rows = list(zip(tensors.tolist(), self._classes[tensors].tolist(), offsets, strict=True))
        new = tuple.__new__  # half the time of Piece(...), and there may be a million
        pieces = [
            new(Piece, (tensor, rank, base, cut))
            for tensor, number, base in rows
            for cut in cuts[number]
        ]
        sizes = [nbytes for _, number, _ in rows for _, _, nbytes in cuts[number]]
        ends = self._units(rows, cuts) if self._fused else range(1, len(pieces) + 1)
        return tuple(_packed(pieces, sizes, ends, self.bucket_bytes))

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
    def _classes(self) -> Numbers:
        return self.needs.classes(self.manifest)

    @cached_property
    def _shares(self) -> dict[int, dict[int, Region]]:
        """By planned rank, what it hands out and the member keeps of a tensor of each class."""
        shares: dict[int, dict[int, Region]] = {}
        for number, (kind, kept) in enumerate(self._pairs):
            for rank, box in self._meeting(kind, kept):
                shares.setdefault(rank, {})[number] = box
        return shares

    def _meeting(self, kind: Kind, kept: Region | None) -> Iterator[tuple[int, Region]]:
        if kept is None:
            return
        if self.only is None:
            yield from overlaps(kind.layout, self.manifest.mesh, kind.shape, kept)
            return
        for rank in self.only:
            part = handed_out(self.manifest, kind, rank)
            box = None if part is None else intersection(part, kept)
            if box is not None:
                yield rank, box

    @cached_property
    def _fused(self) -> bool:
        return any(kind.fused for kind in self.manifest.kinds[0])

    @cached_property
    def _groups(self) -> Numbers:
        """For each unique tensor, the first one of its fusion group; itself where it has none."""
        groups = np.arange(len(self.needs), dtype=np.int32)
        if self._fused:
            first: dict[str, int] = {}
            for i, tensor in enumerate(self.manifest.unique):
                if tensor.fusion is not None:
                    groups[i] = first.setdefault(tensor.fusion, i)
        return groups

    @cached_property
    def _order(self) -> Numbers:
        """Unique tensors in the order in which they travel."""
        return np.argsort(self._groups, kind="stable").astype(np.int32)

    def _units(self, rows: Sequence[tuple[int, int, int]], cuts: Sequence[list[Cut]]) -> list[int]:
        """Where each run of pieces that may not be parted ends; `rows` name tensor and class."""
        ends, last = list[int](), -1
        for tensor, number, _ in rows:
            count, end = len(cuts[number]), ends[-1] if ends else 0
            group = int(self._groups[tensor])
            if group == last:
                ends[-1] += count
            elif self._pairs[number][0].fused:
                ends.append(end + count)
            else:
                ends.extend(range(end + 1, end + count + 1))
            last = group
        return ends

    def _cuts(self, number: int, rank: int, box: Region) -> list[Cut]:
        """The pieces of any tensor of a class from one rank."""
        kind, kept = self._pairs[number]
        part = handed_out(self.manifest, kind, rank)
        assert part is not None
        assert kept is not None
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
        ManifestError: there is nothing to move, or no such rank.
        NeedsError: the needs do not fit the manifest.
    """
    if not manifest.tensors:
        raise ManifestError("the manifest is empty: the model has no parameters and no buffers")
    if needs is None:
        needs = Needs.whole(manifest)
    else:
        needs.check(manifest)
    only = None if ranks is None else tuple(sorted(set(ranks)))
    for rank in only or ():
        check_rank(manifest, rank)
    return TransferPlan(
        manifest=manifest, needs=needs, only=only, bucket_bytes=bucket_bytes, alignment=alignment
    )


def _packed(
    pieces: Sequence[Piece], sizes: Sequence[int], ends: Iterable[int], limit: int
) -> Iterator[Bucket]:
    """Fill buckets in order, each as far as the next run of pieces fits; runs end at `ends`."""
    total = [0, *itertools.accumulate(sizes)]
    first = last = 0
    for end in ends:
        if total[end] - total[first] > limit and last > first:
            yield Bucket(pieces[0].rank, tuple(pieces[first:last]), total[last] - total[first])
            first = last
        last = end
    if pieces:
        yield Bucket(pieces[0].rank, tuple(pieces[first:]), total[-1] - total[first])


def _cut_up(
    box: Region, part: Region, kept: Region, itemsize: int, limit: int | None
) -> Iterator[Cut]:
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


def _cut(axes: Sequence[tuple[int, int, int]], source: int, target: int, itemsize: int) -> Cut:
    counts = [n for n, _, _ in axes]
    return Cut(
        span_along(source, [a for _, a, _ in axes], counts, itemsize),
        span_along(target, [b for _, _, b in axes], counts, itemsize),
        itemsize * math.prod(counts),
    )
