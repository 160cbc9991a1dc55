"""From the notes of a run to what can be repeated without the loader, and what is wrong.

A pure function: nothing is run or written here.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence

import attrs
import torch

from parallelkit.weights.manifest import Manifest, TensorSpec
from parallelkit.weights.overlap import self_overlapping
from parallelkit_torch.placement.again import Written, reached, written
from parallelkit_torch.placement.boxes import Box, doubled, missing_rows
from parallelkit_torch.placement.moves import Move, merged
from parallelkit_torch.placement.observe import DTYPES, Notes, Place
from parallelkit_torch.placement.record import Copy, View


@attrs.frozen(eq=False)  # each one is itself, found fast
class Route:
    """One copy of a published tensor's elements into one place.

    Attributes:
        place: index among the places.
        source, target: dtypes that the elements are seen as.
        move: offsets from the first element of the published tensor and of the place.
    """

    place: int
    source: torch.dtype
    target: torch.dtype
    move: Move


Routes = tuple[Route, ...]


@attrs.frozen
class Proof:
    """What a run shows.

    Attributes:
        places: the module's parameters and buffers; routes number them.
        routes: by unique published name, for those that need no loader.
        reasons: why the others do.
        partial: of `routes`, those of which the target keeps only some elements.
        touched: by unique published name, what the loader writes from it.
        reached: names of the places that it writes, from whatever.
        problems: one line for each way in which the manifest is not what the target needs.
    """

    places: tuple[Place, ...]
    routes: dict[str, Routes]
    reasons: dict[str, str]
    partial: frozenset[str]
    touched: Written
    reached: frozenset[str]
    problems: tuple[str, ...]


def prove(published: Manifest, notes: Notes) -> Proof:
    """Check that every parameter gets each element exactly once, and nothing is left over.

    Every element of every parameter, and of every buffer that gets any, has to come from a
    published tensor. What the loader fills by itself (padding) counts beside such values.
    """
    reasons = dict(notes.reasons)
    located = _Located(notes)
    copies = [(copy, located.place(copy)) for copy in dict.fromkeys(notes.copies)]
    for copy, place in copies:
        problem = _unrepeatable(copy, None if place is None else notes.places[place])
        if problem:
            reasons.setdefault(copy.name, problem)
    problems = _find_doubled(notes, reasons)
    problems += _find_missing(notes)
    used = {copy.name for copy, _ in copies} | reasons.keys()
    problems += _find_unused(published, notes, used)
    routes, partial = {}, set()
    by_name: dict[str, list[tuple[Copy, int | None]]] = {}
    for copy, place in copies:
        by_name.setdefault(copy.name, []).append((copy, place))
    for spec in published.unique:
        if spec.name in reasons:
            continue
        if notes.sets:
            reasons[spec.name] = f"comes with {notes.sets}, which the loader sets too"
            continue
        mine = by_name.get(spec.name, [])
        routes[spec.name] = _routes(mine, notes.places)
        if missing_rows(_whole(spec), [copy.source.box() for copy, _ in mine]):
            partial.add(spec.name)
    return Proof(
        notes.places,
        routes,
        reasons,
        frozenset(partial),
        written(notes),
        reached(notes),
        tuple(problems),
    )


class _Located:
    """Which place a view of a memory is in."""

    def __init__(self, notes: Notes) -> None:
        self._notes = notes
        self._by_memory: dict[int, list[tuple[int, int, int]]] = {}
        for index, place in enumerate(notes.places):
            box = place.view.box()
            self._by_memory.setdefault(place.memory, []).append((index, box.start, box.end))

    def place(self, copy: Copy) -> int | None:
        """The first place that has the whole of what was written, if one has."""
        box = copy.target.box()
        first, last = box.start, box.end
        for index, start, end in self._by_memory.get(copy.memory, ()):
            if start <= first and last <= end:
                return index
        return None


def _unrepeatable(copy: Copy, place: Place | None) -> str:
    """Why a plain copy cannot be repeated; empty if it can."""
    if place is None:
        return "is written outside of every parameter and buffer"
    if self_overlapping(copy.target.shape, copy.target.strides):
        return f"is written into an expanded view of {place.name!r}"
    if (copy.target.box().start - place.view.box().start) % copy.target.dtype.itemsize:
        return f"is written into {place.name!r} as another dtype, between its elements"
    return ""


def _find_doubled(notes: Notes, reasons: dict[str, str]) -> list[str]:
    """Send names that are written over one another to the loader; returns what is not allowed."""
    problems = []
    memories: dict[int, list[tuple[frozenset[str], Box]]] = {}
    for copy in dict.fromkeys(notes.copies):
        written = (frozenset([copy.name]), copy.target.box())
        memories.setdefault(copy.memory, []).append(written)
    for write in notes.writes:
        memories.setdefault(write.memory, []).append((write.names, write.target.box()))
    for memory, writes in memories.items():
        indexes = doubled([box for _, box in writes])
        if not indexes:
            continue
        names = sorted(frozenset().union(*(writes[index][0] for index in indexes)))
        held = [place.name for place in notes.places if place.memory == memory]
        by = ", ".join(map(repr, names[:3])) + (", ..." if len(names) > 3 else "")
        for name in names:
            reasons.setdefault(name, f"elements of {held[0]!r} are written more than once, by {by}")
        if len(names) > 1 and len(held) > 1 and _tied(notes.places, memory):
            problems.append(
                f"aliases: the target ties {held}, the publisher sends {names} for it, which "
                "may come to hold different values"
            )
    return problems


def _find_missing(notes: Notes) -> list[str]:
    """Parameters, and buffers that are written, of which elements get no published value."""
    problems: list[str] = []
    done: set[tuple[int, View]] = set()
    values: dict[int, list[Box]] = {}
    owns: dict[int, list[Box]] = {}
    for copy in notes.copies:
        values.setdefault(copy.memory, []).append(copy.target.box())
    for write in notes.writes:
        boxes = values if write.names else owns
        boxes.setdefault(write.memory, []).append(write.target.box())
    for place in notes.places:
        if (place.memory, place.view) in done:
            continue
        done.add((place.memory, place.view))
        claim = ", although it says that it loaded it" if place.name in notes.claimed else ""
        what = f"{place.name!r} ({_describe(place.view)})"
        if place.name in notes.rehomed:
            if place.parameter and not notes.rehomed[place.name]:
                problems.append(f"missing: the loader gives {what} memory without a value{claim}")
            continue
        given = _near(values, place)
        own = _near(owns, place)
        if place.transient or (not given and not place.parameter):
            if claim and not own and not given:
                problems.append(f"missing: the loader wrote nothing to {what}{claim}")
            continue
        rows = missing_rows(place.view.box(), [*given, *own] if given else [])
        if rows:
            problems.append(f"missing: the loader gives {what} no value{_said(rows, place)}{claim}")
    return problems


def _find_unused(published: Manifest, notes: Notes, used: set[str]) -> list[str]:
    problems: list[str] = []
    known = {place.name for place in notes.places} | used
    for spec in published.unique:
        if spec.name in used or not spec.nbytes:
            continue
        close = difflib.get_close_matches(spec.name, known - {spec.name}, n=1, cutoff=0.6)
        hint = f"; did you mean {close[0]!r}?" if close and not problems[20:] else ""
        claim = ", although it says that it loaded it" if spec.name in notes.claimed else ""
        problems.append(
            f"unknown: the publisher sends {spec.name!r} ({spec.describe()}), the loader writes "
            f"nothing of it{claim}{hint}"
        )
    return problems


def _routes(mine: Sequence[tuple[Copy, int | None]], places: Sequence[Place]) -> Routes:
    groups: dict[tuple[int, torch.dtype, torch.dtype], list[Move]] = {}
    for copy, place in mine:
        assert place is not None  # `_unrepeatable` said so
        source, target = copy.source, copy.target
        first = places[place].view.box().start // target.dtype.itemsize
        start = target.offset - first
        steps = tuple(zip(source.strides, target.strides, strict=True))
        move = Move(target.shape, steps, start, source.offset)
        groups.setdefault((place, source.dtype, target.dtype), []).append(move)
    return tuple(
        Route(place, source, target, move)
        for (place, source, target), moves in groups.items()
        for move in merged(moves)
    )


def _near(memories: dict[int, list[Box]], place: Place) -> list[Box]:
    """Those boxes of a place's memory that may have a byte of it."""
    boxes = memories.get(place.memory, [])
    if not boxes:
        return []
    whole = place.view.box()
    start, end = whole.start, whole.end
    return [box for box in boxes if box.start < end and box.end > start]


def _tied(places: Sequence[Place], memory: int) -> bool:
    views = [place.view for place in places if place.memory == memory]
    return len(set(views)) < len(views)


def _said(rows: Sequence[tuple[int, int]], place: Place) -> str:
    shape = place.view.shape
    if not shape or list(rows) == [(0, shape[0])]:
        return ""
    ranges = ", ".join(f"{a}:{b}" for a, b in rows[:5]) + (", ..." if len(rows) > 5 else "")
    return f" in rows {ranges} of {shape[0]}"


def _describe(view: View) -> str:
    return f"{str(view.dtype).removeprefix('torch.')}{list(view.shape)}"


def _whole(spec: TensorSpec) -> Box:
    item = DTYPES[spec.dtype].itemsize
    steps, step = [], item
    for n in reversed(spec.shape):
        steps.append(step)
        step *= n
    return Box(0, item, spec.shape, tuple(reversed(steps)))
