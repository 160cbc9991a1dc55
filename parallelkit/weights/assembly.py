"""One manifest from what each rank holds: pure, and the same on every rank.

Each rank describes its own part as a `Roster`: names, global shapes, and for what is divided the
axes of its mesh as steps between ranks. From all rosters follow the mesh of the whole publisher
and the layout of every tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any, Final, NamedTuple

import attrs

from parallelkit.errors import RankMismatchError, UnsupportedFeatureError
from parallelkit.weights.layout import Mesh, ShardLayout
from parallelkit.weights.manifest import Manifest, TensorSpec

#: The axis of stages, and of ranks that hold the same and whose mesh nobody named.
STAGES: Final = "pipeline"
REPLICAS: Final = "replica"


class Digit(NamedTuple):
    """An axis as steps between ranks.

    Attributes:
        degree: how many coordinates, above 1; stride: ranks from one to the next.
        name: of the axis, or None.
    """

    degree: int
    stride: int
    name: str | None


@attrs.frozen(kw_only=True)
class Entry:
    """One name as a rank sees it.

    Attributes:
        name, dtype, shape, alias_of: as in `TensorSpec`; the shape is the global one.
        stage: of the pipeline, 0 without one.
        held: whether this rank has a part of it at all.
        mesh: the axes of the tensor's own mesh.
        shards: pairs of an index into `mesh` and a dim, in the order of division.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    alias_of: str | None = None
    stage: int = 0
    held: bool = True
    mesh: tuple[Digit, ...] = ()
    shards: tuple[tuple[int, int], ...] = ()

    def where(self) -> str:
        """How it is divided, for messages."""
        cuts = [f"dim {dim} by {self.mesh[axis].degree}" for axis, dim in self.shards]
        return f"{self.dtype}{list(self.shape)}" + (f" ({', '.join(cuts)})" if cuts else "")


@attrs.frozen(kw_only=True)
class Roster:
    """What one rank holds.

    Attributes:
        entries: in the order of the model; stages ascend.
        stages: the stages of a pipeline that are here; empty where there is none.
    """

    entries: tuple[Entry, ...]
    stages: tuple[int, ...] = ()

    def to_plain(self) -> list[Any]:
        """As lists, for the other ranks."""
        rows = [
            [
                *(e.name, e.dtype, list(e.shape), e.alias_of, e.stage, e.held),
                *(_plain(e.mesh), _plain(e.shards)),
            ]
            for e in self.entries
        ]
        return [rows, list(self.stages)]

    @classmethod
    def from_plain(cls, plain: Any) -> Roster:
        """Read what `to_plain` made."""
        rows, stages = plain
        entries = (
            Entry(
                name=name,
                dtype=dtype,
                shape=tuple(shape),
                alias_of=alias,
                stage=stage,
                held=held,
                mesh=tuple(Digit(*digit) for digit in mesh),
                shards=tuple((axis, dim) for axis, dim in shards),
            )
            for name, dtype, shape, alias, stage, held, mesh, shards in rows
        )
        return cls(entries=tuple(entries), stages=tuple(stages))


def assemble(rosters: Sequence[Roster], by_rank: Sequence[int]) -> Manifest:
    """Put together what all ranks hold.

    Args:
        rosters: the different ones, by the lowest rank that has each.
        by_rank: for every rank, the index of its roster.

    Raises:
        RankMismatchError: ranks hold different models.
        UnsupportedFeatureError: a layout that is no arithmetic over one mesh, by name.
        ManifestError: nothing to publish, or what `Manifest` refuses.
    """
    _check_alike(rosters)
    digits = _stage_digits(rosters, by_rank)
    digits += [d for r in rosters for entry in r.entries for d in entry.mesh]
    mesh = make_mesh(digits, len(by_rank))
    names = _axis_names(mesh)
    first: dict[str, tuple[int, Entry]] = {}
    holders: dict[str, tuple[int, ...]] = {}
    for index, roster in enumerate(rosters):
        for entry in roster.entries:
            known = first.get(entry.name)
            if known is None or (entry.stage, index) < (known[1].stage, known[0]):
                first[entry.name] = (index, entry)
            if entry.held:
                holders[entry.name] = (*holders.get(entry.name, ()), index)
    where = _Places(mesh, by_rank)
    layouts: dict[str, ShardLayout | None] = {}
    specs = []
    for index, entry in sorted(first.values(), key=lambda item: item[1].stage):
        if entry.alias_of is None:
            cuts = [(entry.mesh[axis], dim) for axis, dim in entry.shards]
            shards = [(names[digit.degree, digit.stride], dim) for digit, dim in cuts]
            at = where.find(entry.name, holders.get(entry.name, ()), index if entry.held else None)
            layouts[entry.name] = ShardLayout(shards, at) if shards or at else None
        specs.append(
            TensorSpec(
                name=entry.name,
                dtype=entry.dtype,
                shape=entry.shape,
                alias_of=entry.alias_of,
                layout=layouts.get(entry.alias_of or entry.name),
            )
        )
    return Manifest(specs, mesh if any(layouts.values()) else None)


