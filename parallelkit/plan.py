"""How ranks are laid out over the axes of a parallel plan: integers and names only.

A rank is a number in mixed radix: the axes `pipeline, data, data_shard, context, tensor`, in this
order, are its digits, `tensor` the fastest. `expert` is no digit of its own: it re-divides the
ranks of the data axes for expert layers. Everything is computed when asked for, by arithmetic.

A plan may lie inside a wider world, next to other plans or to ranks that take no part: `offset` is
then its first rank, and every rank a plan takes or returns is a rank of that wider world.
"""

from __future__ import annotations

import itertools
import json
import math
import operator
from collections.abc import Iterable, Mapping
from typing import SupportsIndex

import attrs

from parallelkit.errors import PlanError

#: The axes that make up a rank, slowest first.
AXES = ("pipeline", "data", "data_shard", "context", "tensor")
#: The axes of which every combination holds another part of the data set.
DATA_AXES = ("data", "data_shard")
#: The modes a plan can have; what each means is said by `plan`.
MODES = ("standalone", "data", "semi_auto", "auto", "hybrid")
_ALL = (*AXES, "expert")
_ROWS = 16


@attrs.frozen(kw_only=True)
class ParallelPlan:
    """Degrees of every axis, and from them every rank's place. Made by `plan`.

    Attributes:
        world_size: number of ranks; the product of all degrees but `expert`.
        mode: one of `MODES`.
        pipeline: stages of the model.
        data: replicas of the model.
        data_shard: ranks over which each replica's parameters are sharded.
        context: parts of a sequence.
        tensor: parts of a layer.
        expert: groups of experts; divides `data * data_shard`.
        offset: the first rank; 0 unless the plan lies inside a wider world.

    Raises:
        PlanError: the degrees are impossible for the world size or the mode.
    """

    world_size: int
    mode: str
    pipeline: int = 1
    data: int = 1
    data_shard: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1
    offset: int = 0

    def __attrs_post_init__(self) -> None:
        _positive("offset", self.offset, least=0)
        for name in ("world_size", *_ALL):
            _positive(name, getattr(self, name))
        product = math.prod(self.degree(axis) for axis in AXES)
        if product != self.world_size:
            raise PlanError(
                f"the product of the degrees ({self._said()}) is {product}, but world_size is "
                f"{self.world_size}; correct one, or leave one at -1 to have it inferred"
            )
        if self.data_shard_count % self.expert:
            raise PlanError(
                f"expert={self.expert} does not divide data * data_shard = "
                f"{self.data_shard_count}, whose ranks it re-divides; allowed are "
                f"{_divisors(self.data_shard_count)}"
            )
        _check_mode(self)

    @property
    def degrees(self) -> Mapping[str, int]:
        """Axis name to degree, in the fixed order, `expert` last."""
        return {axis: self.degree(axis) for axis in _ALL}

    @property
    def ranks(self) -> range:
        """The ranks of the plan, `world_size` of them from `offset` on."""
        return range(self.offset, self.offset + self.world_size)

    @property
    def data_shard_count(self) -> int:
        """Into how many parts the data set is cut."""
        return self.data * self.data_shard

    @property
    def title(self) -> str:
        """The plan in one line: mode, ranks, and the axes that have more than one."""
        axes = [axis for axis in AXES if self.degree(axis) > 1]
        by = " x ".join(f"{axis} {self.degree(axis)}" for axis in axes)
        title = f"{self.mode}: {self.world_size} {'rank' if self.world_size == 1 else 'ranks'}"
        title += f" from {self.offset} on" if self.offset else ""
        title += f" = {by}" if by else ""
        return title + (f", expert {self.expert} over data x data_shard" * (self.expert > 1))

    def features(self) -> frozenset[str]:
        """What a backend must support to run this plan, by name: its mode, each axis above one.

        With mode `"auto"` the degrees are not final, and only the mode counts.

        Example:
            >>> sorted(plan(4, tensor=2).features())
            ['axis.data', 'axis.tensor', 'context.hybrid']
        """
        wide = [axis for axis in _ALL if self.degree(axis) > 1 and self.mode != "auto"]
        return frozenset({f"context.{self.mode}", *(f"axis.{axis}" for axis in wide)})

    def degree(self, axis: str) -> int:
        """Return the degree of an axis.

        Raises:
            PlanError: no such axis.
        """
        if axis not in _ALL:
            raise PlanError(f"there is no axis {axis!r}; the axes are {', '.join(_ALL)}")
        return int(getattr(self, axis))

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return a rank's coordinate on every axis, `expert` included.

        Raises:
            PlanError: no such rank.

        Example:
            >>> plan(8, pipeline=2, tensor=2).coordinates(5)
            {'pipeline': 1, 'data': 0, 'data_shard': 0, 'context': 0, 'tensor': 1, 'expert': 0}
        """
        rest = self._place(rank)
        digits = {}
        for axis in reversed(AXES):
            rest, digits[axis] = divmod(rest, self.degree(axis))
        coordinates = {axis: digits[axis] for axis in AXES}
        coordinates["expert"] = self._data_index(coordinates) % self.expert
        return coordinates

    def check_group(self, world_size: int, what: str) -> None:
        """Raise unless the plan is for a group of `world_size`, whose ranks count from 0.

        Raises:
            PlanError: it is for another number of ranks, or has an offset; `what` is said first.
        """
        if self.world_size != world_size:
            raise PlanError(f"the plan is for {self.world_size} ranks, and {what}")
        if self.offset:
            raise PlanError(
                f"the plan begins at rank {self.offset} of a wider world, and ranks of a group "
                f"count from 0; plan without an offset for the group of these ranks"
            )

    def rank_of(self, coordinates: Mapping[str, int]) -> int:
        """Return the rank at a place; the inverse of `coordinates`.

        Args:
            coordinates: axis name to coordinate. An axis of degree 1 may be left out, and
                `expert` always, since the data axes imply it.

        Raises:
            PlanError: an unknown or missing axis, or a coordinate out of range.

        Example:
            >>> plan(8, pipeline=2, tensor=2).rank_of({"pipeline": 1, "data": 0, "tensor": 1})
            5
        """
        for axis in coordinates:
            self.degree(axis)  # an unknown axis is an error
        place, rank = {}, 0
        for axis in AXES:
            degree = self.degree(axis)
            if axis not in coordinates and degree > 1:
                raise PlanError(
                    f"the coordinate on axis {axis!r} is missing in {dict(coordinates)}; it is 0 "
                    f"to {degree - 1}"
                )
            place[axis] = _index(f"{axis} coordinate", coordinates.get(axis, 0), degree)
            rank = rank * degree + place[axis]
        implied = self._data_index(place) % self.expert
        if coordinates.get("expert", implied) != implied:
            raise PlanError(
                f"expert coordinate {coordinates['expert']!r} contradicts data={place['data']}, "
                f"data_shard={place['data_shard']}, which imply {implied}"
            )
        return rank + self.offset

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """Return the groups of ranks that differ on the given axes only.

        Every rank is in exactly one group. Ranks ascend in a group, groups by first rank. An
        axis of degree 1 gives groups of one.

        Args:
            axes: one axis, or several of them but `expert`, in any order.

        Raises:
            PlanError: unknown or no axes, or `expert` together with others.

        Example:
            >>> plan(8, tensor=2, data_shard=2).groups("data", "data_shard")
            ((0, 2, 4, 6), (1, 3, 5, 7))
            >>> plan(4, tensor=2, offset=1).groups("tensor")
            ((1, 2), (3, 4))
        """
        for axis in axes:
            self.degree(axis)
        if not axes or ("expert" in axes and len(set(axes)) > 1):
            raise PlanError(
                f"groups over {axes!r}: name one axis of {', '.join(_ALL)}, or several without "
                f"'expert', which overlaps the data axes"
            )
        digits = self._digits(expert="expert" in axes)
        inside = _offsets((degree, stride) for axis, degree, stride in digits if axis in axes)
        starts = _offsets((degree, stride) for axis, degree, stride in digits if axis not in axes)
        first = self.offset
        return tuple(tuple(first + start + step for step in inside) for start in starts)

    def data_shard_index(self, rank: int) -> int:
        """Return which part of the data set a rank loads, 0 to `data_shard_count - 1`.

        Ranks that differ on other axes only load the same part.

        Example:
            >>> [plan(8, tensor=2, data_shard=2).data_shard_index(rank) for rank in range(8)]
            [0, 0, 1, 1, 2, 2, 3, 3]
        """
        return self._place(rank) // (self.context * self.tensor) % self.data_shard_count

    def to_json(self) -> str:
        """Return mode, world size, offset and degrees, from which all else follows, as JSON."""
        return json.dumps(
            {
                "world_size": self.world_size,
                "offset": self.offset,
                "mode": self.mode,
                "axes": list(AXES),
                "degrees": dict(self.degrees),
                "data_shard_count": self.data_shard_count,
            }
        )

    def __str__(self) -> str:
        axes = [axis for axis in _ALL if self.degree(axis) > 1]
        header = ["rank", *axes, "data part"]
        rows = [header]
        for rank in self.ranks[:_ROWS]:
            place = self.coordinates(rank)
            part = f"{self.data_shard_index(rank)} of {self.data_shard_count}"
            rows.append([str(rank), *(str(place[axis]) for axis in axes), part])
        widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
        lines = ["  ".join(map(str.rjust, row, widths)).rstrip() for row in rows]
        if self.world_size > _ROWS:
            lines.append(f"... and {self.world_size - _ROWS:,} more")
        return "\n".join([self.title, *lines])

    def _place(self, rank: SupportsIndex) -> int:
        """Return a rank's number inside the plan, 0 to `world_size - 1`."""
        return _index("rank", rank, self.world_size, first=self.offset) - self.offset

    def _data_index(self, coordinates: Mapping[str, int]) -> int:
        return coordinates["data"] * self.data_shard + coordinates["data_shard"]

    def _digits(self, *, expert: bool) -> list[tuple[str, int, int]]:
        """Return (axis, degree, stride), slowest first; with `expert` in place of data axes."""
        axes = [(axis, self.degree(axis)) for axis in AXES]
        if expert:
            replicas = self.data_shard_count // self.expert
            axes[1:3] = [("replicas of experts", replicas), ("expert", self.expert)]
        stride, digits = self.world_size, []
        for axis, degree in axes:
            stride //= degree
            digits.append((axis, degree, stride))
        return digits

    def _said(self) -> str:
        return ", ".join(f"{axis}={self.degree(axis)}" for axis in AXES)


