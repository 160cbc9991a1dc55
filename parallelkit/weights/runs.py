"""A plan's bytes as runs, for devices: plain numbers, worked off in any order by whoever has them.

Both ends make the same runs of the same buckets, so that a digest of them is the same at both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from parallelkit.weights.plan import Bucket, Cut
from parallelkit.weights.regions import Span

Numbers = np.ndarray[Any, np.dtype[np.int64]]
Digests = np.ndarray[Any, np.dtype[np.uint64]]


class Runs(NamedTuple):
    """Columns, int64; a row is a run of bytes that follow each other on both sides.

    Attributes:
        rank: the publisher's rank that it comes from; tensor: index of the unique tensor.
        source: first byte in the rank's part of the tensor; target: in what the member keeps.
        nbytes: how many; bucket: index of the bucket.
    """

    rank: Numbers
    tensor: Numbers
    source: Numbers
    target: Numbers
    nbytes: Numbers
    bucket: Numbers

    def of(self, buckets: Sequence[int]) -> Runs:
        """The runs of some buckets, ascending, which are counted from 0."""
        order = np.array(buckets, np.int64)
        mine = np.isin(self.bucket, order)
        rows = Runs(*(column[mine] for column in self))
        return rows._replace(bucket=np.searchsorted(order, rows.bucket))


def runs_of(buckets: Sequence[Bucket]) -> Runs:
    """All runs of some buckets, in their order; buckets are counted from 0."""
    known: dict[int, tuple[Numbers, Numbers, int]] = {}  # a class of tensors shares its cuts
    heads: list[tuple[int, int, int, int, int]] = []
    sources: list[Numbers] = []
    targets: list[Numbers] = []
    for number, bucket in enumerate(buckets):
        for piece in bucket.pieces:
            found = known.get(id(piece.cut))
            if found is None:
                found = known[id(piece.cut)] = _expanded(piece.cut)
            source, target, run = found
            heads.append((piece.rank, piece.tensor, run, number, len(source)))
            sources.append(source)
            targets.append(target)
    rank, tensor, nbytes, bucket_of, count = np.array(heads, np.int64).reshape(-1, 5).T
    none = np.zeros(0, np.int64)
    return Runs(
        rank=np.repeat(rank, count),
        tensor=np.repeat(tensor, count),
        source=np.concatenate([none, *sources]),
        target=np.concatenate([none, *targets]),
        nbytes=np.repeat(nbytes, count),
        bucket=np.repeat(bucket_of, count),
    )


def _expanded(cut: Cut) -> tuple[Numbers, Numbers, int]:
    """Where each run begins on both sides, and its length: the shorter of both sides' runs.

    That divides the longer one, since both are products of the same innermost dims.
    """
    run = min(cut.source.run, cut.target.run)
    return _starts(cut.source, run), _starts(cut.target, run), run


def _starts(span: Span, run: int) -> Numbers:
    starts: Numbers = np.arange(0, span.run, run, dtype=np.int64)
    for count, far in reversed(span.steps):
        starts = (np.arange(count, dtype=np.int64)[:, None] * far + starts).reshape(-1)
    return starts + span.offset
