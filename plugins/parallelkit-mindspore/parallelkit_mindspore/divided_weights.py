"""Weights of a Cell whose layers a context divided over its tensor axis.

Every rank publishes, or takes, its own parts: `parallelkit.weights.layout` says which. They are
read and written by `CellSource` and `CellSink`, for which each part is a tensor of its own.
What MindSpore divides by itself (`semi_auto`, `auto`) is refused by the name of a parameter.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, final

import attrs

from parallelkit.errors import ManifestError, RankMismatchError, StateError, UnsupportedFeatureError
from parallelkit.protocols import ProcessGroup, WeightSink, WeightSource
from parallelkit.weights.assembly import Digit, make_mesh
from parallelkit.weights.collective import pack_error, unpack_error
from parallelkit.weights.layout import Region, ShardLayout
from parallelkit.weights.manifest import Manifest, TensorSpec
from parallelkit.weights.overlap import Span
from parallelkit.weights.subscriber import SERVE_THREAD
from parallelkit_mindspore import memory
from parallelkit_mindspore.names import slots
from parallelkit_mindspore.weights import CellSink, CellSource

#: What the axis is called in manifests, and in plans.
_AXIS: Final = "tensor"


def weight_source(model: Any) -> WeightSource:
    """The source for a Cell: of this rank's parts where a context divided it, else of the whole."""
    return DividedCellSource(model) if _is_divided(model) else CellSource(model)


def weight_sink(model: Any) -> WeightSink:
    """The sink for a Cell: for this rank's parts where a context divided it, else for the whole."""
    return DividedCellSink(model) if _is_divided(model) else CellSink(model)


@final
class DividedCellSource:
    """The weights of a Cell that is divided over ranks; a `protocols.ShardedSource`."""

    def __init__(self, model: Any) -> None:
        """Read names, dtypes and shapes of this rank's parts; raises as `CellSource` does."""
        self._parts = CellSource(model, parts=True)
        self._cuts = self._parts.cuts()
        self._group: ProcessGroup | None = None
        self._manifest: Manifest | None = None

    @property
    def device(self) -> str:
        """Where the parts are; of the first one, if they differ."""
        return self._parts.device

    def join(self, group: ProcessGroup | None) -> None:
        """Make the manifest of whole tensors with their layouts. Collective over `group`.

        Raises:
            UnsupportedFeatureError: not a group of MindSpore, or one that is not made up of whole
                tensor axes in rank order.
            RankMismatchError: the ranks hold different models.
        """
        world = 1 if group is None else group.world_size
        self._group = group if world > 1 else None
        with _together(self._group):
            degree = _degree(self._cuts, group)
            mesh = make_mesh([Digit(degree, 1, _AXIS)], world)
            layouts = {cut.dim: ShardLayout([(_AXIS, cut.dim)]) for cut in self._cuts if cut}
            specs = _whole(self._parts.manifest(), self._cuts)
            self._manifest = Manifest(
                [
                    attrs.evolve(spec, layout=None if cut is None else layouts[cut.dim])
                    for spec, cut in specs
                ],
                mesh,
            )
        mine = self._manifest.digest()
        said = mine if self._group is None else self._group.broadcast_object(mine, 0)
        with _together(self._group):
            if said != mine:
                raise RankMismatchError(
                    "the ranks hold different models: names, shapes, dtypes, ties or divided dims "
                    "are others than rank 0's. Every rank publishes its part of the same model"
                )

    def manifest(self) -> Manifest:
        """That of the whole model, the same on every rank; after `join`."""
        if self._manifest is None:
            raise StateError("manifest() of a divided Cell before join(), where its ranks meet")
        return self._manifest

    def look(self) -> None:
        """Look at the Cell again, and wait until all is computed. Collective.

        Raises:
            ManifestError: on any rank it is not what it was; raised on every rank.
        """
        with _together(self._group):
            self._parts.begin()
            _refuse_changes(self._parts.manifest(), self._cuts, self._parts.cuts())

    def begin(self) -> None:
        """Nothing: every rank has called `look`."""

    def host_bytes(self, index: int) -> memoryview:
        """This rank's part of unique tensor `index`, row-major; valid until the next call."""
        return self._parts.host_bytes(index)

    def adopt(self, buffers: Sequence[memoryview]) -> None:
        """Refuse, as `CellSource` does; nothing is moved."""
        self._parts.adopt(buffers)


