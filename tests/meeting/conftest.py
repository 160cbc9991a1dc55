"""Ranks as threads of one process: fast, and what they do to each other's sockets is real."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from parallelkit.errors import ParallelKitError
from parallelkit.meeting import Star, meet
from parallelkit.plugin import GroupSpec, LaunchInfo


def make_spec(rank: int = 0, world_size: int = 1, **changes: Any) -> GroupSpec:
    values: dict[str, Any] = {
        "framework": "none",
        "backend": "none",
        "device": "cpu",
        "rank": rank,
        "world_size": world_size,
        "local_rank": rank,
        "local_world_size": world_size,
        "master_addr": "127.0.0.1",
        "timeout": 10.0,
        "launch": LaunchInfo(),
    }
    return GroupSpec(**(values | changes))


def in_threads(*works: Callable[[], Any], delays: dict[int, float] | None = None) -> list[Any]:
    """Run each in a thread of its own; return what each gave, or its error."""
    results: list[Any] = [None] * len(works)

    def run(at: int, work: Callable[[], Any]) -> None:
        time.sleep((delays or {}).get(at, 0))
        try:
            results[at] = work()
        except ParallelKitError as error:
            results[at] = error

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return results


def together(*specs: GroupSpec, delays: dict[int, float] | None = None) -> list[Any]:
    """Let each spec meet in a thread of its own; return stars or errors."""
    return in_threads(*((lambda s=s: meet(s)) for s in specs), delays=delays)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def leave(*stars: Any) -> None:
    for star in sorted((s for s in stars if isinstance(s, Star)), key=lambda s: -s.rank):
        star.leave(1.0)


@pytest.fixture
def stars() -> Iterator[Callable[..., list[Star]]]:
    """Make the ends of a group of some ranks; they are closed after the test."""
    made: list[Star] = []

    def make(world_size: int, timeout: float = 10.0) -> list[Star]:
        port = free_port()
        found = together(
            *(
                make_spec(r, world_size, master_port=port, timeout=timeout)
                for r in range(world_size)
            )
        )
        made.extend(found)
        return found

    yield make
    leave(*made)


@pytest.fixture
def busy() -> Iterator[int]:
    """A port that another listens on, and does not answer."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield int(listener.getsockname()[1])
