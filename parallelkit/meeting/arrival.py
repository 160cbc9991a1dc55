"""Ranks find each other: rank 0 listens, the others come and say who they are, all hear the word.

The listening side speaks first (`frames.BANNER`), so nobody talks to a stranger. Whoever says
something else than a rank of this run would is sent away and hurts nobody. The connections that
remain are the group's control plane, `parallelkit.meeting.star`.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
import select
import socket
from typing import Final, Literal, NoReturn, Protocol

import attrs
import msgspec

from parallelkit.errors import GroupError, RendezvousTimeoutError
from parallelkit.meeting.address import resolve
from parallelkit.meeting.clock import Deadline, missing_error, unreachable_error
from parallelkit.meeting.frames import (
    BANNER,
    BadFrame,
    Connection,
    Frame,
    Kind,
    NotAMeeting,
    PeerGone,
    connect,
)

_HELLO_SECONDS: Final = 5.0  # for a stranger to say who it is
_WORD_SECONDS: Final = 1.0  # for a rank to take rank 0's word
_STRANGERS: Final = 1024  # connections at once that have not said who they are
_TOLD: Final = 1024  # missing ranks in rank 0's word to the others


class Place(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where rank 0 listens, and what a visitor must know."""

    host: str
    port: int
    nonce: str = ""