@final
class DividedCellSink:
    """A Cell that is divided over ranks, as a target of its own parts; a `protocols.RegionSink`.

    Nothing here is collective: each rank subscribes with `member=` its rank.
    """

    def __init__(self, model: Any) -> None:
        """Read names, dtypes and shapes of this rank's parts; raises as `CellSink` does."""
        self._parts = CellSink(model, parts=True)
        self._cuts = self._parts.cuts()
        specs = _whole(self._parts.needs(), self._cuts)
        self._needs = Manifest([spec for spec, _ in specs])
        self._regions = tuple(_region(spec, cut) for spec, cut in specs if spec.alias_of is None)

    @property
    def device(self) -> str:
        """Where the parts are; of the first one, if they differ."""
        return self._parts.device

    @property
    def module(self) -> Any:
        """The model as it was given; raises as `CellSink.module` does."""
        return self._parts.module

    def needs(self) -> Manifest:
        """Everything by its global shape; raises as `check` does."""
        self.check()
        return self._needs

    def regions(self) -> Sequence[Region]:
        """The box that this rank keeps of each unique tensor of `needs()`."""
        return self._regions

    def check(self) -> None:
        """Look at the Cell again: it is about to be written.

        Raises:
            ManifestError, WrongThreadError: as `CellSink.check`; or a part is another one now.
        """
        self._parts.check()
        if threading.current_thread().name != SERVE_THREAD:
            _refuse_changes(self._needs, self._cuts, self._parts.cuts())

    def begin(self) -> None:
        """Wait for what still reads the old values, and let parts be written."""
        self._parts.begin()
        _refuse_changes(self._needs, self._cuts, self._parts.cuts())

    def live_memory(self) -> Sequence[Span]:
        """Where this rank's parts lie, as `begin` saw them."""
        return self._parts.live_memory()

    def destination(self, index: int) -> memoryview | None:
        """The live bytes of this rank's part of tensor `index`; None if `write` has to be used."""
        return self._parts.destination(index)

    def write(self, index: int, data: memoryview) -> None:
        """Copy the row-major bytes of this rank's part of tensor `index` into it."""
        self._parts.write(index, data)

    def host_bytes(self, index: int) -> memoryview:
        """This rank's part of tensor `index`, row-major; valid until the next call."""
        return self._parts.host_bytes(index)

    def finish(self) -> None:
        """All is written; where MindSpore copied, wait until it has."""
        self._parts.finish()


def _is_divided(model: Any) -> bool:
    return any(memory.cut_of(slot.tensor) is not None for slot in slots(model))


def _degree(cuts: Sequence[memory.Cut | None], group: ProcessGroup | None) -> int:
    """The size of the tensor axis, which is the fastest of the group's ranks.

    Raises:
        UnsupportedFeatureError: the parts that this rank holds are not those of its place.
    """
    if group is not None and group.framework != "mindspore":
        raise UnsupportedFeatureError(
            f"a divided Cell needs a group of MindSpore; this one is of {group.framework}"
        )
    rank, world = (0, 1) if group is None else (group.rank, group.world_size)
    found = {(cut.degree, cut.place) for cut in cuts if cut is not None}
    degree, place = min(found)
    if len(found) > 1 or world % degree or rank % degree != place:
        held = ", ".join(f"part {at} of {n}" for n, at in sorted(found))
        raise UnsupportedFeatureError(
            f"rank {rank} of {world} holds {held} of the divided parameters; publish with group= "
            "of all ranks of the context that divided the Cell, in their order"
        )
    return degree


def _whole(
    manifest: Manifest, cuts: Sequence[memory.Cut | None]
) -> list[tuple[TensorSpec, memory.Cut | None]]:
    """Every name with its global shape, and how its tensor is divided."""
    by_name = {spec.name: cut for spec, cut in zip(manifest.unique, cuts, strict=True)}
    made = []
    for spec in manifest.tensors:
        cut = by_name[spec.alias_of or spec.name]
        shape = list(spec.shape)
        if cut is not None:
            shape[cut.dim] *= cut.degree
        made.append((attrs.evolve(spec, shape=shape), cut))
    return made


def _region(spec: TensorSpec, cut: memory.Cut | None) -> Region:
    offsets, sizes = [0] * len(spec.shape), list(spec.shape)
    if cut is not None:
        sizes[cut.dim] //= cut.degree
        offsets[cut.dim] = cut.place * sizes[cut.dim]
    return Region(tuple(offsets), tuple(sizes))


def _refuse_changes(
    manifest: Manifest, was: Sequence[memory.Cut | None], now: Sequence[memory.Cut | None]
) -> None:
    for spec, before, after in zip(manifest.unique, was, now, strict=True):
        if before != after:
            raise ManifestError(
                f"tensor {spec.name!r} was {_said(before)} and is now {_said(after)}; publish or "
                "subscribe the model again"
            )


def _said(cut: memory.Cut | None) -> str:
    if cut is None:
        return "whole"
    return f"part {cut.place} of {cut.degree} of dim {cut.dim}"


@contextmanager
def _together(group: ProcessGroup | None) -> Iterator[None]:
    """Do something on every rank; if it fails on one, raise on all. Collective at its end."""
    problem: Exception | None = None
    try:
        yield
    except Exception as error:
        problem = error
    if group is not None:
        mine: Any = None if problem is None else pack_error(problem)
        said: list[Any] = [group.broadcast_object(mine, src) for src in range(group.world_size)]
        failed = [rank for rank, words in enumerate(said) if words is not None]
        if failed and problem is None:
            raise unpack_error(said[failed[0]], rank=failed[0])
    if problem is not None:
        raise problem
