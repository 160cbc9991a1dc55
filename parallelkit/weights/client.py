"""The control channel at a subscriber; see `parallelkit.weights.control`."""

from __future__ import annotations

import time
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from parallelkit.errors import PeerLostError, StateError, TicketError
from parallelkit.weights import messages as m
from parallelkit.weights.control import LAST_WORDS_SECONDS
from parallelkit.weights.endpoint import check_descriptors
from parallelkit.weights.ticket import Ticket

_FAILED_HANDSHAKE = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
#: How long it may take until a waiting call notices `stopped`.
_SLICE_SECONDS = 0.2
_NO_RECONNECT_MS = 24 * 3600 * 1000


class ControlClient:
    """A subscriber's end. Used by one thread at a time."""

    def __init__(self, ticket: Ticket, timeout: float) -> None:
        self.peer = f"publisher at {ticket.endpoint}"  #: as messages and errors name it
        self._timeout = timeout
        check_descriptors()
        self._context = zmq.Context()
        self._dealer = self._context.socket(zmq.DEALER)
        public, secret = zmq.curve_keypair()
        self._dealer.curve_publickey, self._dealer.curve_secretkey = public, secret
        self._dealer.setsockopt(zmq.IPV6, int("[" in ticket.endpoint))
        self._dealer.setsockopt(zmq.MAXMSGSIZE, m.MAX_TO_SUBSCRIBER)
        self._dealer.setsockopt(zmq.LINGER, 1000)
        # Never, in effect. -1 would drop what arrived unread before the end of the connection.
        self._dealer.setsockopt(zmq.RECONNECT_IVL, _NO_RECONNECT_MS)
        self._dealer.setsockopt(zmq.CONNECT_TIMEOUT, int(1000 * timeout))
        self._dealer.setsockopt(zmq.HEARTBEAT_IVL, int(1000 * min(5.0, timeout / 4)))
        self._dealer.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(1000 * timeout))
        self._monitor = self._dealer.get_monitor_socket()
        self.stopped = False
        self._greeted = False
        self._gone: Exception | None = None
        try:
            self._dealer.curve_serverkey = ticket.server_key.encode()
            self._dealer.connect(ticket.endpoint)
        except (zmq.ZMQError, UnicodeEncodeError) as error:
            self.close()
            raise TicketError(
                f"the ticket names {ticket.endpoint!r} with an unusable address or key: {error}"
            ) from error

    def send(self, message: Any) -> None:
        """Send; does not block.

        Raises:
            PeerLostError: the publisher is gone.
        """
        if self._gone is not None:
            raise self._gone
        try:
            self._dealer.send(m.encode(message), zmq.DONTWAIT)
        except zmq.ZMQError as error:
            raise self._lost("cannot be reached") from error

    def receive(self, deadline: float) -> m.ToSubscriber | None:
        """Wait for the next message until `deadline` (monotonic seconds); None when it passed.

        Raises:
            PeerLostError: the connection ended and all messages before its end were received.
            TicketError: the publisher does not own the key in the ticket.
            ProtocolError: the publisher sent something else than a message of ours.
        """
        while True:
            try:
                return m.decode_at_subscriber(self._dealer.recv(zmq.DONTWAIT))
            except zmq.Again:
                pass
            if self._gone is not None:
                # What had arrived before the end comes first.
                if self._dealer.poll(int(1000 * LAST_WORDS_SECONDS)):
                    continue
                raise self._gone
            if self._watch():
                continue
            if self.stopped:
                raise StateError("close() while this call was waiting")
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            poller = zmq.Poller()
            poller.register(self._dealer, zmq.POLLIN)
            poller.register(self._monitor, zmq.POLLIN)
            poller.poll(int(1000 * min(left, _SLICE_SECONDS)) + 1)

    def close(self) -> None:
        """Close the sockets; what was sent still leaves, for a second at most."""
        if self._context.closed:
            return
        self._dealer.disable_monitor()
        self._monitor.close(0)
        self._dealer.close(1000)
        self._context.term()

    def _watch(self) -> bool:
        ended = False
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._greeted = True
            elif event & _FAILED_HANDSHAKE or (
                event == zmq.EVENT_DISCONNECTED and not self._greeted
            ):
                self._gone = TicketError(
                    f"the {self.peer} refused the encrypted handshake: the "
                    "ticket was altered, or belongs to a publisher that is gone"
                )
                ended = True
            elif event in (zmq.EVENT_DISCONNECTED, zmq.EVENT_CLOSED) and self._gone is None:
                self._gone = self._lost(
                    "is gone: the connection ended" if self._greeted else "does not listen there"
                )
                ended = True
        return ended

    def _lost(self, what: str) -> PeerLostError:
        return PeerLostError(f"the {self.peer} {what}", peers=[self.peer])
