"""Groups over the axes of a plan."""

from __future__ import annotations

from typing import Any, Final, cast, final

from parallelkit.plan import AXES, ParallelPlan
from parallelkit.protocols import ProcessGroup

DATA: Final = ("data", "data_shard")


@final
class AxisGroups:
    """Groups over axes of a plan, made on first use with the timeout of the group divided.

    Making one is collective over the whole group, in the same order on every rank; the plan's
    degrees, which are the same everywhere, decide what is made when.
    """

    def __init__(self, plan: ParallelPlan, group: ProcessGroup) -> None:
        self._plan = plan
        self._group = group
        self._groups: dict[tuple[str, ...], ProcessGroup] = {}

    def group(self, *axes: str) -> ProcessGroup:
        """This rank's group over the given axes. Collective over all ranks on first use.

        Ranks in it are numbered by coordinate, the slowest axis first.
        """
        wide = tuple(axis for axis in AXES if axis in axes and self._plan.degree(axis) > 1)
        if wide not in self._groups:
            self._groups[wide] = self._make(wide)
        return self._groups[wide]

    def _make(self, wide: tuple[str, ...]) -> ProcessGroup:
        parts = self._plan.groups(*wide) if wide else self._plan.groups("context")
        if not wide:  # every rank alone, whatever the degrees are
            parts = tuple((rank,) for rank in range(self._plan.world_size))
        if len(parts) == 1 and parts[0] == tuple(range(self._group.world_size)):
            return self._group
        divided: Any = self._group
        return cast("ProcessGroup", divided.partition(parts))


def is_world(group: ProcessGroup) -> bool:
    """Whether a group is all of MindSpore's ranks, over which its own steps reduce."""
    if group.world_size == 1:
        return False
    from mindspore.communication import GlobalComm

    return bool(group.native == GlobalComm.WORLD_COMM_GROUP)