def plan(
    world_size: int,
    mode: str | None = None,
    *,
    pipeline: int = 1,
    data: int | None = None,
    data_shard: int = 1,
    context: int = 1,
    tensor: int = 1,
    expert: int = 1,
    offset: int = 0,
) -> ParallelPlan:
    """Lay out `world_size` ranks over the axes. Pure: no device, group or framework is touched.

    Args:
        world_size: number of ranks.
        mode: `"standalone"` (a world of one), `"data"` (replicas only), `"hybrid"` (these
            degrees), `"semi_auto"` (the user's layouts over these degrees), `"auto"` (a search,
            within these degrees); None for standalone, data or hybrid, by the degrees.
        pipeline, data_shard, context, tensor: degrees; one of all may be -1, to be inferred.
        data: degree; None is -1, or 1 where another axis is -1.
        expert: degree, which divides `data * data_shard`; -1 for all of it.
        offset: the first rank, where the plan lies inside a wider world; its ranks are then
            `offset` to `offset + world_size - 1`.

    Raises:
        PlanError: the degrees are impossible for the world size or contradict the mode.

    Example:
        >>> print(plan(4, tensor=2))
        hybrid: 4 ranks = data 2 x tensor 2
        rank  data  tensor  data part
           0     0       0     0 of 2
           1     0       1     0 of 2
           2     1       0     1 of 2
           3     1       1     1 of 2
    """
    world_size = _positive("world_size", world_size)
    if mode is not None and mode not in MODES:
        raise PlanError(f"mode is {mode!r}; it is None or one of {', '.join(map(repr, MODES))}")
    given = {"pipeline": pipeline, "data": data, "data_shard": data_shard, "context": context}
    given |= {"tensor": tensor, "expert": expert}
    degrees = {
        axis: _positive(axis, value, or_minus_one=True)
        for axis, value in given.items()
        if value is not None
    }
    open_axes = [axis for axis, degree in degrees.items() if degree == -1]
    if len(open_axes) > 1:
        raise PlanError(
            f"{' and '.join(f'{axis}=-1' for axis in open_axes)}: at most one degree can be "
            f"inferred; give numbers for the others"
        )
    if data is None:
        degrees["data"] = 1 if set(open_axes) & set(AXES) else -1
    _infer(degrees, world_size)
    if degrees["expert"] == -1:
        degrees["expert"] = degrees["data"] * degrees["data_shard"]
    if mode is None:
        wide = any(degree > 1 for axis, degree in degrees.items() if axis != "data")
        mode = "hybrid" if wide else "standalone" if world_size == 1 else "data"
    offset = _positive("offset", offset, least=0)
    return ParallelPlan(world_size=world_size, mode=mode, offset=offset, **degrees)


