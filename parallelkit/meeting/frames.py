"""Messages between two ranks over one TCP connection: a kind, a length, and that many bytes.

What arrives is bounded before memory is taken for it, and decoded by msgspec into types with no
unknown fields. Nothing here can run code that a peer sent.
"""

from __future__ import annotations

import contextlib
import enum
import select
import socket
import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

from parallelkit.errors import ParallelKitError
from parallelkit.meeting.clock import Deadline

#: What the listening side says first, so that others need not talk to a stranger.
BANNER: Final = b"pk-meet1"
_HEAD: Final = struct.Struct("<BQ")
_SMALL: Final = 64 << 10  # bytes of a message that is not announced to be larger
_LONGEST: Final = 3.6e6  # milliseconds of one wait: what the kernel counts in holds it
Buffer = bytes | bytearray | memoryview


class Kind(enum.IntEnum):
    """What a message is. In brackets, who sends it."""

    HELLO = 1  # (leaf) who I am
    WORD = 2  # (hub) all are here, or why not
    CALL = 3  # (leaf) what I am about to do
    GO = 4  # (hub) all do the same
    BAD = 5  # (hub) it failed; who is to blame
    DATA = 6  # (both) a piece of a collective
    GIVE_UP = 7  # (leaf) I waited too long
    LEAVE = 8  # (both) I close the group


class Frame(NamedTuple):
    """One message. DATA that was received into a given buffer has an empty payload."""

    kind: Kind
    payload: Buffer


class PeerGone(Exception):
    """The connection ended."""


class Interrupted(Exception):
    """The peer spoke while it was spoken to: there is bad news to be read."""


class BadFrame(ParallelKitError):
    """A peer sent what the protocol does not allow."""


class Connection:
    """One end of a connection. Used by one thread; every wait has a deadline."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = sock
        self._head = bytearray()
        self._kind = Kind.HELLO
        self._body: memoryview | None = None
        self._filled = 0
        self._into: memoryview | None = None
        self._limit = _SMALL
        self.torn = False  #: a message to the peer was cut off: it can be told nothing more

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def local_host(self) -> str:
        """This end's address."""
        return str(self._socket.getsockname()[0])

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.close()

    def leave_open(self) -> None:
        """Let the connection end with the process, and not before."""
        self._socket.detach()

    # --- receiving

    def expect(self, into: memoryview | None = None, limit: int = _SMALL) -> None:
        """Say what the next message may be: DATA of exactly `into`'s size, or up to `limit`."""
        self._into, self._limit = into, limit

    def advance(self) -> Frame | None:
        """Read what is there without waiting; a message once it is whole.

        Raises:
            PeerGone, BadFrame: as their names say.
        """
        while self._body is None:
            if len(self._head) == _HEAD.size:
                self._open(*_HEAD.unpack(bytes(self._head)))
            else:
                data = self._recv(_HEAD.size - len(self._head))
                if data is None:
                    return None
                self._head += data
        while self._filled < len(self._body):
            try:
                count = self._socket.recv_into(self._body[self._filled :])
            except BlockingIOError:
                return None
            except OSError as error:
                raise PeerGone(str(error)) from error
            if count == 0:
                raise PeerGone("the connection was closed")
            self._filled += count
        taken = self._kind is Kind.DATA and self._into is not None
        frame = Frame(self._kind, b"" if taken else self._body)
        self._head, self._body = bytearray(), None
        return frame

    def receive(self, deadline: Deadline) -> Frame:
        """Wait for one message.

        Raises:
            TimeoutError, PeerGone, BadFrame: as their names say.
        """
        while (frame := self.advance()) is None:
            self._wait(select.POLLIN, deadline)
        return frame

    def _recv(self, size: int) -> bytes | None:
        try:
            data = self._socket.recv(size)
        except BlockingIOError:
            return None
        except OSError as error:
            raise PeerGone(str(error)) from error
        if not data:
            raise PeerGone("the connection was closed")
        return data

    def _open(self, kind: int, size: int) -> None:
        """Take memory for a message, once its head shows that it may come."""
        if kind not in Kind._value2member_map_:
            raise BadFrame(f"a peer sent a message of kind {kind}, which there is not")
        self._kind = Kind(kind)
        if self._kind is Kind.DATA and self._into is not None:
            if size != len(self._into):
                raise BadFrame(f"a peer sent {size} bytes where {len(self._into)} were due")
            self._body = self._into
        else:
            allowed = self._limit if self._kind in (Kind.DATA, Kind.GO, Kind.CALL) else _SMALL
            if size > allowed:
                raise BadFrame(f"a peer announced {size} bytes; at most {allowed} are taken")
            self._body = memoryview(bytearray(size))
        self._filled = 0

    # --- sending

    def send(
        self, kind: Kind, payload: Buffer, deadline: Deadline, *, listen: bool = False
    ) -> None:
        """Send one message.

        Args:
            listen: stop as soon as the peer says something, which is then to be read.

        Raises:
            TimeoutError, PeerGone, Interrupted: as their names say.
        """
        views: Sequence[memoryview] = (
            memoryview(_HEAD.pack(kind, len(payload))),
            memoryview(payload).cast("B") if len(payload) else memoryview(b""),
        )
        self.torn = True
        for view in views:
            sent = 0
            while sent < len(view):
                try:
                    sent += self._socket.send(view[sent:])
                    continue
                except BlockingIOError:
                    pass
                except OSError as error:
                    raise PeerGone(str(error)) from error
                self._wait(select.POLLOUT | (select.POLLIN if listen else 0), deadline)
        self.torn = False

    def _wait(self, events: int, deadline: Deadline) -> None:
        poll = select.poll()
        poll.register(self._socket, events)
        found = poll.poll(min(deadline.left * 1000 + 1, _LONGEST) if deadline.left > 0 else 0)
        if not found and deadline.left <= 0:
            raise TimeoutError
        if found and events & select.POLLOUT and not found[0][1] & select.POLLOUT:
            raise Interrupted


def connect(host: str, port: int, deadline: Deadline, *, banner: float = 5.0) -> Connection:
    """Connect to a meeting, and hear its banner before anything is said.

    Args:
        host: an IPv4 address.
        banner: seconds that the other side may take to speak.

    Raises:
        NotAMeeting: something listens there that is no meeting of ours.
        OSError: nobody listens.
    """
    try:
        sock = socket.create_connection((host, port), max(0.01, min(2.0, deadline.left)))
    except TimeoutError as error:
        raise ConnectionError("nobody answers there") from error
    try:
        connection = Connection(sock)
        said, limit = b"", Deadline(min(banner, max(0.05, deadline.left)))
        while len(said) < len(BANNER):
            data = connection._recv(len(BANNER) - len(said))
            if data is None:
                connection._wait(select.POLLIN, limit)
                continue
            said += data
            if not BANNER.startswith(said):
                break
    except (PeerGone, TimeoutError) as error:
        sock.close()
        raise NotAMeeting("what listens there does not answer as a meeting of ranks") from error
    if said != BANNER:
        connection.close()
        raise NotAMeeting("what listens there does not answer as a meeting of ranks")
    return connection


class NotAMeeting(Exception):
    """Something listens there and is not ours."""
