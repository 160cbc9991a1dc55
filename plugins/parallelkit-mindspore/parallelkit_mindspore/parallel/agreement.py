"""Whether all ranks mean the same, asked before they do something that would hang otherwise."""

from __future__ import annotations

from itertools import zip_longest
from typing import Final

import mindspore as ms

from parallelkit.errors import RankMismatchError
from parallelkit.protocols import Plain, ProcessGroup

_SHOWN: Final = 5


def any_rank(mine: bool, group: ProcessGroup) -> bool:
    """Whether something holds on any rank. Collective over `group`."""
    return bool(int(group.all_reduce(ms.Tensor([int(mine)], ms.int32), "max")[0]))


def same_everywhere(mine: Plain, group: ProcessGroup) -> tuple[bool, Plain]:
    """Compare a plain object with rank 0's. Collective over `group`.

    Returns:
        Whether it is the same on every rank, which all ranks are told alike; and rank 0's.
    """
    first = group.broadcast_object(mine, 0)
    return not any_rank(first != mine, group), first


def gather(mine: Plain, group: ProcessGroup, *, timeout: float | None = None) -> list[Plain]:
    """Give every rank the plain object of each, by rank. Collective over `group`.

    Args:
        timeout: seconds that each rank may be late, in place of the group's.
    """
    return [group.broadcast_object(mine, rank, timeout=timeout) for rank in range(group.world_size)]


def agree(mine: list[str], group: ProcessGroup, what: str) -> None:
    """Raise on every rank unless the lines `mine` are the same on all. Collective over `group`.

    Raises:
        RankMismatchError: with the differences, as far as they are this rank's.
    """
    same, first = same_everywhere([*mine], group)
    if same:
        return
    how = "another rank's differ from rank 0's"
    if isinstance(first, list) and first != mine:
        pairs = zip_longest(mine, first, fillvalue="nothing")
        apart = [f"{here!r} where rank 0 has {there!r}" for here, there in pairs if here != there]
        more = f", and {len(apart) - _SHOWN} more" if len(apart) > _SHOWN else ""
        how = f"rank {group.rank} has {'; '.join(apart[:_SHOWN])}{more}"
    raise RankMismatchError(
        f"parallelize got different {what}: {how}. Every rank gives the same ones"
    )
