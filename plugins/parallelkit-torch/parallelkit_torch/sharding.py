"""How a `DTensor` lies over ranks, as degrees and strides; and the modules that hold such tensors.

Nothing of torch's distributed tensors is imported here: where they were never imported, there are
none in the model.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from parallelkit.errors import UnsupportedFeatureError
from parallelkit.weights.assembly import Digit
from parallelkit.weights.layout import Mesh, Region, ShardLayout, region
from parallelkit_torch import names


class Spread(NamedTuple):
    """How one tensor lies over the ranks of a group.

    Attributes:
        mesh: its axes of more than one rank; shards: pairs of an index into them and a dim, in
            the order of division.
        held: whether this rank is in its mesh at all.
    """

    mesh: tuple[Digit, ...]
    shards: tuple[tuple[int, int], ...]
    held: bool


WHOLE = Spread((), (), True)


def is_distributed(tensor: torch.Tensor) -> bool:
    """Whether it is a `DTensor`."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(tensor, kind)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor, without history: its own memory, not a copy."""
    if not is_distributed(tensor):
        return tensor
    with torch.no_grad():
        part: torch.Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return part


def stages(module: nn.Module) -> list[tuple[int, nn.Module]] | None:
    """The pipeline stages of a model that is cut into them, by position; None for a whole model.

    Such a model, as `PipelineModule`, has tuples: `stage_modules`, whose tensors have the names of
    the whole model, and `indices`, their places among all stages. It has no tensor besides; a
    model that does merely has attributes of these names.
    """
    plain = names.unwrap(module)
    parts, indices = (getattr(plain, name, None) for name in ("stage_modules", "indices"))
    if not isinstance(parts, tuple) or not isinstance(indices, tuple):
        return None
    if len(parts) != len(indices) or not all(isinstance(part, nn.Module) for part in parts):
        return None
    known = {name for part in parts for name in names.plain_names(part)}
    if not known.issuperset(names.plain_names(plain)):
        return None
    pairs = zip(indices, parts, strict=True)
    return sorted(pairs, key=lambda stage: stage[0])


def is_spread(module: nn.Module) -> bool:
    """Whether one rank does not hold the whole model."""
    if stages(module) is not None:
        return True
    reshard(module)
    return any(is_distributed(slot.tensor) for slot in names.slots(module))


def reshard(module: nn.Module) -> None:
    """Let every `fully_shard` unit hold its shards, and not the whole that a forward left there.

    Nor one that is on its way: torch gathers ahead of time where a forward prefetches, or where
    `unshard(async_op=True)` asked for it, and the next forward would compute with what was read
    then. Nothing is asked of other ranks: whole copies are dropped, values are those of the shards.
    """
    kind: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if kind is not None:
        for unit in names.unwrap(module).modules():
            if isinstance(unit, kind):
                _finish_gathers(unit)
                unit.reshard()
                _drop_whole(unit)


def _finish_gathers(unit: Any) -> None:
    """Wait for gathers that this rank has begun; torch has no public way that begins none."""
    for group in _groups(unit):
        if getattr(group, "_all_gather_result", None) is not None:
            group.wait_for_unshard()


def _drop_whole(unit: Any) -> None:
    """Drop what `reshard` leaves whole where a forward ended by an error, and is not over yet."""
    for group in _groups(unit):
        if not group.is_sharded:
            group._to_sharded()


def _groups(unit: Any) -> Sequence[Any]:
    """The parts of a unit that are gathered together; torch has had one or several by turns."""
    state = unit._get_fsdp_state()
    several = getattr(state, "_fsdp_param_groups", None)
    if several is not None:
        return tuple(several)
    one = state._fsdp_param_group
    return () if one is None else (one,)


def held(module: nn.Module) -> Iterator[tuple[int, names.Slot]]:
    """Stage and slot of everything that is here, stage by stage.

    A name that is in two stages of this rank comes twice.
    """
    staged = stages(module)
    for stage, part in staged if staged is not None else [(0, module)]:
        for slot in names.slots(part):
            yield stage, slot


class Boxes:
    """Which box of its global tensor a rank's part is, by the tensor's own mesh alone."""

    def __init__(self) -> None:
        self._known: dict[Any, Region | None] = {}

    def of(self, name: str, tensor: torch.Tensor) -> Region | None:
        """The box, which may be empty; None where this rank is not on the tensor's mesh.

        Raises:
            UnsupportedFeatureError: by name: partial sums, a placement that is no division into
                intervals, or a part of another size than the placement says.
        """
        shape = tuple(tensor.shape)
        if not is_distributed(tensor):
            return Region((0,) * len(shape), shape)
        mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
        key = (mesh, tuple(placements), shape)
        if key not in self._known:
            self._known[key] = _box(name, mesh, placements, shape)
        box, part = self._known[key], tuple(local_part(tensor).shape)
        if box is not None and box.sizes != part and (box.elements or 0 not in part):
            raise UnsupportedFeatureError(
                f"tensor {name!r} {list(shape)} has a part of shape {list(part)} here, where "
                f"{placements} gives {list(box.sizes)}: parts are chunks of the rounded-up size, "
                "in order"
            )
        return box


