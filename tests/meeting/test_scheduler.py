"""msrun's scheduler: it brings the workers together, and its exit code says how they ended."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from parallelkit.errors import GroupError, PortInUseError, RendezvousTimeoutError
from parallelkit.meeting import Deadline, Seat, Star, meet
from parallelkit.meeting.scheduler import Client, ForeignScheduler, serve
from parallelkit.plugin import LaunchInfo

from .conftest import free_port, in_threads, leave, make_spec


def launch(port: int, workers: int = 2) -> LaunchInfo:
    return LaunchInfo(
        world_size=workers, role="scheduler", master_addr="127.0.0.1", master_port=port
    )


def client(port: int, rank: int, workers: int = 2, timeout: float = 10.0) -> Client:
    seat = Seat(rank=rank, world_size=workers, timeout=timeout, run="x")
    return Client(seat, "127.0.0.1", port, Deadline(timeout))


def work(port: int, rank: int, workers: int = 2, *, dies: bool = False) -> Any:
    at = client(port, rank, workers)
    star = meet(make_spec(rank, workers), board=at, address=at.host)
    star.agree("hello")
    leave(star)
    if dies:
        at._connection.close()
    else:
        at.leave()
    return star.where


@pytest.mark.parametrize("workers", [2, 4])
def test_workers_meet_and_leave(workers: int) -> None:
    port = free_port()
    found = in_threads(
        lambda: serve(launch(port, workers), 10.0),
        *((lambda r=r: work(port, r, workers)) for r in range(workers)),
        delays={0: 0.3, 1: 0.6},  # nobody listens at first; rank 0 is last
    )
    assert found[0] == 0
    assert len(set(found[1:])) == 1
    assert isinstance(found[1], str)


def test_a_worker_that_dies_shows_in_the_exit_code() -> None:
    port = free_port()
    found = in_threads(
        lambda: serve(launch(port), 10.0),
        lambda: work(port, 0),
        lambda: work(port, 1, dies=True),
    )
    assert found[0] == 1


def test_a_worker_that_does_not_come_is_named() -> None:
    port = free_port()

    def come(rank: int) -> Star:
        at = client(port, rank, 3)
        try:
            return meet(make_spec(rank, 3), board=at, address=at.host)
        finally:
            at.leave()

    found = in_threads(
        lambda: serve(launch(port, 3), 1.0), lambda: come(1), lambda: come(2), delays={0: 0.2}
    )
    assert found[0] == 1
    for error in found[1:]:
        assert isinstance(error, RendezvousTimeoutError)
        assert error.missing == (0,)


def test_no_scheduler() -> None:
    with pytest.raises(RendezvousTimeoutError, match="could not reach the scheduler at"):
        client(free_port(), 0, timeout=0.4)


def test_another_scheduler(busy: int) -> None:
    with pytest.raises(ForeignScheduler, match="does not answer as a meeting"):
        client(busy, 0, timeout=0.5)


def test_port_in_use(busy: int) -> None:
    with pytest.raises(PortInUseError, match=rf"the scheduler cannot listen on .*:{busy}"):
        serve(launch(busy), 1.0)
    with pytest.raises(GroupError, match="MS_SCHED_HOST"):
        serve(LaunchInfo(world_size=2, master_addr="no-such-host.invalid", master_port=1), 1.0)


def test_wrong_workers_and_strangers_hurt_nobody() -> None:
    port = free_port()

    def annoy() -> None:
        at = client(port, 0, 7)  # of another world
        seat_refused = None
        try:
            while at.find() is None:
                pass
        except GroupError as error:
            seat_refused = error
        assert "does not expect rank 0 of 7" in str(seat_refused)
        at.leave()
        for data in (b"GET /\r\n\r\n", b"\0" * 100, b"\x08" + b"\0" * 8):
            with socket.create_connection(("127.0.0.1", port), 5) as sock:
                sock.sendall(data)

    found = in_threads(
        lambda: serve(launch(port), 10.0),
        annoy,
        lambda: work(port, 0),
        lambda: work(port, 1),
        delays={2: 0.8, 3: 0.8},
    )
    assert found[0] == 0, found
    assert found[1] is None
