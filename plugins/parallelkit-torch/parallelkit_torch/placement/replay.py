"""Repeats recorded copies: from received bytes straight into live memory, and back."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from parallelkit.errors import CorruptionError, ManifestError
from parallelkit.weights.inventory import KEEP
from parallelkit.weights.manifest import TensorSpec
from parallelkit.weights.overlap import Span, self_overlapping
from parallelkit_torch import tensors
from parallelkit_torch.names import Slot, slots
from parallelkit_torch.placement.boxes import doubled
from parallelkit_torch.placement.observe import DTYPES, Place
from parallelkit_torch.placement.proof import Proof, Route, Routes


class Replay:
    """The live ends of recorded copies. Tensors that were replaced by the like are followed."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._held: dict[str, Slot] = {}
        self._places: Sequence[Place] = ()
        self._used: list[int] = []
        self._ties: list[Tie] = []
        self._turned: dict[int, tuple[bool, bool]] = {}  # whether places are no plain views
        self._apart: list[object] = []  # where the places lay when they were seen not to overlap
        self._others: Sequence[str] | None = None  # written by the loader alone; None: perhaps all
        self._where: tuple[Span, ...] | None = None  # where the places of routes lie
        self._views: dict[Route, tuple[int, torch.Tensor]] = {}
        self._bytes: dict[Route, tuple[int, memoryview]] = {}
        self._whole: dict[Route, bool] = {}

    def use(self, proof: Proof) -> None:
        """From now on these routes are asked for."""
        self._places = proof.places
        self._used = sorted({route.place for routes in proof.routes.values() for route in routes})
        self._ties = ties(proof.places, self._used)
        self._others = sorted(proof.reached - {self._places[index].name for index in self._used})
        self._apart, self._where = [], None
        self._views.clear()
        self._bytes.clear()
        self._whole.clear()
        self.look()
        held = ((index, self._held.get(self._places[index].name)) for index in self._used)
        self._turned = {index: _turned(slot) for index, slot in held if slot is not None}

    def look(self) -> None:
        """Look at the module again."""
        self._held = _held(self._module)

    def check(self, *, keep: bool = True) -> None:
        """Look at the module again; it is about to be written.

        Args:
            keep: write to what was seen now. A thread that only looks must leave alone what
                another may be writing by.

        Raises:
            ManifestError: a place is not what it was when the loader was watched.
        """
        held = _held(self._module)
        problems = []
        for index in self._used:
            place, slot = self._places[index], held.get(self._places[index].name)
            if slot is None:
                problems.append(f"tensor {place.name!r} is no longer there")
                continue
            view, tensor = place.view, slot.tensor
            now = (tensor.dtype, tuple(tensor.shape), tensor.stride())
            if _turned(slot) != self._turned.get(index):  # its memory has not its values
                problems.append(f"tensor {place.name!r} is conjugated or negated, or was")
            elif now != (view.dtype, view.shape, view.strides):
                problems.append(
                    f"tensor {place.name!r} was {_layout(view.dtype, view.shape, view.strides)} "
                    f"and is now {_layout(*now)}"
                )
        apart = self._apart
        if not problems:
            problems, apart = self._changed_ties(held)
        if problems:
            more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
            raise ManifestError(f"{'; '.join(problems[:5])}{more}; {KEEP}")
        if keep:
            if apart is not self._apart:
                self._where = None
            self._held, self._apart = held, apart

    def _changed_ties(self, held: Mapping[str, Slot]) -> tuple[list[str], list[object]]:
        """What shared memory and does not, or does now and did not; places are all there.

        Also where the others lie that share none.
        """
        found = []
        for tie in self._ties:
            one, other = (self._places[index].name for index in (tie.used, tie.other))
            slot = held.get(other)  # of no route of its own, it may be gone
            where = held[one].tensor.data_ptr() + tie.distance
            if slot is not None and slot.tensor.data_ptr() != where:
                found.append(f"tensor {other!r} is no longer tied to {one!r}")
        tied = {tie.other for tie in self._ties}
        alone = [self._places[index].name for index in self._used if index not in tied]
        named = [(name, held[name].tensor) for name in alone]
        where_now = [tensors.identity(tensor) for _, tensor in named]
        if where_now != self._apart:  # same memory, same layout: same answer
            pair = tensors.overlap(named)
            if pair:
                found.append(f"tensor {pair[1]!r} shares memory with {pair[0]!r} now")
            return found, where_now
        return found, self._apart

    def located(self) -> tuple[Span, ...]:
        """Where everything lies that is written: by routes, as seen last, or by the loader.

        The same object as long as there are routes only, and nothing moved.
        """
        if self._where is None:
            used = (self._held.get(self._places[index].name) for index in self._used)
            self._where = _spans(slot for slot in used if slot is not None)
        others = self._held.keys() if self._others is None else self._others
        found = (self._held.get(name) for name in others)
        more = _spans(slot for slot in found if slot is not None)
        return (*self._where, *more) if more else self._where

    def live(self, route: Route) -> torch.Tensor:
        """The live elements that a route writes, in the shape of its move."""
        tensor = self._tensor(route)
        where = tensor.data_ptr()
        kept = self._views.get(route)
        if kept is not None and kept[0] == where:
            return kept[1]
        first = tensor.storage_offset() * tensor.element_size() // route.target.itemsize
        view = torch.empty(0, dtype=route.target, device=tensor.device)
        move = route.move
        view.set_(tensor.untyped_storage(), first + move.target, move.shape, move.target_steps)
        self._views[route] = (where, view)
        return view

    def _is_whole(self, spec: TensorSpec, route: Route) -> bool:
        known = self._whole.get(route)
        if known is None:
            known = self._whole[route] = whole(spec, route)
        return known

    def _tensor(self, route: Route) -> torch.Tensor:
        return self._held[self._places[route.place].name].tensor

    def direct(self, spec: TensorSpec, routes: Routes) -> memoryview | None:
        """The live bytes that are the published tensor's, row-major; None where there are none."""
        route = routes[0] if len(routes) == 1 else None
        if route is None or not self._is_whole(spec, route):
            return None
        tensor = self._tensor(route)
        if not tensor.is_cpu:
            return None
        where = tensor.data_ptr()
        kept = self._bytes.get(route)
        if kept is None or kept[0] != where:
            array: Any = self.live(route).reshape(-1).view(torch.uint8).numpy()
            kept = self._bytes[route] = (where, memoryview(array))
        return kept[1]

    def write(self, data: memoryview, routes: Routes) -> None:
        """Copy the row-major bytes of one published tensor to where its routes lead."""
        if not routes:
            return
        flat, owner = borrowed(data)
        with torch.no_grad():
            for route in routes:
                self.live(route).copy_(_source(flat, route))
        del flat, owner

    def differing(self, source: torch.Tensor, routes: Routes) -> str:
        """Compare live memory with what the routes would write; names the first difference."""
        flat = source.reshape(-1).view(torch.uint8)
        for route in routes:
            live = self.live(route)
            scratch = torch.empty(live.shape, dtype=live.dtype, device=live.device)
            scratch.copy_(_source(flat, route))
            if not torch.equal(_bits(scratch), _bits(live)):
                return self._places[route.place].name
        return ""

    def read(self, spec: TensorSpec, routes: Routes) -> memoryview:
        """Gather one published tensor from live memory, row-major."""
        direct = self.direct(spec, routes)
        if direct is not None:
            return direct
        out = torch.empty(math.prod(spec.shape), dtype=DTYPES[spec.dtype], device="cpu")
        flat = out.view(torch.uint8)
        with torch.no_grad():
            for route in routes:
                _source(flat, route).copy_(self.live(route))
        for route in routes if len(routes) > 1 else ():  # one published for several places
            if not torch.equal(_bits(_source(flat, route)), _bits(self.live(route))):
                names = sorted({self._places[route.place].name for route in routes})
                raise CorruptionError(
                    f"tensor {spec.name!r} was placed into {', '.join(names)}, and these differ",
                    tensors=[spec.name],
                )
        return tensors.as_bytes(out)