class Hello(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who comes."""

    run: str
    nonce: str
    rank: int
    world_size: int


class Word(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What rank 0 says to who came.

    Attributes:
        said: `go`; `missing` (ranks); `world` (sizes differ, as text says); `taken` (another
            process is that rank); `other` (this is another run's rank 0).
        ranks: the first of those missing; count: of how many.
    """

    said: Literal["go", "missing", "world", "taken", "other"]
    ranks: list[int] = []
    count: int = 0
    text: str = ""


@attrs.frozen(kw_only=True)
class Seat:
    """One process's place in a meeting.

    Attributes:
        rank, world_size: of this meeting.
        timeout: seconds for everybody's arrival.
        run: identity of the run, the same on all ranks.
    """

    rank: int
    world_size: int
    timeout: float
    run: str


class Board(Protocol):
    """Where rank 0 says at which place it listens."""

    def publish(self, place: Place) -> None:
        """Rank 0: tell the others."""

    def find(self) -> Place | None:
        """The others: look, once; None while nothing is said."""

    def withdraw(self) -> None:
        """Rank 0: everyone has come, or the time is over."""

    def describe(self) -> str:
        """What to show for the place while it is not known."""


def new_nonce() -> str:
    """A secret that only those who read the board know."""
    return secrets.token_hex(16)


# --- rank 0 ------------------------------------------------------------------------------------


def host(
    seat: Seat, listener: socket.socket, place: Place, deadline: Deadline
) -> dict[int, Connection]:
    """Wait for every other rank, then give the word. Takes and closes the listener.

    Returns:
        The connection to each other rank.

    Raises:
        RendezvousTimeoutError: with those who are missing, which are told to those who came.
        GroupError: ranks disagree about the world size.
    """
    reception = _Reception(seat, listener, place)
    try:
        reception.wait(deadline)
        missing = [r for r in range(1, seat.world_size) if r not in reception.here]
        if missing:
            reception.tell(Word("missing", missing[:_TOLD], len(missing)))
            raise missing_error(seat, f"{place.host}:{place.port}", missing)
        reception.tell(Word("go"))
        return reception.take()
    finally:
        reception.close()


class _Reception:
    """Rank 0's desk: who knocks, who said what, who is here."""

    def __init__(self, seat: Seat, listener: socket.socket, place: Place) -> None:
        self.here: dict[int, Connection] = {}
        self._seat = seat
        self._place = place
        self._listener = listener
        self._strangers: dict[int, tuple[Connection, Deadline]] = {}
        self._guests: dict[int, int] = {}  # descriptor to rank
        self._epoll = select.epoll()
        listener.setblocking(False)
        self._epoll.register(listener, select.EPOLLIN)

    def wait(self, deadline: Deadline) -> None:
        """Receive until everybody is here or the time is over."""
        while len(self.here) < self._seat.world_size - 1 and deadline.left > 0:
            for descriptor, _ in self._epoll.poll(min(deadline.left, 0.5)):
                if descriptor == self._listener.fileno():
                    self._open_door()
                elif descriptor in self._strangers:
                    self._listen_to(descriptor)
                elif descriptor in self._guests:
                    self._lost(descriptor)
            for descriptor, (_, limit) in list(self._strangers.items()):
                if limit.left <= 0:
                    self._send_away(descriptor)

    def tell(self, word: Word) -> None:
        """Give everyone here the word."""
        for connection in self.here.values():
            _say(connection, word)

    def take(self) -> dict[int, Connection]:
        """Hand the guests' connections over."""
        taken, self.here = self.here, {}
        return dict(sorted(taken.items()))

    def close(self) -> None:
        """Close the door, and everything that was not taken over."""
        for connection in (*self.here.values(), *(c for c, _ in self._strangers.values())):
            connection.close()
        self._listener.close()
        self._epoll.close()

    def _open_door(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    raise GroupError(
                        f"rank 0 cannot open more connections ({error.strerror}): raise the limit "
                        f"of open files (ulimit -n) above the {self._seat.world_size} ranks"
                    ) from error
                continue  # the visitor is gone already
            if len(self._strangers) >= _STRANGERS:
                self._send_away(next(iter(self._strangers)))
            connection = Connection(sock)
            self._strangers[sock.fileno()] = connection, Deadline(_HELLO_SECONDS)
            self._epoll.register(sock.fileno(), select.EPOLLIN)
            try:
                sock.send(BANNER)
            except OSError:
                self._send_away(sock.fileno())

    def _listen_to(self, descriptor: int) -> None:
        connection, _ = self._strangers[descriptor]
        try:
            frame = connection.advance()
            if frame is None:
                return
            hello = _hello(frame)
        except (PeerGone, BadFrame):
            self._send_away(descriptor)
            return
        seat, said = self._seat, None
        if (hello.run, hello.nonce) != (seat.run, self._place.nonce):
            said = Word("other")
        elif hello.world_size != seat.world_size:
            self._refuse_world(connection, hello)
        elif hello.rank in self.here or not 0 < hello.rank < seat.world_size:
            said = Word("taken")
        if said is not None:
            _say(connection, said)
            self._send_away(descriptor)
            return
        del self._strangers[descriptor]
        self.here[hello.rank] = connection
        self._guests[descriptor] = hello.rank

    def _refuse_world(self, connection: Connection, hello: Hello) -> NoReturn:
        text = (
            f"ranks disagree about the world size: rank 0 has {self._seat.world_size}, rank "
            f"{hello.rank} has {hello.world_size}"
        )
        _say(connection, Word("world", text=text))
        self.tell(Word("world", text=text))
        raise GroupError(text)

    def _lost(self, descriptor: int) -> None:
        """Someone who is here should be quiet: it went away, perhaps to come again."""
        rank = self._guests.pop(descriptor)
        self._epoll.unregister(descriptor)
        self.here.pop(rank).close()

    def _send_away(self, descriptor: int) -> None:
        connection, _ = self._strangers.pop(descriptor)
        self._epoll.unregister(descriptor)
        connection.close()


def _hello(frame: Frame) -> Hello:
    try:
        if frame.kind is Kind.HELLO:
            return msgspec.msgpack.decode(frame.payload, type=Hello)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadFrame(str(error)) from error
    raise BadFrame(f"{frame.kind.name} came before HELLO")


def _say(connection: Connection, word: Word) -> None:
    with contextlib.suppress(PeerGone, TimeoutError):
        connection.send(Kind.WORD, msgspec.msgpack.encode(word), Deadline(_WORD_SECONDS))


# --- the other ranks ---------------------------------------------------------------------------


def join(seat: Seat, board: Board, deadline: Deadline) -> tuple[Connection, str]:
    """Find rank 0, say who this is, wait for the word. Starts over when rank 0 goes away.

    Returns:
        The connection to rank 0, and `host:port`.

    Raises:
        RendezvousTimeoutError: rank 0, or the ranks it names, did not come.
        GroupError: another process is this rank, or ranks disagree about the world size.
    """
    problem = "nobody said where it listens"
    where = board.describe()
    heard = False  # a host that answers for another run: its silence later says nothing
    while True:
        place = board.find()
        if place is not None:
            where = f"{place.host}:{place.port}"
            try:
                return _visit(seat, place, deadline), where
            except NotAMeeting as error:
                problem, heard = str(error), True
            except TimeoutError as error:
                if not heard:
                    raise RendezvousTimeoutError(
                        f"rank 0 at {where} gave rank {seat.rank} no word within "
                        f"{seat.timeout:g} s; look at its log",
                        missing=(0,),
                    ) from error
            except PeerGone:
                problem = "it went away before everybody was there"
            except OSError as error:
                problem = error.strerror or str(error)
        if not deadline.pause():
            raise unreachable_error(seat, where, problem)


def _visit(seat: Seat, place: Place, deadline: Deadline) -> Connection:
    where = f"{place.host}:{place.port}"
    connection = connect(resolve(place.host), place.port, deadline)
    try:
        hello = Hello(seat.run, place.nonce, seat.rank, seat.world_size)
        connection.send(Kind.HELLO, msgspec.msgpack.encode(hello), deadline)
        word = _word(connection.receive(deadline))
    except BadFrame as error:
        connection.close()
        raise NotAMeeting(str(error)) from error
    except BaseException:
        connection.close()
        raise
    if word.said == "go":
        return connection
    connection.close()
    if word.said == "missing":
        raise missing_error(seat, where, word.ranks, word.count)
    if word.said == "world":
        raise GroupError(word.text)
    if word.said == "taken":
        raise GroupError(
            f"another process is rank {seat.rank} already at {where}: two jobs use one port, or "
            "two processes were given one rank. Set master_port (MASTER_PORT) to another port"
        )
    raise NotAMeeting("another job's rank 0 answers there")


def _word(frame: Frame) -> Word:
    try:
        if frame.kind is Kind.WORD:
            return msgspec.msgpack.decode(frame.payload, type=Word)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadFrame(str(error)) from error
    raise BadFrame(f"{frame.kind.name} came before WORD")