def _infer(degrees: dict[str, int], world_size: int) -> None:
    """Replace the -1 among the axes, if there is one."""
    for axis in AXES:
        if degrees[axis] == -1:
            rest = math.prod(degrees[other] for other in AXES if other != axis)
            if world_size % rest:
                others = ", ".join(f"{other}={degrees[other]}" for other in AXES if other != axis)
                raise PlanError(
                    f"{axis} cannot be inferred: world_size={world_size} is not divisible by "
                    f"{rest}, the product of the other degrees ({others}); allowed products are "
                    f"{_divisors(world_size)}"
                )
            degrees[axis] = world_size // rest
            return


def _check_mode(made: ParallelPlan) -> None:
    if made.mode not in MODES:
        raise PlanError(f"mode is {made.mode!r}; it is one of {', '.join(map(repr, MODES))}")
    if made.mode == "standalone" and made.world_size != 1:
        raise PlanError(
            f"mode 'standalone' is a world of one, but world_size is {made.world_size}; use "
            f"'data' for replicas, or leave the mode out"
        )
    wide = [axis for axis in _ALL if axis != "data" and made.degree(axis) > 1]
    if made.mode == "data" and wide:
        raise PlanError(
            f"mode 'data' makes replicas only, but "
            f"{', '.join(f'{axis}={made.degree(axis)}' for axis in wide)} was given; use mode "
            f"'hybrid', or leave the mode out"
        )