def make_mesh(digits: Iterable[Digit], world_size: int) -> Mesh:
    """The mesh whose axes are `digits`, with axes of replicas where they leave gaps.

    Raises:
        UnsupportedFeatureError: two axes overlap, so that ranks are no numbers in mixed radix.
    """
    known: dict[tuple[int, int], str | None] = {}
    for degree, stride, name in digits:
        if degree > 1 and known.get((degree, stride)) is None:
            known[degree, stride] = name
    axes: list[tuple[str | None, int]] = []  # fastest first
    step = 1
    for (degree, stride), name in sorted(known.items(), key=lambda item: (item[0][1], item[0][0])):
        if stride % step or world_size % (stride * degree):
            said = ", ".join(f"{d} ranks {s} apart" for d, s in sorted(known))
            raise UnsupportedFeatureError(
                f"the tensors' meshes ({said}) do not make up one mesh of {world_size} ranks; "
                "shard every tensor over axes of one DeviceMesh"
            )
        if stride > step:
            axes.append((REPLICAS, stride // step))
        axes.append((name, degree))
        step = stride * degree
    if world_size > step or not axes:
        axes.append((REPLICAS, world_size // step))
    axes.reverse()
    return Mesh(_unique_names([name for name, _ in axes]), [degree for _, degree in axes])


def _check_alike(rosters: Sequence[Roster]) -> None:
    """What has one name must be one thing; without stages all ranks have the same names."""
    seen: dict[str, Entry] = {}
    for number, roster in enumerate(rosters):
        for entry in roster.entries:
            other = seen.setdefault(entry.name, entry)
            same = (entry.dtype, entry.shape) == (other.dtype, other.shape)
            if not same or (entry.mesh, entry.shards) != (other.mesh, other.shards):
                raise RankMismatchError(
                    f"the ranks hold different models: {entry.name!r} is {other.where()} on one "
                    f"rank and {entry.where()} on another. Every rank publishes its part of the "
                    "same model"
                )
        if bool(roster.stages) != bool(rosters[0].stages):
            raise RankMismatchError(
                "some ranks publish stages of a pipeline and others a whole model; every rank "
                "publishes what parallelize gave it"
            )
        if number and not roster.stages:
            _check_same_names(rosters[0].entries, roster.entries)


def _check_same_names(ours: Sequence[Entry], theirs: Sequence[Entry]) -> None:
    for a, b in zip_longest(ours, theirs):
        mine, other = (f"{e.name!r}" if e is not None else "nothing more" for e in (a, b))
        if a is None or b is None or (a.name, a.alias_of) != (b.name, b.alias_of):
            tied = [f" (tied to {e.alias_of!r})" if e and e.alias_of else "" for e in (a, b)]
            raise RankMismatchError(
                f"the ranks hold different models: rank 0 has {mine}{tied[0]} where another rank "
                f"has {other}{tied[1]}. Every rank publishes its part of the same model"
            )


def _stage_digits(rosters: Sequence[Roster], by_rank: Sequence[int]) -> list[Digit]:
    """The axis that the ranks' stages make up, if they differ."""
    which = [rosters[k].stages for k in by_rank]
    degree = len(set(which))
    if degree < 2:
        return []
    stride = next(rank for rank, stages in enumerate(which) if stages != which[0])
    order = which[: stride * degree : stride]
    regular = all(stages == order[r // stride % degree] for r, stages in enumerate(which))
    regular = regular and len(which) % (stride * degree) == 0
    if len(set(order)) != degree or len(order) != degree or not regular:
        raise UnsupportedFeatureError(
            f"the ranks' stages are {[list(s) for s in which][:16]}; ranks of one stage have to "
            "be a slice of a mesh over all ranks"
        )
    return [Digit(degree, stride, STAGES)]


class _Places:
    """On which coordinates the ranks of some rosters are; each combination is looked at once."""

    def __init__(self, mesh: Mesh, by_rank: Sequence[int]) -> None:
        self._mesh = mesh
        self._by_rank = by_rank
        self._known: dict[tuple[int, ...], tuple[tuple[str, int], ...] | None] = {}

    def find(
        self, name: str, holders: tuple[int, ...], first: int | None
    ) -> tuple[tuple[str, int], ...]:
        """Where a tensor is: on the ranks of all rosters that hold it, or of the first one.

        Raises:
            UnsupportedFeatureError: these are no slice of the mesh.
        """
        at = self._slice(holders)
        if at is None and first is not None:
            at = self._slice((first,))
        if at is None:
            ranks = [rank for rank, roster in enumerate(self._by_rank) if roster in holders]
            raise UnsupportedFeatureError(
                f"tensor {name!r} is on the ranks {ranks[:16]} of {len(self._by_rank)}, which are "
                f"no slice of the mesh {self._mesh.describe()}; publish it from whole slices of "
                "one mesh"
            )
        return at

    def _slice(self, rosters: tuple[int, ...]) -> tuple[tuple[str, int], ...] | None:
        """The axes on which the ranks of these rosters have one coordinate; None for no slice."""
        if rosters not in self._known:
            ranks = [rank for rank, roster in enumerate(self._by_rank) if roster in rosters]
            at, size = [], 1
            for axis in self._mesh.axes:
                places = {self._mesh.coordinate(rank, axis) for rank in ranks}
                size *= len(places)
                if len(places) == 1 and self._mesh.degree(axis) > 1:
                    at.append((axis, places.pop()))
            whole = self._mesh.size // math.prod(self._mesh.degree(axis) for axis, _ in at)
            good = bool(ranks) and len(ranks) == size == whole
            self._known[rosters] = tuple(at) if good else None
        return self._known[rosters]


def _axis_names(mesh: Mesh) -> dict[tuple[int, int], str]:
    return {(mesh.degree(axis), mesh.stride(axis)): axis for axis in mesh.axes}


def _unique_names(names: Sequence[str | None]) -> list[str]:
    """A name for each axis: its own, `axis0` where it has none, with a number where taken."""
    made: list[str] = []
    for position, name in enumerate(names):
        wanted = f"axis{position}" if name is None else name
        count = 2
        unique = wanted
        while unique in made:
            unique, count = f"{wanted}{count}", count + 1
        made.append(unique)
    return made


def _plain(rows: Iterable[Iterable[Any]]) -> list[list[Any]]:
    return [list(row) for row in rows]
