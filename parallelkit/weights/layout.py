"""Where the parts of a tensor lie: layouts over a mesh of ranks, as arithmetic.

A rank is a number in mixed radix over the mesh's axes. A layout says by which axes a tensor's dims
are divided, and on which coordinates it exists at all. From both follow, for any rank, the box of
elements that it holds, and for any tensor, who serves which box: nothing is kept as a table.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import attrs

from parallelkit.errors import ManifestError

MAX_AXES: Final = 16
MAX_AXIS_NAME_BYTES: Final = 64
MAX_RANKS: Final = 1 << 24


def as_tuple(values: Iterable[Any]) -> tuple[Any, ...]:
    """`values` as a tuple; raises `ManifestError` where they are none."""
    try:
        return tuple(values)
    except TypeError:
        raise ManifestError(f"{values!r:.80} is given in place of a sequence") from None


def _pairs(values: Iterable[Iterable[Any]]) -> tuple[tuple[Any, ...], ...]:
    return tuple(as_tuple(pair) for pair in as_tuple(values))


class Region(NamedTuple):
    """A box of elements: the first element and the extent on each dim of the tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def elements(self) -> int:
        """How many elements are in it; 1 for a scalar."""
        return math.prod(self.sizes)


@attrs.frozen
class Mesh:
    """The publisher's ranks, as numbers in mixed radix.

    Attributes:
        axes: names, slowest first.
        degrees: the size of each axis; their product is the number of ranks.

    Raises:
        ManifestError: names that are empty, long or given twice, or degrees that are not positive.

    Example:
        >>> mesh = Mesh(("data", "tensor"), (2, 4))
        >>> mesh.size, mesh.coordinate(6, "data"), mesh.coordinate(6, "tensor")
        (8, 1, 2)
    """

    axes: tuple[str, ...] = attrs.field(converter=as_tuple)
    degrees: tuple[int, ...] = attrs.field(converter=as_tuple)

    @axes.validator
    def _named(self, attribute: object, value: tuple[str, ...]) -> None:
        good = all(isinstance(a, str) and 0 < _utf8(a) <= MAX_AXIS_NAME_BYTES for a in value)
        if not good or not 0 < len(value) <= MAX_AXES or len(set(value)) != len(value):
            raise ManifestError(
                f"a mesh has axes {value!r:.200}; it has 1 to {MAX_AXES} names, each once and of "
                f"1 to {MAX_AXIS_NAME_BYTES} bytes"
            )

    @degrees.validator
    def _sized(self, attribute: object, value: tuple[int, ...]) -> None:
        good = len(value) == len(self.axes) and all(type(n) is int and n > 0 for n in value)
        if not good or math.prod(value) > MAX_RANKS:
            raise ManifestError(
                f"a mesh with axes {', '.join(self.axes)} has degrees {value!r:.200}; it has one "
                f"positive integer for each axis, and at most {MAX_RANKS} ranks"
            )

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(self.degrees)

    def degree(self, axis: str) -> int:
        """The size of an axis."""
        return self.degrees[self._position(axis)]

    def stride(self, axis: str) -> int:
        """How far apart in rank two neighbours on an axis are."""
        return math.prod(self.degrees[self._position(axis) + 1 :])

    def coordinate(self, rank: int, axis: str) -> int:
        """A rank's place on an axis."""
        return rank // self.stride(axis) % self.degree(axis)

    def describe(self) -> str:
        """`data 2 x tensor 4`, for people; axes of degree 1 are left out."""
        return _by(zip(self.axes, self.degrees, strict=True))

    def _position(self, axis: str) -> int:
        if axis not in self.axes:
            raise ManifestError(f"the mesh has no axis {axis!r}; it has {', '.join(self.axes)}")
        return self.axes.index(axis)