def _positive(
    name: str, value: SupportsIndex, *, least: int = 1, or_minus_one: bool = False
) -> int:
    number = _integer(value)
    if number is None or (number < least and not (or_minus_one and number == -1)):
        allowed = "a positive integer" if least else "0 or a positive integer"
        allowed += ", or -1 to be inferred" if or_minus_one else ""
        raise PlanError(f"{name} is {value!r}; allowed is {allowed}")
    return number


def _index(name: str, value: SupportsIndex, size: int, *, first: int = 0) -> int:
    number = _integer(value)
    if number is None or not first <= number < first + size:
        raise PlanError(f"{name} is {value!r}; allowed is {first} to {first + size - 1}")
    return number


def _integer(value: SupportsIndex) -> int | None:
    """Return an integer of any library as int; None for what is none, bool included."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def _offsets(digits: Iterable[tuple[int, int]]) -> list[int]:
    """Return every sum of one multiple of each stride, the first digit slowest."""
    ranges = [range(0, degree * stride, stride) for degree, stride in digits]
    return list(map(sum, itertools.product(*ranges)))


def _divisors(number: int) -> str:
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    found = sorted({*small, *(number // divisor for divisor in small)})
    shown = ", ".join(map(str, found[:12]))
    return shown if len(found) <= 12 else f"{shown}, ..."
