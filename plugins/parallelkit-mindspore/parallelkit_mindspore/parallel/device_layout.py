"""MindSpore's device matrices and tensor maps, and the same in the words of a plan.

Integers and names only; no MindSpore. Inside a pipeline stage ranks are numbers in mixed radix: a
*device matrix* gives the digits, slowest first. A *tensor map* says for each dim of a tensor by
which digit it is divided, counted from the fastest (0); -1 leaves the dim whole. Another tensor may
have another matrix over the same ranks, so a digit is known by its degree and its stride only.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import attrs

from parallelkit.errors import StrategyError
from parallelkit.plan import AXES, ParallelPlan
from parallelkit.weights.layout import Mesh, ShardLayout

#: The axes inside a pipeline stage, slowest first.
STAGE_AXES = AXES[1:]


class Piece(NamedTuple):
    """A division: a dim of a tensor in `degree` parts, whose ranks are `stride` apart."""

    dim: int
    degree: int
    stride: int


def _tuple(values: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(values)


@attrs.frozen(kw_only=True)
class DeviceLayout:
    """How a tensor lies over the ranks of one pipeline stage.

    Attributes:
        matrix: degrees of the digits, slowest first; their product is the ranks of the stage.
        tensor_map: for each dim the digit that divides it, counted from the fastest; -1: none.
        shape: the dims that the map is for. A dim that two digits divide is two dims here, as
            MindSpore writes it: (1024, 512) becomes (2, 512, 512).
        dims: for each of these the tensor's own dim; by default they are the same.
        optimizer: ranks over which dim 0 of each part is divided further by the parallel
            optimizer; 0 or 1 for none.
        step: how far apart in rank these are; 0: they are the fastest of those that hold the
            same part.

    Raises:
        StrategyError: these numbers are no layout.

    Example:
        >>> DeviceLayout(matrix=(2, 4), tensor_map=(0, -1), shape=(128, 64)).pieces
        (Piece(dim=0, degree=4, stride=1),)
    """

    matrix: tuple[int, ...] = attrs.field(converter=_tuple)
    tensor_map: tuple[int, ...] = attrs.field(converter=_tuple)
    shape: tuple[int, ...] = attrs.field(converter=_tuple)
    dims: tuple[int, ...] = attrs.field(
        converter=_tuple, default=attrs.Factory(lambda self: range(len(self.shape)), True)
    )
    optimizer: int = 0
    step: int = 0
    pieces: tuple[Piece, ...] = attrs.field(init=False, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        numbers = (*self.matrix, *self.tensor_map, *self.shape, self.optimizer, self.step)
        if any(type(number) is not int for number in numbers):
            raise self._wrong("they are integers")
        if not self.matrix or min(self.matrix) < 1:
            raise self._wrong("a device matrix has one or more positive degrees")
        if not len(self.tensor_map) == len(self.shape) == len(self.dims):
            raise self._wrong("a tensor map has one number for each dim")
        used = [digit for digit in self.tensor_map if digit != -1]
        if any(not 0 <= digit < len(self.matrix) for digit in used):
            raise self._wrong(f"a tensor map has -1, or 0 to {len(self.matrix) - 1}")
        if len(set(used)) != len(used):
            raise self._wrong("a digit divides one dim only")
        for dim, digit in enumerate(self.tensor_map):
            if digit >= 0 and self.shape[dim] % self._degree(digit):
                raise self._wrong(
                    f"dim {dim} of {self.shape[dim]} cannot be divided by {self._degree(digit)}"
                )
        object.__setattr__(self, "pieces", (*self._map_pieces(), *self._optimizer_pieces()))

    @property
    def ranks(self) -> int:
        """How many ranks the matrix is for: those of a stage."""
        return math.prod(self.matrix)

    def _map_pieces(self) -> list[Piece]:
        return [
            Piece(dim, self._degree(digit), self._stride(digit))
            for dim, digit in zip(self.dims, self.tensor_map, strict=True)
            if digit >= 0 and self._degree(digit) > 1
        ]

    def _optimizer_pieces(self) -> list[Piece]:
        """Divisions of dim 0 by ranks that hold the same part: the fastest are taken first."""
        left, found = max(self.optimizer, 1), list[Piece]()
        if self.optimizer < 0 or (left > 1 and not self.shape):
            raise self._wrong("the parallel optimizer divides dim 0 by a positive number")
        if left > 1 and self.step > 0:
            return [Piece(0, left, self.step)]
        for digit in range(len(self.matrix)):
            if left > 1 and digit not in self.tensor_map:
                taken = math.gcd(left, self._degree(digit))
                left //= taken
                found += [Piece(0, taken, self._stride(digit))] * (taken > 1)
                if taken < self._degree(digit):
                    break  # the group ends inside this digit
        if left > 1:
            raise self._wrong(f"no {self.optimizer} ranks hold the same part")
        return found[::-1]

    def _degree(self, digit: int) -> int:
        return self.matrix[len(self.matrix) - 1 - digit]

    def _stride(self, digit: int) -> int:
        return math.prod(self.matrix[len(self.matrix) - digit :])

    def _wrong(self, why: str) -> StrategyError:
        return StrategyError(
            f"device matrix {list(self.matrix)}, tensor map {list(self.tensor_map)}, shape "
            f"{list(self.shape)}, optimizer {self.optimizer!r}/{self.step!r} are no layout: {why}"
        )


def own_dims(cut: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    """For each dim of `cut` the dim of `shape` that it is a part of.

    Raises:
        StrategyError: runs of `cut` do not multiply up to the dims of `shape`.

    Example:
        >>> own_dims((2, 512, 512), (1024, 512))
        (0, 0, 1)
    """
    dims: list[int] = []
    for dim, extent in enumerate(shape):
        product, start = 1, len(dims)
        while len(dims) < len(cut) and (product < extent or len(dims) == start):
            product *= cut[len(dims)]
            dims.append(dim)
        if product != extent:
            raise StrategyError(f"the dims {list(cut)} are no cut of the shape {list(shape)}")
    if len(dims) != len(cut):
        raise StrategyError(f"the dims {list(cut)} are more than the shape {list(shape)} has")
    return tuple(dims)


def mesh_of(plan: ParallelPlan, pieces: Iterable[Piece]) -> Mesh | None:
    """The plan's axes inside a stage, finer where the pieces need it.

    None where pieces overlap each other or an axis, so that no axes are fine enough for all.

    An axis that has to be cut is numbered from the slowest part on: `data.0`, `data.1`.

    Example:
        >>> from parallelkit.plan import plan
        >>> mesh_of(plan(8, data=8), [Piece(0, 4, 1)]).describe()
        'data.0 2 x data.1 4'
    """
    cuts = {piece.stride for piece in pieces} | {p.stride * p.degree for p in pieces}
    axes, degrees, stride = ["pipeline"], [plan.pipeline], plan.world_size // plan.pipeline
    for axis in STAGE_AXES:
        above, stride = stride, stride // plan.degree(axis)
        bounds = sorted({above, stride} | {cut for cut in cuts if stride < cut < above})[::-1]
        steps = [high // low for high, low in itertools.pairwise(bounds)] or [1]
        if any(high % low for high, low in itertools.pairwise(bounds)):
            return None
        axes += [axis] if len(steps) == 1 else [f"{axis}.{n}" for n in range(len(steps))]
        degrees += steps
    return Mesh(axes, degrees)


def shard_layout(pieces: Sequence[Piece], mesh: Mesh, stage: int | None = None) -> ShardLayout:
    """The same divisions by the axes of a mesh that was made for them.

    Args:
        stage: the pipeline stage that the tensor is in; None if there is one stage only.
    """
    shards = [(axis, piece.dim) for piece in pieces for axis in _covered(piece, mesh)]
    return ShardLayout(shards, [] if stage is None else [("pipeline", stage)])


def words(pieces: Sequence[Piece], mesh: Mesh | None) -> str:
    """The divisions for people, by the mesh's axes where it has them.

    Example:
        >>> words([Piece(0, 4, 1)], Mesh(("data", "tensor"), (2, 4)))
        'dim 0 over tensor (4)'
        >>> words([Piece(1, 2, 3)], None)
        'dim 1 in 2, 3 ranks apart'
    """
    said = []
    for piece in pieces:
        names = [] if mesh is None else _covered(piece, mesh)
        if mesh is None or not names:
            apart = "next to each other" if piece.stride == 1 else f"{piece.stride} ranks apart"
            said.append(f"dim {piece.dim} in {piece.degree}, {apart}")
        else:
            over = " x ".join(f"{name} ({mesh.degree(name)})" for name in names)
            said.append(f"dim {piece.dim} over {over}")
    return ", ".join(said) or "whole"


def _covered(piece: Piece, mesh: Mesh) -> list[str]:
    """The axes that make up a piece, slowest first; empty if they do not match it exactly."""
    found = [
        axis
        for axis in mesh.axes
        if mesh.degree(axis) > 1
        and piece.stride <= mesh.stride(axis)
        and mesh.stride(axis) * mesh.degree(axis) <= piece.stride * piece.degree
    ]
    exact = math.prod(map(mesh.degree, found)) == piece.degree
    return found if exact else []