@attrs.frozen
class ShardLayout:
    """How one tensor is spread over a mesh. Axes that are not named hold replicas.

    Attributes:
        shards: pairs of axis and dim, in the order of division. Each divides what the ones before
            it left into `degree` chunks of the rounded-up size; the last may be short or empty.
            Two on one dim: the second divides each chunk of the first, which still is one
            interval (tensor first, then data_shard, as FSDP2 over tensor parallel does).
        at: pairs of axis and coordinate: the tensor exists on ranks with these coordinates only
            (a parameter of a pipeline stage).

    Example:
        >>> print(ShardLayout((("tensor", 0), ("data_shard", 0)), (("pipeline", 1),)))
        dim 0 over tensor, dim 0 over data_shard, at pipeline 1
    """

    shards: tuple[tuple[str, int], ...] = attrs.field(default=(), converter=_pairs)
    at: tuple[tuple[str, int], ...] = attrs.field(default=(), converter=_pairs)

    @shards.validator
    @at.validator
    def _paired(self, attribute: attrs.Attribute[Any], value: tuple[tuple[Any, ...], ...]) -> None:
        for pair in value:
            if len(pair) != 2 or not isinstance(pair[0], str) or type(pair[1]) is not int:
                raise ManifestError(
                    f"a layout has {attribute.name} {value!r:.200}; it has pairs of an axis and "
                    "an integer"
                )

    def check(self, mesh: Mesh, shape: Sequence[int]) -> None:
        """Raise `ManifestError` unless the layout can be one of a tensor of `shape` on `mesh`."""
        axes = [axis for axis, _ in (*self.shards, *self.at)]
        for axis in axes:
            mesh.degree(axis)
            if axes.count(axis) > 1:
                raise ManifestError(f"the layout ({self}) names axis {axis!r} twice")
        for axis, dim in self.shards:
            if not 0 <= dim < len(shape):
                raise ManifestError(
                    f"the layout ({self}) divides dim {dim} over {axis!r}; the tensor has "
                    f"{len(shape)} dim(s), counted from 0"
                )
        for axis, coordinate in self.at:
            if not 0 <= coordinate < mesh.degree(axis):
                raise ManifestError(
                    f"the layout ({self}) is at coordinate {coordinate} of axis {axis!r}; allowed "
                    f"are 0 to {mesh.degree(axis) - 1}"
                )

    def __str__(self) -> str:
        parts = [f"dim {dim} over {axis}" for axis, dim in self.shards]
        parts += [f"at {axis} {coordinate}" for axis, coordinate in self.at]
        return ", ".join(parts) or "replicated"


def region(layout: ShardLayout, mesh: Mesh, shape: Sequence[int], rank: int) -> Region | None:
    """What a rank holds of a tensor: a box, which may be empty; None where it is not on the rank.

    Args:
        layout: checked against `mesh` and `shape`.
        mesh, shape: the publisher's ranks, and the tensor's global shape.
        rank: 0 to `mesh.size - 1`.

    Example:
        >>> mesh = Mesh(("data_shard", "tensor"), (2, 2))
        >>> layout = ShardLayout((("tensor", 0), ("data_shard", 0)))
        >>> [region(layout, mesh, (7, 3), rank) for rank in (0, 3)]
        [Region(offsets=(0, 0), sizes=(2, 3)), Region(offsets=(6, 0), sizes=(1, 3))]
    """
    if any(mesh.coordinate(rank, axis) != where for axis, where in layout.at):
        return None
    return _box(layout, mesh, shape, [mesh.coordinate(rank, axis) for axis, _ in layout.shards])


def serves(layout: ShardLayout | None, mesh: Mesh | None, rank: int) -> bool:
    """Whether a rank is the lowest of those that hold the same part, so that it hands it out."""
    if layout is None or mesh is None:
        return rank == 0
    where = dict(layout.at)
    divided = {axis for axis, _ in layout.shards}
    return all(
        axis in divided or mesh.coordinate(rank, axis) == where.get(axis, 0) for axis in mesh.axes
    )


def servers(layouts: Iterable[ShardLayout | None], mesh: Mesh | None) -> list[int]:
    """Every rank that hands out a part under one of the layouts, ascending."""
    found: set[int] = set()
    for layout in set(layouts):
        if layout is None or mesh is None:
            found.add(0)
            continue
        steps = [range(mesh.degree(axis)) for axis, _ in layout.shards]
        found.update(_rank_at(layout, mesh, place) for place in itertools.product(*steps))
    return sorted(found)


def owners(
    layout: ShardLayout | None, mesh: Mesh | None, shape: Sequence[int]
) -> Iterator[tuple[int, Region]]:
    """Who serves which part of a tensor: every element once, by the lowest rank that holds it.

    Ranks ascend along the order of division. Nothing for a tensor without elements; rank 0 and
    everything where there is no layout. Linear in the number of distinct parts.

    Example:
        >>> mesh = Mesh(("data", "tensor"), (2, 2))
        >>> list(owners(ShardLayout((("tensor", 0),)), mesh, (3,)))
        [(0, Region(offsets=(0,), sizes=(2,))), (1, Region(offsets=(2,), sizes=(1,)))]
    """
    if math.prod(shape) == 0:
        return
    if layout is None or mesh is None:
        yield 0, Region((0,) * len(shape), tuple(shape))
        return
    for place in itertools.product(*(range(mesh.degree(axis)) for axis, _ in layout.shards)):
        box = _box(layout, mesh, shape, place)
        if box.elements:
            yield _rank_at(layout, mesh, place), box


