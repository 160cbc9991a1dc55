"""One connection of a subscriber to one publisher rank."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Final

import attrs
import zmq
from zmq.utils.monitor import recv_monitor_message

from parallelkit.errors import PeerLostError, ProtocolError, TransportError
from parallelkit.weights import tcp_wire as w
from parallelkit.weights.tcp_server import HEARTBEAT_SECONDS, SILENCE_SECONDS

IO_THREADS: Final = 2

_NO_RECONNECT_MS: Final = 24 * 3600 * 1000
_FAILED_HANDSHAKE: Final = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class AlteredReplyError(ProtocolError):
    """A reply's digest is wrong: altered on its way, or the arena was while it left."""


class SharedContext:
    """One ZeroMQ context for all connections of the process, while there are any.

    A context has threads of its own, and a member may have connections to many ranks.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._users = 0

    def take(self) -> zmq.Context[zmq.Socket[bytes]]:
        """The context, made if there is none."""
        with self._lock:
            if self._context is None:
                self._context = zmq.Context(io_threads=IO_THREADS)
            self._users += 1
            return self._context

    def give(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """One user less, whose sockets are closed; the last one ends the context."""
        with self._lock:
            if context is not self._context:  # of before a fork
                return
            self._users -= 1
            if self._users:
                return
            self._context = None
        context.term()

    def forget(self) -> None:
        """In a child after a fork: its parent's context is no use here."""
        self._lock, self._context, self._users = threading.Lock(), None, 0


@attrs.define(eq=False)
class Line:
    """A DEALER socket, the key of its digests, and what it waits for.

    Attributes:
        peer: how errors name the publisher rank.
        key: for digests; None where the connection is encrypted, or before it has one.
        waiting: requests without a reply yet, by id, with whatever the caller keeps of them.
        last: id of the latest request.
    """

    peer: str
    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    encrypted: bool
    key: bytes | None = attrs.field(default=None, repr=False)
    waiting: dict[int, Any] = attrs.field(factory=dict)
    greeted: bool = False
    gone: Exception | None = None
    last: int = 0

    @classmethod
    def open(
        cls,
        context: zmq.Context[zmq.Socket[bytes]],
        offer: w.Offer,
        client: tuple[bytes, bytes] | None,
        seconds: float,
    ) -> Line:
        """Begin to connect; `client` are the CURVE keys of this end, if it is encrypted.

        Raises:
            TransportError: the offer's key or address cannot be used.
        """
        dealer = context.socket(zmq.DEALER)
        monitor = dealer.get_monitor_socket()
        line = cls(peer_of(offer), dealer, monitor, client is not None)
        try:
            if client is not None:
                dealer.curve_publickey, dealer.curve_secretkey = client
                dealer.curve_serverkey = offer.key.encode()
            dealer.setsockopt(zmq.IPV6, int("[" in offer.endpoint))
            # Encryption makes a frame some bytes longer.
            dealer.setsockopt(zmq.MAXMSGSIZE, w.REPLY_BYTES + w.MAX_HEADER)
            dealer.setsockopt(zmq.LINGER, 0)
            # Never, in effect. -1 would drop what arrived unread before the connection's end.
            dealer.setsockopt(zmq.RECONNECT_IVL, _NO_RECONNECT_MS)
            dealer.setsockopt(zmq.CONNECT_TIMEOUT, max(int(1000 * seconds), 1))
            dealer.setsockopt(zmq.HEARTBEAT_IVL, 1000 * HEARTBEAT_SECONDS)
            dealer.setsockopt(zmq.HEARTBEAT_TIMEOUT, 1000 * SILENCE_SECONDS)
            dealer.connect(offer.endpoint)
        except zmq.ZMQError as error:
            line.close()
            raise TransportError(f"cannot connect to {line.peer}: {error}") from error
        return line

    def next_id(self) -> int:
        """Number of the next request on this connection."""
        self.last += 1
        return self.last

    def send(self, request: w.Request, key: bytes | None = None) -> None:
        """Send; does not block. `key` is for its digest, if it is not this connection's.

        Raises:
            PeerLostError, TransportError: the publisher is gone, or refused the handshake.
        """
        if self.gone is not None:
            raise self.gone
        frames = [w.encode(request)]
        key = key or self.key
        if not self.encrypted:
            assert key is not None
            frames.append(w.tag(key, "subscriber", frames[0]))
        try:
            self.socket.send_multipart(frames, zmq.DONTWAIT)
        except zmq.ZMQError as error:
            raise self.lost(f"cannot be reached ({error})") from error

    def receive(self) -> list[memoryview] | None:
        """The frames of the next reply that is there, or None.

        Raises:
            PeerLostError, TransportError: the connection ended, and all before its end was read.
        """
        try:
            frames = self.socket.recv_multipart(zmq.DONTWAIT, copy=False)
        except zmq.Again:
            if self.gone is None or self.socket.poll(0):
                return None
            raise self.gone from None
        return [frame.buffer for frame in frames]

    def open_reply(self, frames: Sequence[memoryview]) -> tuple[w.Reply, Sequence[memoryview]]:
        """Check a reply's digest, where it has one, and parse it.

        Returns:
            The header, and the frames of bytes after it.

        Raises:
            ProtocolError: it is no reply; `AlteredReplyError`: its digest is wrong.
            TransportError: it is the publisher's refusal.
        """
        head, payload = frames[0], frames[1:]
        if not self.encrypted and self.key is not None:
            if not payload:
                raise ProtocolError(f"{self.peer} sent a reply without its digest")
            *payload, mark = payload
            if not w.same_tag(mark, w.tag(self.key, "publisher", head, payload)):
                raise AlteredReplyError(f"a reply of {self.peer} was altered on its way")
        reply = w.decode_reply(head)
        if isinstance(reply, w.No) and (not reply.id or reply.id in self.waiting):
            raise TransportError(f"{self.peer} refused: {reply.message}")
        return reply, payload

    def expects(self, head: memoryview) -> bool:
        """Whether a reply, whose digest is wrong, says that it is one that is waited for."""
        try:
            reply = w.decode_reply(head)
        except ProtocolError:
            return True  # nobody knows: an error is due
        return isinstance(reply, w.Hi) or reply.id in self.waiting

    def watch(self) -> bool:
        """Take note of what became of the connection; returns whether it ended now."""
        was = self.gone
        while self.monitor.poll(0):
            event = recv_monitor_message(self.monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.greeted = True
            elif event & _FAILED_HANDSHAKE and self.greeted:  # so it says of any message
                self.gone = self.gone or self.lost("sent what was altered on its way")
            elif event & _FAILED_HANDSHAKE or (
                event == zmq.EVENT_DISCONNECTED and not self.greeted
            ):
                self.gone = self.gone or TransportError(
                    f"{self.peer} refused the handshake: the offer was altered, or another "
                    "program listens there now"
                )
            elif event in (zmq.EVENT_DISCONNECTED, zmq.EVENT_CLOSED):
                what = "the connection ended" if self.greeted else "nothing listens there"
                self.gone = self.gone or self.lost(f"is gone: {what}")
        return was is None and self.gone is not None

    def lost(self, what: str) -> PeerLostError:
        """The error for a publisher that `what`."""
        return PeerLostError(f"{self.peer} {what}", peers=[self.peer])

    def close(self) -> None:
        """Close the sockets; unsent requests are dropped."""
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(0)


def peer_of(offer: w.Offer) -> str:
    """How errors name the publisher rank of an offer."""
    return f"publisher rank {offer.rank} (tcp data at {offer.endpoint.removeprefix('tcp://')})"
