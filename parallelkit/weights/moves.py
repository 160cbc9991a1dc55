"""What a member keeps, and how each tensor of it is copied: tables that are made once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from parallelkit.errors import NeedsError
from parallelkit.protocols import RegionSink, WeightSink
from parallelkit.weights.buckets import copy_span
from parallelkit.weights.exports import ALIGNMENT
from parallelkit.weights.manifest import Manifest
from parallelkit.weights.needs import Needs
from parallelkit.weights.plan import Piece, TransferPlan
from parallelkit.weights.regions import Bytes, Span


class Move(NamedTuple):
    """Bytes of one tensor from an arena, or from staging memory where `rank` is None."""

    rank: int | None
    source: Span
    target: Span


class Moves(NamedTuple):
    """All moves of one tensor, of which `nbytes` are kept."""

    tensor: int
    nbytes: int
    parts: list[Move]


def needs_of(sink: WeightSink, needs: Manifest, published: Manifest) -> Needs | None:
    """What a sink keeps of each published tensor; None: everything.

    Raises:
        NeedsError: its regions are not inside the tensors, or too many or few.
    """
    if not isinstance(sink, RegionSink):
        return None
    try:
        regions = list(sink.regions())
    except TypeError as error:
        raise NeedsError(
            f"the regions of a {type(sink).__qualname__} are no list: {error}"
        ) from error
    order = match(published, needs)
    if len(regions) != len(needs.unique):
        return Needs.of(published, regions)  # which says what is wrong
    found = Needs.of(published, [None if i < 0 else regions[i] for i in order])
    return None if found == Needs.whole(published) else found


def kept_bytes(plan: TransferPlan) -> list[int]:
    """Bytes kept of each unique tensor."""
    kinds, which = plan.manifest.kinds
    elements = [math.prod(region.sizes) for region in plan.needs.regions]
    return [
        elements[n] * kinds[kind].itemsize if n >= 0 else 0
        for kind, n in zip(which, plan.needs.which.tolist(), strict=True)
    ]


def laid_out(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where each tensor begins in memory of our own, and how much that is."""
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return starts, end


def joint(one: Move, other: Move) -> Move | None:
    """Two moves as one, where the second goes on where the first ends on both sides."""
    a, b = one.source, one.target
    if a.steps or b.steps or other.source.steps or other.target.steps or one.rank != other.rank:
        return None
    if a.offset + a.run != other.source.offset or b.offset + b.run != other.target.offset:
        return None
    run = a.run + other.source.run
    return Move(one.rank, Span(a.offset, run), Span(b.offset, run))


def gathered(moves: Sequence[Move], nbytes: int, memory: Callable[[Move], Bytes]) -> Bytes:
    """One tensor's bytes one after another; a view where they lie so."""
    if len(moves) == 1 and not moves[0].source.steps and not moves[0].target.steps:
        start = moves[0].source.offset
        return memory(moves[0])[start : start + nbytes]
    out = np.empty(nbytes, np.uint8)
    for move in moves:
        copy_span(out, move.target, memory(move), move.source)
    return out


def match(published: Manifest, needed: Manifest) -> list[int]:
    """For each unique tensor published, its index among the target's unique tensors.

    By any of its names that the target has; -1 where it has none.
    """
    owner = {t.name: t.alias_of or t.name for t in needed.tensors}
    index = {t.name: i for i, t in enumerate(needed.unique)}
    found = {t.name: -1 for t in published.unique}
    for t in published.tensors:
        if t.name in owner:
            found[t.alias_of or t.name] = index[owner[t.name]]
    return list(found.values())


def joint_moves(pieces: Iterable[Piece]) -> dict[int, list[Move]]:
    """For each tensor, how it is copied from arenas, in as few moves as can be."""
    found: dict[int, list[Move]] = {}
    for piece in pieces:
        move = Move(piece.rank, piece.source, piece.target)
        moves = found.setdefault(piece.tensor, [])
        together = joint(moves[-1], move) if moves else None
        if together is None:
            moves.append(move)
        else:
            moves[-1] = together
    return found
