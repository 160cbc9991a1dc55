"""msrun's scheduler: the extra process that runs the same script and is no rank.

There `init_process_group` ends up in `serve`, which tells the workers where rank 0 listens, stays
until all of them left, and never returns to the script, just as MindSpore's own scheduler does.
The workers' end is `Client`, a board in the sense of `parallelkit.meeting.arrival`.
"""

from __future__ import annotations

import contextlib
import select
import socket
from typing import Final, final

import msgspec

from parallelkit.errors import GroupError, ParallelKitError, RendezvousTimeoutError
from parallelkit.launch import LaunchInfo
from parallelkit.meeting.address import bind, raise_bind_error, resolve
from parallelkit.meeting.arrival import Hello, Place, Seat, Word
from parallelkit.meeting.clock import Deadline, missing_error, unreachable_error
from parallelkit.meeting.frames import (
    BANNER,
    BadFrame,
    Connection,
    Kind,
    NotAMeeting,
    PeerGone,
    connect,
)

_SAY_SECONDS: Final = 1.0
_LOOK_SECONDS: Final = 0.2
_RUN: Final = "scheduler"


class ForeignScheduler(ParallelKitError):
    """What listens at the scheduler's address is not ours: MindSpore's own, say."""


def serve(launch: LaunchInfo, timeout: float) -> int:
    """Be the scheduler until every worker has left. Blocks for as long as the job runs.

    Args:
        launch: of the scheduler process: where to listen, and for how many workers.
        timeout: seconds for all workers to come.

    Returns:
        Exit code: 0, or 1 if a worker did not come or died.

    Raises:
        PortInUseError, GroupError: the address cannot be had.
    """
    named, port = launch.master_addr or "127.0.0.1", launch.master_port or 0
    try:
        host = resolve(named)
    except OSError as error:
        raise GroupError(
            f"the scheduler's host name {named!r} (MS_SCHED_HOST) has no IPv4 address: {error}"
        ) from error
    try:
        listener = bind(host, port)
    except OSError as error:
        raise_bind_error(error, named, host, port, who="the scheduler")
    with listener:
        desk = _Desk(listener, launch.world_size)
        try:
            return desk.run(Deadline(timeout))
        finally:
            desk.close()


class _Desk:
    """Who is connected, who said which rank it is, who left and who died."""

    def __init__(self, listener: socket.socket, world_size: int) -> None:
        self._listener = listener
        self._world_size = world_size
        self._place: Place | None = None
        self._all: dict[int, Connection] = {}
        self._ranks: dict[int, int] = {}  # descriptor to rank
        self._came: set[int] = set()
        self._left: set[int] = set()
        self._died: set[int] = set()
        self._epoll = select.epoll()
        listener.setblocking(False)
        self._epoll.register(listener, select.EPOLLIN)

    def run(self, deadline: Deadline) -> int:
        """Serve until all are gone, or too few came."""
        while len(self._left | self._died) < self._world_size:
            complete = len(self._came) == self._world_size
            if not complete and (deadline.left <= 0 or self._died):
                missing = sorted(set(range(self._world_size)) - self._came) or sorted(self._died)
                self._tell(Word("missing", missing[:1024], len(missing)))
                return 1
            for descriptor, _ in self._epoll.poll(1.0 if complete else min(deadline.left, 1.0)):
                if descriptor == self._listener.fileno():
                    self._accept()
                else:
                    self._hear(descriptor)
        return 1 if self._died else 0

    def close(self) -> None:
        for connection in self._all.values():
            connection.close()
        self._epoll.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the visitor is gone already
            sock, _ = self._listener.accept()
            self._all[sock.fileno()] = Connection(sock)
            self._epoll.register(sock.fileno(), select.EPOLLIN)
            sock.send(BANNER)

    def _hear(self, descriptor: int) -> None:
        connection = self._all[descriptor]
        connection.expect()
        try:
            frame = connection.advance()
            if frame is None:
                return
            if frame.kind is Kind.HELLO:
                self._greet(descriptor, msgspec.msgpack.decode(frame.payload, type=Hello))
            elif frame.kind is Kind.DATA and self._ranks.get(descriptor) == 0:
                self._place = msgspec.msgpack.decode(frame.payload, type=Place)
                for rank_at in self._ranks:
                    self._tell_place(rank_at)
            elif frame.kind is Kind.LEAVE and descriptor in self._ranks:
                self._left.add(self._ranks.pop(descriptor))
                self._forget(descriptor)
            else:
                self._forget(descriptor)
        except (PeerGone, BadFrame, msgspec.DecodeError, UnicodeDecodeError):
            self._forget(descriptor)

    def _greet(self, descriptor: int, hello: Hello) -> None:
        known = 0 <= hello.rank < self._world_size == hello.world_size
        if not known or hello.run != _RUN or hello.rank in self._came:
            said = "taken" if known and hello.run == _RUN else "other"
            _say(self._all[descriptor], Word("taken" if said == "taken" else "other"))
            self._forget(descriptor)
            return
        self._came.add(hello.rank)
        self._ranks[descriptor] = hello.rank
        self._tell_place(descriptor)

    def _tell_place(self, descriptor: int) -> None:
        if self._place is not None and self._ranks[descriptor] != 0:
            with contextlib.suppress(PeerGone, TimeoutError):
                data = msgspec.msgpack.encode(self._place)
                self._all[descriptor].send(Kind.DATA, data, Deadline(_SAY_SECONDS))

    def _tell(self, word: Word) -> None:
        for descriptor in self._ranks:
            _say(self._all[descriptor], word)

    def _forget(self, descriptor: int) -> None:
        """Close a connection; a rank that did not say goodbye died."""
        if descriptor in self._ranks:
            self._died.add(self._ranks.pop(descriptor))
        self._epoll.unregister(descriptor)
        self._all.pop(descriptor).close()