def overlaps(
    layout: ShardLayout | None, mesh: Mesh | None, shape: Sequence[int], box: Region
) -> Iterator[tuple[int, Region]]:
    """Who serves which part of a box: what `owners` says, cut to the box.

    Linear in the parts that meet the box, however many others there are.

    Example:
        >>> mesh = Mesh(("tensor",), (1024,))
        >>> list(overlaps(ShardLayout((("tensor", 0),)), mesh, (4096,), Region((6,), (4,))))
        [(1, Region(offsets=(6,), sizes=(2,))), (2, Region(offsets=(8,), sizes=(2,)))]
    """
    if box.elements == 0:
        return
    if layout is None or mesh is None:
        yield 0, box
        return
    base = sum(coordinate * mesh.stride(axis) for axis, coordinate in layout.at)
    cuts = []
    for dim, (low, size) in enumerate(zip(*box, strict=True)):
        axes = [axis for axis, divided in layout.shards if divided == dim]
        cuts.append(list(_cut(mesh, axes, (0, shape[dim]), (low, low + size))))
    for place in itertools.product(*cuts):
        lows = tuple(low for _, low, _ in place)
        sizes = tuple(high - low for _, low, high in place)
        yield base + sum(step for step, _, _ in place), Region(lows, sizes)


def _cut(
    mesh: Mesh, axes: Sequence[str], chunk: tuple[int, int], wanted: tuple[int, int]
) -> Iterator[tuple[int, int, int]]:
    """Divide a chunk of one dim by axes, in order, as far as `wanted` (not empty) meets it.

    Yields what each part adds to the rank, and where it begins and ends.
    """
    low, high = max(chunk[0], wanted[0]), min(chunk[1], wanted[1])
    if not axes:
        yield 0, low, high
        return
    size, stride = -(-(chunk[1] - chunk[0]) // mesh.degree(axes[0])), mesh.stride(axes[0])
    for coordinate in range((low - chunk[0]) // size, (high - 1 - chunk[0]) // size + 1):
        start = chunk[0] + coordinate * size
        part = (start, min(start + size, chunk[1]))
        for step, first, last in _cut(mesh, axes[1:], part, wanted):
            yield coordinate * stride + step, first, last


def summary(layouts: Iterable[ShardLayout | None], mesh: Mesh | None) -> str:
    """Count layouts, for people.

    Example:
        >>> both = ShardLayout((("tensor", 1), ("data_shard", 0)))
        >>> summary([both, both, None], Mesh(("data_shard", "tensor"), (2, 2)))
        '2 tensors sharded over data_shard 2 x tensor 2, 1 replicated'
    """
    counts: dict[tuple[str, str], int] = {}
    for layout in layouts:
        over = where = ""
        if layout is not None and mesh is not None:
            divided = {axis for axis, _ in layout.shards}
            over = _by((a, n) for a, n in zip(mesh.axes, mesh.degrees, strict=True) if a in divided)
            where = "".join(f" at {axis} {coordinate}" for axis, coordinate in layout.at)
        counts[over, where] = counts.get((over, where), 0) + 1
    parts: list[str] = []
    for (over, where), count in sorted(counts.items(), key=lambda item: (not item[0][0], item[0])):
        noun = "" if parts else f" tensor{'s' if count != 1 else ''}"
        parts.append(f"{count}{noun} {'sharded over ' + over if over else 'replicated'}{where}")
    return ", ".join(parts)


def _box(layout: ShardLayout, mesh: Mesh, shape: Sequence[int], place: Sequence[int]) -> Region:
    """The box at coordinates `place`, one for each shard of the layout."""
    low, size = [0] * len(shape), list(shape)
    for (axis, dim), coordinate in zip(layout.shards, place, strict=True):
        chunk = -(-size[dim] // mesh.degree(axis))
        start = min(coordinate * chunk, size[dim])
        low[dim] += start
        size[dim] = min(chunk, size[dim] - start)
    return Region(tuple(low), tuple(size))


def _rank_at(layout: ShardLayout, mesh: Mesh, place: Sequence[int]) -> int:
    """The lowest rank at coordinates `place`, one for each shard of the layout."""
    axes = [*layout.at, *((axis, c) for (axis, _), c in zip(layout.shards, place, strict=True))]
    return sum(coordinate * mesh.stride(axis) for axis, coordinate in axes)


def _by(axes: Iterable[tuple[str, int]]) -> str:
    return " x ".join(f"{axis} {degree}" for axis, degree in axes if degree > 1)


def _utf8(text: str) -> int:
    """Bytes of a text; 0 where it has no UTF-8 form."""
    encoded = text.encode(errors="ignore")
    return len(encoded) if encoded.decode() == text else 0
