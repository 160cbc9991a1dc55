"""What one rank alone can see is wrong with a collective's arguments, whatever its tensors are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from parallelkit.errors import CollectiveError, GroupError
from parallelkit.specs import check_timeout


def source(src: int, world_size: int) -> int:
    """Check that `src` is a rank of the group."""
    if isinstance(src, bool) or not isinstance(src, int) or not 0 <= src < world_size:
        raise CollectiveError(f"src is {src!r}; it is a rank of this group, 0 to {world_size - 1}")
    return src


def members(ranks: Sequence[int], world_size: int) -> list[int]:
    """Check the ranks of a subgroup: one or more, each once, all in the group."""
    if not isinstance(ranks, Iterable):
        raise GroupError(f"subgroup got {ranks!r}; it takes a list of ranks")
    wanted = list(ranks)
    good = all(type(r) is int and 0 <= r < world_size for r in wanted)
    if not wanted or not good or len(set(wanted)) != len(wanted):
        raise GroupError(
            f"subgroup got ranks {wanted!r}; allowed are one or more ranks from 0 to "
            f"{world_size - 1}, each once"
        )
    return wanted


def parts(given: Sequence[Sequence[int]], world_size: int) -> list[list[int]]:
    """Check the parts of a whole group: every rank in exactly one of them."""
    if not isinstance(given, Iterable):
        raise GroupError(f"partition got {given!r}; it takes a list of lists of ranks")
    checked = [members(part, world_size) for part in given]
    if sorted(rank for part in checked for rank in part) != list(range(world_size)):
        raise GroupError(
            f"partition got {len(checked)} parts that do not hold each of the ranks 0 to "
            f"{world_size - 1} once"
        )
    return checked


def seconds(timeout: float | None, default: float) -> float:
    """Check a call's own timeout."""
    if timeout is None:
        return default
    try:
        check_timeout(timeout)
    except GroupError as error:
        raise CollectiveError(str(error)) from None
    return timeout