def _say(connection: Connection, word: Word) -> None:
    with contextlib.suppress(PeerGone, TimeoutError):
        connection.send(Kind.WORD, msgspec.msgpack.encode(word), Deadline(_SAY_SECONDS))


@final
class Client:
    """A worker's connection to the scheduler, kept until it leaves the group."""

    def __init__(self, seat: Seat, named: str, port: int, deadline: Deadline) -> None:
        """Connect, and wait for the scheduler to listen if it does not yet.

        Raises:
            ForeignScheduler: something else listens there.
            RendezvousTimeoutError: nobody listens there within the deadline.
        """
        self._seat = seat
        self._where = f"{named}:{port}"
        self._connection = self._connect(named, port, deadline)
        hello = Hello(_RUN, "", seat.rank, seat.world_size)
        try:
            self._connection.send(Kind.HELLO, msgspec.msgpack.encode(hello), deadline)
        except (PeerGone, TimeoutError) as error:
            raise unreachable_error(seat, self._where, str(error), "the scheduler") from error

    @property
    def host(self) -> str:
        """This host's address as the scheduler sees it."""
        return self._connection.local_host

    def publish(self, place: Place) -> None:
        try:
            data = msgspec.msgpack.encode(place)
            self._connection.send(Kind.DATA, data, Deadline(_SAY_SECONDS))
        except (PeerGone, TimeoutError) as error:
            raise GroupError(f"the scheduler at {self._where} is gone: {error}") from error

    def find(self) -> Place | None:
        """Wait a moment for the scheduler to say where rank 0 is."""
        try:
            frame = self._connection.receive(Deadline(_LOOK_SECONDS))
            if frame.kind is Kind.DATA:
                return msgspec.msgpack.decode(frame.payload, type=Place)
            if frame.kind is Kind.WORD:
                raise self._refused(msgspec.msgpack.decode(frame.payload, type=Word))
        except TimeoutError:
            return None
        except (PeerGone, BadFrame, msgspec.DecodeError) as error:
            raise RendezvousTimeoutError(
                f"the scheduler at {self._where} ended before everybody was there: {error}"
            ) from error
        return None

    def withdraw(self) -> None: ...

    def describe(self) -> str:
        return f"a place that the scheduler at {self._where} would tell"

    def leave(self) -> None:
        """Tell the scheduler that this worker ends in good order; harmless when repeated."""
        with contextlib.suppress(PeerGone, TimeoutError):
            self._connection.send(Kind.LEAVE, b"", Deadline(_SAY_SECONDS))
        self._connection.close()

    def _refused(self, word: Word) -> GroupError:
        if word.said == "missing":
            return missing_error(self._seat, self._where, word.ranks, word.count)
        return GroupError(
            f"the scheduler at {self._where} does not expect rank {self._seat.rank} of "
            f"{self._seat.world_size}: it is another job's, or two workers have one rank. Set "
            "MS_SCHED_PORT (msrun --master_port) to another port"
        )

    def _connect(self, named: str, port: int, deadline: Deadline) -> Connection:
        while True:
            try:
                return connect(resolve(named), port, deadline)
            except NotAMeeting as error:
                raise ForeignScheduler(f"{self._where}: {error}") from error
            except OSError as error:
                problem = error.strerror or str(error)
            if not deadline.pause():
                raise unreachable_error(self._seat, self._where, problem, "the scheduler")
