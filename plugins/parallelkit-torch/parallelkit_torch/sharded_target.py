"""A module of which every rank holds a part, as a target: it gets its own parts, in place.

Each rank of the target subscribes by itself, with `member=rank` of one ticket, and says which boxes
of the global tensors it keeps. Nothing here is collective, and no tensor is ever whole.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final, NamedTuple, final

import torch
from torch import nn

from parallelkit.errors import ManifestError, StateError, UnsupportedFeatureError
from parallelkit.protocols import WeightSink
from parallelkit.weights.inventory import KEEP, Found, describe, match
from parallelkit.weights.layout import Region
from parallelkit.weights.manifest import Manifest
from parallelkit.weights.overlap import Span
from parallelkit.weights.subscriber import SERVE_THREAD
from parallelkit_torch import sharding, tensors
from parallelkit_torch.cuda.target import DeviceTarget
from parallelkit_torch.names import Slot, refuse_frozen, refuse_hidden_state
from parallelkit_torch.weights import ModuleSink

_PARTS: Final = "its parts stay as they are while it is subscribed; subscribe it again"


def weight_sink(module: nn.Module) -> WeightSink:
    """The sink for a module: for parts where it is spread over ranks, else for a whole model.

    Raises:
        ManifestError: it keeps state that is no tensor of its own, or as the sinks do.
    """
    for _, part in sharding.stages(module) or [(0, module)]:
        refuse_hidden_state(part)
    return ShardedModuleSink(module) if sharding.is_spread(module) else ModuleSink(module)


class _Held(NamedTuple):
    """One tensor that is here: as the module has it, this rank's part, and which box that is."""

    tensor: torch.Tensor
    part: torch.Tensor
    box: Region