class Spreads:
    """Reads how tensors lie over the ranks of one group."""

    def __init__(self, ranks: Sequence[int], rank: int) -> None:
        """Take the group's ranks in the default group, by rank, and this process's own."""
        self._positions: Mapping[int, int] = {world: own for own, world in enumerate(ranks)}
        self._rank = rank
        self._known: dict[Any, tuple[tuple[Digit, ...], bool]] = {}

    def of(self, name: str, tensor: torch.Tensor) -> Spread:
        """How `tensor` lies.

        Raises:
            UnsupportedFeatureError: by name: partial sums, ranks outside the group or in another
                order than that of a mesh, or a placement that is no division into intervals.
        """
        if not is_distributed(tensor):
            return WHOLE
        mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
        digits, held = self._mesh(name, mesh)
        order = _order(name, placements, mesh.shape)
        wide = [axis for axis, degree in enumerate(mesh.shape) if int(degree) > 1]
        shards = [(wide.index(axis), dim) for axis, dim in order if axis in wide]
        return Spread(digits, tuple(shards), held)

    def _mesh(self, name: str, mesh: Any) -> tuple[tuple[Digit, ...], bool]:
        """The axes of a mesh that have more than one rank, and whether this rank is on it."""
        if mesh not in self._known:
            self._known[mesh] = self._read(name, mesh)
        return self._known[mesh]

    def _read(self, name: str, mesh: Any) -> tuple[tuple[Digit, ...], bool]:
        world = [int(rank) for rank in mesh.mesh.flatten().tolist()]
        outside = [rank for rank in world if rank not in self._positions]
        if outside:
            raise UnsupportedFeatureError(
                f"tensor {name!r} lies on a mesh with rank(s) {outside[:8]}, which are not in the "
                f"group that publishes (ranks {list(self._positions)[:16]}); publish with "
                "group= of all ranks of the mesh"
            )
        ranks = torch.tensor([self._positions[rank] for rank in world], device="cpu").reshape(
            mesh.mesh.shape
        )
        known = mesh.mesh_dim_names or (None,) * ranks.ndim
        digits, places = [], ranks.flatten()[:1].reshape((1,) * ranks.ndim)
        for axis, degree in enumerate(ranks.shape):
            if degree == 1:
                continue
            stride = int(ranks.select(axis, 1).flatten()[0] - ranks.flatten()[0])
            steps = torch.arange(degree, device="cpu") * stride
            places = places + steps.reshape([-1 if d == axis else 1 for d in range(ranks.ndim)])
            digits.append(Digit(degree, stride, known[axis]))
        first = int(ranks.flatten()[0])
        regular = bool((places == ranks).all())
        if not regular or any(d.stride < 1 or first // d.stride % d.degree for d in digits):
            raise UnsupportedFeatureError(
                f"tensor {name!r} lies on a mesh of ranks {world[:16]} with shape "
                f"{list(ranks.shape)}, which is no slice of a mesh in rank order; make its mesh "
                "from one over all ranks in their order"
            )
        return tuple(digits), self._rank in ranks


def _box(name: str, mesh: Any, placements: Sequence[Any], shape: tuple[int, ...]) -> Region | None:
    """The box of a tensor that lies on this rank's place of a mesh."""
    place = mesh.get_coordinate()
    if place is None:
        return None
    degrees = [int(degree) for degree in mesh.shape]
    order = _order(name, placements, degrees)
    axes = Mesh([f"axis{axis}" for axis in range(len(degrees))], degrees)
    layout = ShardLayout([(axes.axes[axis], dim) for axis, dim in order])
    number = sum(int(at) * axes.stride(axis) for at, axis in zip(place, axes.axes, strict=True))
    return region(layout, axes, shape, number)


def _order(name: str, placements: Sequence[Any], degrees: Sequence[int]) -> list[tuple[int, int]]:
    """Mesh axis and tensor dim of every division, in the order in which they are made.

    Plain shards divide from left to right. A strided shard, as `fully_shard` over tensor parallel
    has it, divides what shards to its right, as many as its split factor says, have left.
    """
    from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard

    order: dict[int, list[int]] = {}
    for axis in reversed(range(len(placements))):
        placement = placements[axis]
        if isinstance(placement, Replicate):
            continue
        if not isinstance(placement, Shard | _StridedShard):
            raise UnsupportedFeatureError(
                f"tensor {name!r} has the placement {placement!r}, whose values exist on no rank; "
                "publish it replicated or sharded"
            )
        before = order.setdefault(placement.dim, [])
        factor = int(placement.split_factor) if isinstance(placement, _StridedShard) else 1
        sizes = [math.prod(degrees[a] for a in before[:n]) for n in range(len(before) + 1)]
        if factor not in sizes:
            raise UnsupportedFeatureError(
                f"tensor {name!r} has the placement {placement!r} over {degrees[axis]} ranks: its "
                f"parts are no intervals of dim {placement.dim}; allowed split factors are {sizes}"
            )
        before.insert(sizes.index(factor), axis)
    return [(axis, dim) for dim, axes in order.items() for axis in axes]
