"""One run of a loader, watched: on the live module, or on a copy of it that has no data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import attrs
import torch
from torch import nn

from parallelkit.errors import LoaderError
from parallelkit.weights.manifest import Manifest
from parallelkit_torch.names import Slot, slots, unwrap
from parallelkit_torch.placement.record import (
    Copy,
    Recorder,
    ValuesNeededError,
    View,
    Write,
    memory_of,
)
from parallelkit_torch.placement.sets import Sets
from parallelkit_torch.placement.twin import Loader, without_data

#: Allowed dtypes by the manifest's names; nothing from the wire is looked up elsewhere.
DTYPES: Mapping[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32),
        *(torch.int32, torch.uint64, torch.int64, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.complex64, torch.complex128),
    )
}
#: What torch's errors say where a tensor has no data.
_NO_DATA: Final = ("meta", "unallocated storage", "no storage", "data pointer", "data_ptr")


@attrs.frozen
class Place:
    """A parameter or buffer, as it lay when the loader was called."""

    name: str
    view: View
    memory: int
    parameter: bool
    transient: bool = False


@attrs.frozen
class Notes:
    """What one run of a loader did.

    Attributes:
        places: the module's parameters and buffers, before the run.
        copies, writes, reasons: as `Recorder` has them.
        claimed: names that the loader said it loaded.
        rehomed: places that it gave other memory, and the incoming names whose values are there.
        sets: an attribute of the module that it set, for people; empty if it set none.
        ways: what was done to names that have `reasons`, operation by operation.
    """

    places: tuple[Place, ...]
    copies: tuple[Copy, ...]
    writes: tuple[Write, ...]
    reasons: dict[str, str]
    claimed: frozenset[str]
    rehomed: dict[str, frozenset[str]]
    sets: str = ""
    ways: dict[str, tuple[str, ...]] = attrs.field(factory=dict)


def places_of(held: Sequence[Slot]) -> tuple[Place, ...]:
    """Where the tensors of a module lie now."""
    return tuple(
        Place(
            slot.name,
            View.of(slot.tensor),
            memory_of(slot.tensor),
            isinstance(slot.tensor, nn.Parameter),
            slot.transient,
        )
        for slot in held
    )


def observe(
    loader: Loader,
    offered: Mapping[str, torch.Tensor],
    held: Sequence[Slot],
    *,
    forbidden: Iterable[torch.Tensor] = (),
    parts: Iterable[nn.Module] = (),
) -> tuple[Notes, Recorder]:
    """Call the loader once, with the tensors offered, and note what it does.

    Args:
        held: the module's parameters and buffers.
        forbidden: as `Recorder`.
        parts: the module and all within it.

    Returns:
        The notes, and the recorder, which can tell later what is still held.

    Raises:
        LoaderError: the loader raised; chained to the cause.
        ValuesNeededError: it has to be called with data.
    """
    places = places_of(held)
    recorder = Recorder(offered, [slot.tensor for slot in held], forbidden=forbidden)
    sets = Sets(parts, recorder.knows)
    last = ""

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal last
        for name, tensor in offered.items():
            last = name
            yield name, tensor

    try:
        with torch.no_grad(), recorder, recorder.outside(), sets:
            answer = loader(weights())
            claimed = frozenset(() if answer is None else map(str, answer))
    except Exception as error:
        if recorder.cannot:
            raise ValuesNeededError(recorder.cannot) from error
        where = f"at {last!r}" if last else "before it took a tensor"
        raise LoaderError(f"the loader raised {where}: {type(error).__name__}: {error}") from error
    if recorder.cannot:  # and it went on as if nothing had happened
        raise ValuesNeededError(recorder.cannot)
    rehomed = {}
    for place, slot in zip(places, held, strict=True):
        tensor = slot.holder.get(slot.key)
        if tensor is None or memory_of(tensor) != place.memory:
            rehomed[place.name] = (
                frozenset() if tensor is None else recorder.holds(memory_of(tensor))
            )
    notes = Notes(
        places,
        tuple(recorder.copies),
        tuple(recorder.writes),
        dict(recorder.reasons),
        claimed,
        rehomed,
        sets.found,
        {name: tuple(ways) for name, ways in recorder.ways.items()},
    )
    return notes, recorder


def observe_on_copy(
    module: nn.Module, loader: Loader, published: Manifest, names: Sequence[str] | None = None
) -> Notes:
    """Run the loader on a copy of the module without data, with tensors without data.

    Neither the module nor the loader given is changed.

    Args:
        names: which tensors to offer; all of the manifest by default.

    Raises:
        LoaderError: the loader raised for a reason of its own.
        ValuesNeededError: this loader cannot be run so; the text says why.
    """
    owners = {t.name: t.alias_of or t.name for t in published.tensors}
    wanted = set(owners if names is None else names)
    unique = {
        t.name: torch.empty(t.shape, dtype=DTYPES[t.dtype], device="meta") for t in published.unique
    }
    root = unwrap(module)
    twin, twin_loader = without_data(root, loader)
    offered = {name: unique[owner] for name, owner in owners.items() if name in wanted}
    del unique
    live = [slot.tensor for slot in slots(root, transient=True)]
    try:
        notes, recorder = observe(
            twin_loader,
            offered,
            slots(twin, transient=True),
            forbidden=live,
            parts=twin.modules(),
        )
    except LoaderError as error:
        cause = error.__cause__
        if isinstance(cause, NotImplementedError) or any(s in str(cause).lower() for s in _NO_DATA):
            raise ValuesNeededError(f"it does not work without data ({cause})") from error
        raise
    del offered
    for name in recorder.retained():
        notes.reasons.setdefault(name, "is kept by the loader or the module after loading")
    return notes
