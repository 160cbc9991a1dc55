"""Whether a loader did again what it did when it was watched first. Pure: nothing is run here.

A loader that keeps a state of its own may write less the next time, or elsewhere. Either would
leave a module that is part old and part new.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import attrs

from parallelkit_torch.placement.boxes import Box, doubled, missing_rows
from parallelkit_torch.placement.observe import Notes
from parallelkit_torch.placement.record import Copy, Write

if TYPE_CHECKING:
    from parallelkit_torch.placement.proof import Routes

#: By published name and place, the bytes that got values of that name, from the place's first on;
#: None where the place was given other memory, which may be of another size each time.
Written = Mapping[str, Mapping[str, frozenset[Box] | None]]


def written(notes: Notes) -> Written:
    """What a run wrote from each published name, in whatever form."""
    boxes: dict[str, dict[str, set[Box]]] = {}
    for place, box, names in _located(notes):
        for name in names:
            boxes.setdefault(name, {}).setdefault(place, set()).add(box)
    found: dict[str, dict[str, frozenset[Box] | None]] = {
        name: {place: frozenset(some) for place, some in places.items()}
        for name, places in boxes.items()
    }
    for place, names in notes.rehomed.items():
        for name in names:
            found.setdefault(name, {})[place] = None
    return found


def reached(notes: Notes) -> frozenset[str]:
    """Names of the places that a run wrote any byte of, or gave other memory."""
    return frozenset(place for place, *_ in _located(notes)) | notes.rehomed.keys()


def left_out(first: Written, now: Written, names: Iterable[str]) -> str:
    """What of these names was written at first and is not now, for people; empty if nothing is."""
    for name in names:
        places = first.get(name, {})
        lacking = sorted(p for p in places if p not in now.get(name, {}))
        if lacking:
            return f"nothing of {name!r} to {', '.join(map(repr, lacking[:3]))}"
        for place, boxes in places.items():
            given = now[name][place]
            if boxes is None or given is None:
                continue
            if any(missing_rows(box, given) for box in boxes - given):
                return f"only a part of {name!r} to {place!r}"
    return ""


def beside(notes: Notes, routes: Mapping[str, Routes], held: Iterable[str]) -> str:
    """A place of which a run wrote bytes that recorded copies write; empty if there is none.

    Args:
        notes: of a run that was given none of the names which have `routes`.
        held: the names of the places that routes number.
    """
    names = list(held)
    recorded: dict[str, list[Box]] = {}
    for route in (route for found in routes.values() for route in found):
        item, move = route.target.itemsize, route.move
        steps = tuple(step * item for step in move.target_steps)
        box = Box(move.target * item, item, move.shape, steps)
        recorded.setdefault(names[route.place], []).append(box)
    for place in recorded.keys() & notes.rehomed.keys():
        return place
    for place, box, _ in _located(notes, recorded.keys()):
        if 0 in doubled([box, *recorded[place]]):
            return place
    return ""


def _located(
    notes: Notes, only: Iterable[str] | None = None
) -> Iterator[tuple[str, Box, frozenset[str]]]:
    """Everything written, by each place that has any of it, from the place's first byte on."""
    wanted = None if only is None else set(only)
    places: dict[int, list[tuple[str, int, int]]] = {}
    for place in notes.places:
        if wanted is None or place.name in wanted:
            box = place.view.box()
            places.setdefault(place.memory, []).append((place.name, box.start, box.end))
    everything: list[Copy | Write] = [*notes.copies, *notes.writes]
    for one in everything:
        box = one.target.box()
        for name, start, end in places.get(one.memory, ()):
            if box.start < end and box.end > start:
                names = frozenset([one.name]) if isinstance(one, Copy) else one.names
                yield name, attrs.evolve(box, start=box.start - start), names