def _held(module: nn.Module) -> dict[str, Slot]:
    return {slot.name: slot for slot in slots(module, transient=True)}


def _spans(held: Iterable[Slot]) -> tuple[Span, ...]:
    """Where tensors lie, of those that are there still and have memory."""
    now = ((slot.name, slot.holder.get(slot.key)) for slot in held)
    return tensors.located(
        (name, tensor)
        for name, tensor in now
        if tensor is not None and tensor.layout is torch.strided and not tensor.is_meta
    )


def _turned(slot: Slot) -> tuple[bool, bool]:
    return slot.tensor.is_conj(), slot.tensor.is_neg()


class Tie(NamedTuple):
    """Two places, by index, that share bytes; the first has a route, and `distance` is in bytes."""

    used: int
    other: int
    distance: int


def ties(places: Sequence[Place], used: Sequence[int]) -> list[Tie]:
    """Which places share bytes with those that are used; pure."""
    routed = set(used)
    by_memory: dict[int, list[tuple[int, int, int]]] = {places[index].memory: [] for index in used}
    for index, place in enumerate(places):
        box = place.view.box()
        if place.memory in by_memory and box.count:
            by_memory[place.memory].append((box.start, box.end, index))
    found = []
    for spans in by_memory.values():
        near: list[tuple[int, int, int]] = []
        for span in sorted(spans):
            start, _, index = span
            near = [other for other in near if other[1] > start]
            for first, _, other in near:
                one, two = (other, index) if other in routed else (index, other)
                boxes = [places[one].view.box(), places[two].view.box()]
                if one in routed and doubled(boxes):
                    found.append(Tie(one, two, start - first if one == other else first - start))
            near.append(span)
    return found


def whole(spec: TensorSpec, route: Route) -> bool:
    """Whether a route moves a published tensor as it is, one run of bytes at both ends."""
    same = route.source == route.target == DTYPES[spec.dtype]
    return same and route.move.whole(math.prod(spec.shape))


def invertible(route: Route) -> bool:
    """Whether what a route wrote tells what it was made of."""
    move = route.move
    return route.source == route.target and not self_overlapping(move.shape, move.source_steps)


def borrowed(data: memoryview) -> tuple[torch.Tensor, Any]:
    """A tensor over bytes that may be read-only, and what must be kept as long as it is used.

    It is only read: torch has no read-only tensors and warns where Python says that memory is one.
    """
    array = np.frombuffer(data, np.uint8)
    if array.ctypes.data % 16:  # elements must not straddle; the plan aligns them, others may not
        array = array.copy()
    memory = (ctypes.c_ubyte * array.nbytes).from_address(array.ctypes.data)
    return torch.frombuffer(memory, dtype=torch.uint8), (array, memory)


def _source(flat: torch.Tensor, route: Route) -> torch.Tensor:
    """The elements that a route takes, of a published tensor's bytes."""
    move = route.move
    elements = flat[: len(flat) // route.source.itemsize * route.source.itemsize]
    return elements.view(route.source).as_strided(move.shape, move.source_steps, move.source)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _layout(dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int]) -> str:
    name = str(dtype).removeprefix("torch.")
    return f"{name}{list(shape)} of strides {list(strides)}"
