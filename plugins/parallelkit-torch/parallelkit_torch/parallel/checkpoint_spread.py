"""Which rank writes which region of which tensor: pure, and the same on every rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from parallelkit.errors import CheckpointError, RankMismatchError
from parallelkit.weights.manifest import DTYPE_BYTES


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """A region of a tensor that a rank holds.

    Attributes:
        key: name in the checkpoint.
        dtype: torch's name for it.
        shape: of the whole tensor.
        offsets, sizes: where the region begins, and its shape.
        first: of several ranks that hold it, the first writes it; else any may. Replicas of
            buffers need not be equal, and those of one rank belong together.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    first: bool


class Place(NamedTuple):
    """What tells one region from the others."""

    key: str
    offsets: tuple[int, ...]


def assign(held: Sequence[Sequence[Piece]]) -> dict[Place, int]:
    """Choose one writer for each region: of the ranks that hold it, the one with least to write.

    Args:
        held: the regions of each rank, by rank.

    Raises:
        RankMismatchError: ranks hold a tensor with different shapes or dtypes, or regions that
            begin at the same place with different sizes.
        CheckpointError: the regions of a tensor do not add up to it.
    """
    found: dict[Place, Piece] = {}
    holders: dict[Place, list[int]] = {}
    whole: dict[str, tuple[Piece, int]] = {}
    covered: dict[str, int] = {}
    for rank, pieces in enumerate(held):
        for piece in pieces:
            _compare(whole.setdefault(piece.key, (piece, rank)), (piece, rank))
            covered.setdefault(piece.key, 0)
            if math.prod(piece.sizes) == 0 < math.prod(piece.shape):
                continue  # a rank without a share
            place = Place(piece.key, piece.offsets)
            if place not in found:
                found[place] = piece
                covered[piece.key] += math.prod(piece.sizes)
            elif found[place].sizes != piece.sizes:
                other = holders[place][0]
                raise RankMismatchError(
                    f"ranks hold different regions of {piece.key!r} at {list(piece.offsets)}: rank "
                    f"{other} {list(found[place].sizes)}, rank {rank} {list(piece.sizes)}"
                )
            holders.setdefault(place, []).append(rank)
    for key, (piece, _) in whole.items():
        if covered[key] != math.prod(piece.shape):
            raise CheckpointError(
                f"{key!r} has {math.prod(piece.shape)} elements, and the ranks of the group hold "
                f"regions of {covered[key]} together; save over all ranks that hold a part of it"
            )
    return _balance(found, holders, len(held))


def _balance(
    found: dict[Place, Piece], holders: dict[Place, list[int]], ranks: int
) -> dict[Place, int]:
    load = [0] * ranks
    owners: dict[Place, int] = {}
    # First what has one holder, then the largest.
    order = sorted(found, key=lambda place: (len(holders[place]) > 1, -_bytes(found[place]), place))
    for place in order:
        able = holders[place]
        owner = able[0] if found[place].first else min(able, key=lambda rank: (load[rank], rank))
        owners[place] = owner
        load[owner] += _bytes(found[place])
    return owners


def _compare(one: tuple[Piece, int], other: tuple[Piece, int]) -> None:
    (a, rank), (b, second) = one, other
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        raise RankMismatchError(
            f"ranks have different tensors {a.key!r}: rank {rank} {a.dtype} {list(a.shape)}, "
            f"rank {second} {b.dtype} {list(b.shape)}"
        )


def _bytes(piece: Piece) -> int:
    return math.prod(piece.sizes) * DTYPE_BYTES[piece.dtype]
