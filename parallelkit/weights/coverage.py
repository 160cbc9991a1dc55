"""Whether the members of one group together keep everything: what none of them has, by name.

Tensors of one kind of which every member keeps the same are looked at once, so that the work is
linear in tensors times members for a table lookup, and in boxes for the few kinds that there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from parallelkit.errors import CoverageError
from parallelkit.weights.layout import Region
from parallelkit.weights.manifest import Manifest
from parallelkit.weights.needs import Needs
from parallelkit.weights.regions import intersection, whole

#: So many tensors, and boxes of each, are listed in one message.
_TENSORS: Final = 10
_BOXES: Final = 4


def check_coverage(manifest: Manifest, needs: Iterable[Needs], who: str) -> None:
    """Raise `CoverageError` unless every element of every tensor is kept by a member.

    Args:
        manifest: what is published.
        needs: what each member keeps; who: all of them, for the message.
    """
    found = gaps(manifest, needs)
    if not found:
        return
    lines = [
        f"{t.name!r} ({t.describe()}): " + _listed(boxes, t.shape)
        for t, boxes in ((manifest.unique[i], boxes) for i, boxes in found.items())
    ]
    shown = lines[:_TENSORS]
    shown += [f"... and {len(lines) - _TENSORS} more"] if len(lines) > _TENSORS else []
    raise CoverageError(
        f"not all that is published is kept by {who}; of {len(lines)} of {len(manifest.unique)} "
        "tensors there is missing:\n  "
        + "\n  ".join(shown)
        + "\nNothing was touched. All ranks of a target subscribe with one ticket, and together "
        "they hold every tensor; one that is meant to lack some says so: "
        "pk.subscribe_weights(..., partial=True)",
        differences=lines,
    )


def gaps(manifest: Manifest, needs: Iterable[Needs]) -> dict[int, list[Region]]:
    """Boxes that nobody keeps, by unique tensor, ascending; empty where everything is kept."""
    members = list(dict.fromkeys(needs))
    if Needs.whole(manifest) in members:
        return {}
    kinds, which = manifest.kinds
    first, classes = _classes(np.frombuffer(which, np.int32), len(kinds), members)
    missing: dict[int, list[Region]] = {}
    for number, tensor in enumerate(first):
        kept = (member[tensor] for member in members)
        left = uncovered(kinds[which[tensor]].shape, [box for box in kept if box is not None])
        if left:
            missing[number] = left
    bad = np.flatnonzero(np.isin(classes, list(missing)))
    return {int(tensor): missing[int(classes[tensor])] for tensor in bad}


def uncovered(shape: Sequence[int], boxes: Iterable[Region]) -> list[Region]:
    """The elements of a tensor that are in none of the boxes, as boxes that do not overlap."""
    everything = whole(shape)
    left = [everything] if everything.elements else []
    for box in sorted(set(boxes)):  # in order, what is left stays in few pieces
        left = [piece for rest in left for piece in _without(rest, box)]
        if not left:
            break
    return left


def _classes(
    kinds: np.ndarray[tuple[int], np.dtype[np.int32]], count: int, members: Sequence[Needs]
) -> tuple[list[int], np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """Number the combinations of a kind and of what each member keeps.

    Returns:
        The first tensor of each combination, and for each tensor the number of its own.
    """
    keys, bound = kinds.astype(np.int64), count
    for member in members:
        size = len(member.regions) + 1
        if bound > 2**62 // size:  # number them anew, by those that there are
            keys = np.unique(keys, return_inverse=True)[1].reshape(-1)
            bound = int(keys.max(initial=0)) + 1
        keys = keys * size + member.which + 1
        bound *= size
    _, first, classes = np.unique(keys, return_index=True, return_inverse=True)
    return first.tolist(), classes.reshape(-1)


def _without(rest: Region, box: Region) -> list[Region]:
    """What of a box is not in another one."""
    meet = intersection(rest, box)
    if meet is None:
        return [rest]
    pieces = []
    low, size = list(rest.offsets), list(rest.sizes)
    for dim, (start, extent) in enumerate(zip(*meet, strict=True)):
        end, last = start + extent, low[dim] + size[dim]
        for first, stop in ((low[dim], start), (end, last)):
            if stop > first:
                lows, sizes = low.copy(), size.copy()
                lows[dim], sizes[dim] = first, stop - first
                pieces.append(Region(tuple(lows), tuple(sizes)))
        low[dim], size[dim] = start, extent
    return pieces


def _listed(boxes: Sequence[Region], shape: Sequence[int]) -> str:
    """`[4:8, 0:6]`, or that it is all."""
    if list(boxes) == [whole(shape)]:
        return "all of it"
    said = [
        "[" + ", ".join(f"{low}:{low + n}" for low, n in zip(*box, strict=True)) + "]"
        for box in boxes[:_BOXES]
    ]
    return ", ".join(said) + (", ..." if len(boxes) > _BOXES else "")
