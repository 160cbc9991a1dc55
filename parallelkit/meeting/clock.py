"""The end of a wait, and how to say who was waited for."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final, Protocol

import attrs

from parallelkit.errors import RendezvousTimeoutError

_POLL_SECONDS: Final = (0.002, 0.2)  # first and longest pause between two looks
_SHOWN: Final = 16  # ranks in a message


class Seated(Protocol):
    """Whoever has a place in a meeting: a `GroupSpec`, a `Seat`."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def timeout(self) -> float: ...


@attrs.define
class Deadline:
    """The end of a wait, by the monotonic clock; pauses between looks grow from call to call."""

    seconds: float
    end: float = attrs.field(init=False)
    _pause: float = attrs.field(default=_POLL_SECONDS[0], init=False)

    def __attrs_post_init__(self) -> None:
        self.end = time.monotonic() + self.seconds

    @property
    def left(self) -> float:
        """Seconds until the end, 0 when it is over."""
        return max(0.0, self.end - time.monotonic())

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return self.seconds - (self.end - time.monotonic())

    def pause(self) -> bool:
        """Sleep a little; False once the time is over."""
        if self.left <= 0:
            return False
        time.sleep(min(self._pause, self.left))
        self._pause = min(self._pause * 1.5, _POLL_SECONDS[1])
        return True


def listed(items: Sequence[object], count: int | None = None) -> str:
    """Write the first of many; `count` where there are more than are known."""
    count = len(items) if count is None else count
    shown = ", ".join(map(str, items[:_SHOWN]))
    return f"{shown} and {count - _SHOWN} more" if count > _SHOWN else shown


def missing_error(
    spec: Seated, where: str, missing: Sequence[int], count: int | None = None
) -> RendezvousTimeoutError:
    """The error for ranks that did not arrive.

    Args:
        where: `host:port` of the meeting.
        missing: ranks known by number.
        count: how many are missing, where that is more.
    """
    count = len(missing) if count is None else count
    return RendezvousTimeoutError(
        f"{count} of {spec.world_size} ranks did not arrive at {where} within "
        f"{spec.timeout:g} s: missing rank(s) {listed(missing, count)}. Check their logs, or "
        "raise timeout",
        missing=missing,
    )


def unreachable_error(
    spec: Seated, where: str, problem: str, what: str = "rank 0"
) -> RendezvousTimeoutError:
    """The error of a rank that did not get through to the meeting's host."""
    return RendezvousTimeoutError(
        f"rank {spec.rank} of {spec.world_size} could not reach {what} at {where} within "
        f"{spec.timeout:g} s: {problem}. Check that rank 0 was started, and that master_addr and "
        "master_port (MASTER_ADDR, MASTER_PORT) are the same on every rank",
        missing=(0,),
    )