@final
class ShardedModuleSink(DeviceTarget):
    """A module spread over ranks that weights are placed into; a `protocols.RegionSink`.

    It needs the tensors that are on this rank: of a pipeline those of its own stages. Bytes are
    those of the local parts, row-major. Contiguous parts on the CPU are written in place by the
    caller, through `destination`, all others by `write`; addresses never change. A name that two
    stages of this rank have is written in both.

    Before live memory is touched, `fully_shard` units give up the whole copies that a forward may
    have left. That is done by the user's own thread alone: the thread of `subscriber.serve()` only
    looks whether every name is still there.
    """

    def __init__(self, module: nn.Module) -> None:
        """Read names, dtypes, shapes and boxes of what is on this rank; no data, no peer.

        Raises:
            ManifestError: a tensor has no bytes here, or its dtype is not allowed, by name.
            UnsupportedFeatureError: partial sums, or parts that are no boxes, by name.
        """
        self._module = module
        self._cut = sharding.Boxes()
        self._views = tensors.LiveViews()
        self._open = False
        self._slots: list[Slot] = []
        self._writable: list[object] = []
        self._live: Sequence[Span] = ()  # where the parts lie of which `_writable` tells
        found, held = self._find()
        self._manifest, places = describe(found)
        self._held = _by_tensor(places, held)
        self._boxes = tuple(group[0].box for group in self._held)
        self._refuse_overlaps()

    @property
    def device(self) -> str:
        """Where the parts are: `"cpu"`, `"cuda:0"`; of the first one, if they differ."""
        return next((str(group[0].part.device) for group in self._held), "cpu")

    @property
    def module(self) -> nn.Module:
        """The module as it was given, wrappers included."""
        return self._module

    def needs(self) -> Manifest:
        """What is on this rank, with global shapes; raises as `check` does."""
        self.check()
        return self._manifest

    def regions(self) -> Sequence[Region]:
        """The box that this rank keeps of each unique tensor of `needs()`; some may be empty."""
        return self._boxes

    def check(self) -> None:
        """Look at the module again: it is about to be written.

        Raises:
            ManifestError: it has other names, dtypes, shapes, ties or parts than before; or it
                cannot be written, since elements of a part share memory, or two parts overlap.
            UnsupportedFeatureError: as when it was made.
        """
        if threading.current_thread().name == SERVE_THREAD:
            for slot in self._slots:
                if slot.holder.get(slot.key) is None:
                    raise ManifestError(f"tensor {slot.name!r} is no longer there; {KEEP}")
            return
        refuse_frozen(self._module)
        found, held = self._find()
        self._held = _by_tensor(match(self._manifest, found), held)
        for spec, group, box in zip(self._manifest.unique, self._held, self._boxes, strict=True):
            if group[0].box != box:
                raise ManifestError(
                    f"tensor {spec.name!r} was {_text(box)} on this rank and is now "
                    f"{_text(group[0].box)}; {_PARTS}"
                )
        self._refuse_overlaps()

    def begin(self) -> None:
        """Wait for what still reads the old values, and let parts be written.

        Raises as `check` does.
        """
        self.check()
        tensors.settle(held.part for group in self._held for held in group)
        self._open = True

    def live_memory(self) -> Sequence[Span]:
        """Where the parts lie, as `begin` saw them."""
        return self._live

    def destination(self, index: int) -> memoryview | None:
        """The live bytes of this rank's part of tensor `index`; None if `write` has to be used."""
        self._check_open("destination")
        group = self._held[index]
        return self._views.of(index, group[0].part) if len(group) == 1 else None

    def write(self, index: int, data: memoryview) -> None:
        """Copy the row-major bytes of this rank's part of tensor `index` into it."""
        self._check_open("write")
        for held in self._held[index]:
            tensors.fill(self._manifest.unique[index].name, held.part, data)

    def host_bytes(self, index: int) -> memoryview:
        """This rank's part of tensor `index`, row-major; valid until the next call.

        The live memory where the part is contiguous on the CPU, else a copy.
        """
        part = self._held[index][0].part
        view = self._views.of(index, part)
        return tensors.as_bytes(part) if view is None else view

    def finish(self) -> None:
        """Tell torch that every tensor changed: see `tensors.mark_written`."""
        self._check_open("finish")
        self._open = False
        everything = [t for group in self._held for held in group for t in held[:2]]
        tensors.mark_written({id(t): t for t in everything}.values())
        tensors.settle(held.part for group in self._held for held in group)

    # --- inner parts

    def _parts(self) -> Sequence[Sequence[torch.Tensor]]:
        return [[held.part for held in group] for group in self._held]

    def _find(self) -> tuple[list[Found], list[list[_Held]]]:
        """Every name that is here, with what it names; a name of two stages has two things."""
        sharding.reshard(self._module)
        slots: list[Slot] = []
        by_name: dict[str, list[_Held]] = {}
        problems: dict[str, str] = {}
        for _, slot in sharding.held(self._module):
            slots.append(slot)
            tensor = slot.tensor
            part = sharding.local_part(tensor)
            problem = tensors.unreadable(part)
            if problem:
                problems.setdefault(slot.name, problem)
                box: Region | None = Region((), ())
            else:
                box = self._cut.of(slot.name, tensor)
            if box is not None:  # else on other ranks alone
                by_name.setdefault(slot.name, []).append(_Held(tensor, part, box))
        self._slots = slots
        found = [
            Found(name, problem=problems[name]) if name in problems else _found(name, held)
            for name, held in by_name.items()
        ]
        return found, list(by_name.values())

    def _refuse_overlaps(self) -> None:
        """Raise if writing one element would change another; looked at once for one memory."""
        identities = [tensors.identity(held.part) for group in self._held for held in group]
        if identities == self._writable:
            return
        unique = zip(self._manifest.unique, self._held, strict=True)
        named = [(spec.name, x.part) for spec, group in unique for x in group]
        tensors.refuse_overlaps(named)
        self._writable, self._live = identities, tensors.located(named)

    def _check_open(self, what: str) -> None:
        if not self._open:
            raise StateError(f"ShardedModuleSink.{what} was called outside begin and finish")


def _found(name: str, held: Sequence[_Held]) -> Found:
    """What the inventory wants to know of a name.

    Raises:
        UnsupportedFeatureError: two stages of this rank keep different boxes of it.
    """
    tensor, part, box = held[0]
    other = next((x for x in held if x.box != box or x.tensor.shape != tensor.shape), None)
    if other is not None:
        raise UnsupportedFeatureError(
            f"tensor {name!r} is {_text(box)} in one stage of this rank and {_text(other.box)} in "
            "another; divide it in both alike"
        )
    # An empty part is another object at each look; the tensor it is part of is not.
    what = tensors.identity(part) if part.numel() else id(tensor)
    shape = tuple(tensor.shape)
    return Found(name, tensors.dtype_name(part), shape, (what, shape, box))


def _by_tensor(
    places: Sequence[Sequence[int]], held: Sequence[Sequence[_Held]]
) -> list[list[_Held]]:
    """For each unique tensor everything that has its values here, each memory once."""
    groups: list[list[_Held]] = []
    for names in places:
        memory: dict[object, _Held] = {}
        for place in names:
            for x in held[place]:
                memory.setdefault(tensors.identity(x.part) if x.part.numel() else 0, x)
        groups.append(list(memory.values()))
    return groups


def _text(box: Region) -> str:
    """`[0:4, 2:6]`."""
    cuts = (f"{low}:{low + n}" for low, n in zip(box.offsets, box.sizes, strict=True))
    return f"[{', '.join(cuts)}]"
