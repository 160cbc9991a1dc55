"""Where rank 0 says at which place it listens: nowhere, since it was told; or in a file."""

from __future__ import annotations

from typing import final

from parallelkit import portfile
from parallelkit.errors import GroupError
from parallelkit.meeting.arrival import Place
from parallelkit.specs import GroupSpec


@final
class Known:
    """Everybody knows the place."""

    def __init__(self, place: Place) -> None:
        self._place = place

    def publish(self, place: Place) -> None: ...

    def find(self) -> Place | None:
        return self._place

    def withdraw(self) -> None: ...

    def describe(self) -> str:
        return f"{self._place.host}:{self._place.port}"


@final
class File:
    """A file that every rank of this host can reach; see `parallelkit.portfile`."""

    def __init__(self, path: str, run: str) -> None:
        self._path = path
        self._run = run
        self._said: portfile.Announcement | None = None

    def publish(self, place: Place) -> None:
        self._said = portfile.announce(
            self._path, self._run, place.host, place.port, nonce=place.nonce
        )

    def find(self) -> Place | None:
        said = portfile.read(self._path)
        if said is None or said.run != self._run:
            return None
        return Place(said.host, said.port, said.nonce)

    def withdraw(self) -> None:
        if self._said is not None:
            portfile.withdraw(self._path, self._said)

    def describe(self) -> str:
        return self._path


def board_of(spec: GroupSpec, run: str) -> Known | File:
    """The board that a launch without a service of its own has.

    Raises:
        GroupError: it has neither a port nor a file.
    """
    if spec.master_port:
        return Known(Place(spec.master_addr or "127.0.0.1", spec.master_port))
    if not spec.launch.rendezvous_file:
        raise GroupError(
            f"rank {spec.rank} knows no port of rank 0: set master_port (MASTER_PORT), or "
            "PARALLELKIT_RENDEZVOUS_FILE to a path that every rank can reach"
        )
    return File(spec.launch.rendezvous_file, run)
