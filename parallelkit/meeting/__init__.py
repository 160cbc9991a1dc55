"""Ranks meet and stay in touch, without any framework: sockets, msgspec, deadlines.

`meet` brings all ranks of a group together and returns a `Star`, the connections that remain.
"""

from __future__ import annotations

import socket
from typing import NamedTuple

from parallelkit.meeting.address import bind, listen, own_address, resolve
from parallelkit.meeting.arrival import Board, Place, Seat, host, join, new_nonce
from parallelkit.meeting.boards import board_of
from parallelkit.meeting.clock import Deadline
from parallelkit.meeting.hub import Hub
from parallelkit.meeting.leaf import Leaf
from parallelkit.meeting.star import Star
from parallelkit.specs import GroupSpec

__all__ = [
    "Board",
    "Deadline",
    "Door",
    "Place",
    "Seat",
    "Star",
    "bind",
    "enter",
    "listen",
    "meet",
    "open_door",
    "own_address",
    "resolve",
    "run_identity",
]


class Door(NamedTuple):
    """A listening socket of rank 0, and what its visitors need to know."""

    listener: socket.socket
    place: Place


def run_identity(spec: GroupSpec, opened: int = 0) -> str:
    """Name this run and group, the same on all its ranks.

    Args:
        opened: how many groups this process opened before.
    """
    return f"{spec.launch.job_id or '-'}/{spec.launch.restart_count or 0}/{opened}"


def meet(
    spec: GroupSpec, *, opened: int = 0, board: Board | None = None, address: str | None = None
) -> Star:
    """Bring all ranks together. Collective; blocks up to `spec.timeout` seconds.

    Args:
        opened: how many groups this process opened before; the same on all ranks.
        board: where rank 0 publishes a free port; by default the port that everybody knows, or
            the launch's rendezvous file.
        address: with a board, the IPv4 address at which rank 0 listens.

    Raises:
        PortInUseError: rank 0 cannot bind its port; at once.
        RendezvousTimeoutError: `missing` names the ranks that did not arrive, as far as known.
        GroupError: the host name is unknown on rank 0, another process has this rank, or the
            ranks disagree about the world size.
    """
    if spec.world_size == 1:
        return Star(0, 1, spec.timeout)
    seat = Seat(
        rank=spec.rank,
        world_size=spec.world_size,
        timeout=spec.timeout,
        run=run_identity(spec, opened),
    )
    if spec.rank:
        return enter(seat, board or board_of(spec, seat.run))
    if board is not None:
        return enter(seat, board, open_door(address or "127.0.0.1"))
    listener, named = listen(spec)
    nonce = "" if spec.master_port else new_nonce()
    place = Place(named, listener.getsockname()[1], nonce)
    return enter(seat, board_of(spec, seat.run), Door(listener, place))


def open_door(address: str) -> Door:
    """Listen on a free port of one address, for visitors who were told.

    Raises:
        OSError: the address is none of this host's.
    """
    listener = bind(address)
    return Door(listener, Place(address, listener.getsockname()[1], new_nonce()))


def enter(seat: Seat, board: Board, door: Door | None = None) -> Star:
    """Meet over a board: with a door as rank 0, else as a visitor. Collective."""
    if door is None:
        connection, where = join(seat, board, Deadline(seat.timeout))
        return Leaf(connection, seat.rank, seat.world_size, seat.timeout, where)
    # A little before the others' deadline, so that they hear from here who is missing.
    deadline = Deadline(seat.timeout - min(1.0, seat.timeout / 10))
    place = door.place
    try:
        board.publish(place)
        peers = host(seat, door.listener, place, deadline)
    except BaseException:
        door.listener.close()
        raise
    finally:
        board.withdraw()
    return Hub(peers, seat.timeout, f"{place.host}:{place.port}", place.host)
