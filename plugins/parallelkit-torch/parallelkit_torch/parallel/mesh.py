"""The ranks of a plan as torch's `DeviceMesh`, and a group of ours for any of its axes."""

from __future__ import annotations

from typing import Any, Final, cast, final

import torch
from torch.distributed.device_mesh import DeviceMesh

from parallelkit.plan import AXES, ParallelPlan
from parallelkit.protocols import ProcessGroup


@final
class Meshes:
    """Groups over axes of a plan, made on first use with the timeout of the group divided.

    Making one is collective over the whole group, in the same order on every rank; the plan's
    degrees, which are the same everywhere, decide what is made when.
    """

    def __init__(self, plan: ParallelPlan, group: ProcessGroup) -> None:
        self._plan = plan
        self._group = group
        self._mesh: DeviceMesh | None = None
        self._groups: dict[tuple[str, ...], ProcessGroup] = {}

    @property
    def native(self) -> DeviceMesh:
        """The mesh over all of `AXES`, axes of degree 1 included, so that every name works.

        Collective on first use.
        """
        if self._mesh is None:
            axis_groups = [self.group(axis).native for axis in AXES]
            shape = [self._plan.degree(axis) for axis in AXES]
            self._mesh = DeviceMesh.from_group(
                axis_groups,
                torch.device(self._group.device).type,
                mesh=self._world_ranks().reshape(shape),
                mesh_dim_names=AXES,
            )
        return self._mesh

    def group(self, *axes: str) -> ProcessGroup:
        """This rank's group over the given axes. Collective over all ranks on first use.

        Ranks in it are numbered by coordinate, the slowest axis first.
        """
        wide = tuple(axis for axis in AXES if axis in axes and self._plan.degree(axis) > 1)
        if wide not in self._groups:
            self._groups[wide] = self._make(wide)
        return self._groups[wide]

    def mesh(self, *axes: str) -> DeviceMesh:
        """The part of `native` over the given axes, which are named in the order of `AXES`."""
        return self.native[axes]

    def _make(self, wide: tuple[str, ...]) -> ProcessGroup:
        parts = self._plan.groups(*wide) if wide else self._plan.groups("context")
        if not wide:  # every rank alone, whatever the degrees are
            parts = tuple((rank,) for rank in range(self._plan.world_size))
        if len(parts) == 1 and parts[0] == tuple(range(self._group.world_size)):
            return self._group
        divided: Any = self._group
        return cast("ProcessGroup", divided.partition(parts))

    def _world_ranks(self) -> torch.Tensor:
        """Ranks in torch's default group, by rank of ours."""
        import torch.distributed as dist

        ranks = dist.get_process_group_ranks(self._group.native)
        return torch.tensor(ranks, dtype=torch.int, device="cpu")


DATA: Final = ("data", "data_shard")
