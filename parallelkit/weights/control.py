"""The control channel at the publisher: ZeroMQ over TCP, encrypted with CURVE keys.

The publisher runs one thread that owns the sockets: it admits subscribers at any time, also while
the trainer trains, and notices at once when a connection ends, because it matches each message's
connection with the socket's disconnect events. No thread of the framework is needed for that.
A lost connection is a lost peer: there is no silent reconnect.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
import time
from collections import deque
from typing import Any, Protocol

import attrs
import zmq
from zmq.utils.monitor import recv_monitor_message

from parallelkit.errors import ProtocolError, StateError, TicketError, TransportError
from parallelkit.weights import messages as m
from parallelkit.weights.endpoint import check_descriptors, parse_endpoint

#: How long the last message of a connection may take to be read.
LAST_WORDS_SECONDS = 0.2


log = logging.getLogger("parallelkit")


@attrs.frozen
class Received:
    """A message from one connection."""

    route: bytes
    message: m.ToPublisher


@attrs.frozen
class Lost:
    """A connection ended."""

    route: bytes


@attrs.frozen
class Stop:
    """The publisher is to close, said from a signal handler or another thread."""

    route: bytes = b""


class Inbox:
    """Messages and losses that concern the update under way, for the thread in `update()`."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Received | Lost | Stop] = queue.SimpleQueue()

    def put(self, item: Received | Lost | Stop) -> None:
        self._queue.put(item)

    def get(self, deadline: float) -> Received | Lost | Stop | None:
        """Wait for the next item until `deadline` (monotonic seconds); None when it passed."""
        left = deadline - time.monotonic()
        try:
            return self._queue.get(timeout=max(left, 0.0)) if left > 0 else self._queue.get_nowait()
        except queue.Empty:
            return None

    def clear(self) -> None:
        """Drop what is late; a stop is not."""
        stops = []
        with contextlib.suppress(queue.Empty):
            while True:
                item = self._queue.get_nowait()
                stops += [item] if isinstance(item, Stop) else []
        for stop in stops:
            self._queue.put(stop)


class Desk(Protocol):
    """Decides about messages in the server's thread; see `parallelkit.weights.members`."""

    def receive(self, route: bytes, message: m.ToPublisher) -> list[tuple[bytes, Any]]:
        """Handle a message; return answers to send."""

    def known(self, route: bytes) -> bool:
        """Whether the peer has shown a ticket."""

    def lost(self, route: bytes) -> None:
        """A connection ended."""


def encoded(answers: list[tuple[bytes, Any]]) -> list[tuple[bytes, bytes]]:
    """Wire form of a desk's answers."""
    return [(route, m.encode(message)) for route, message in answers]


class ControlServer:
    """The publisher's end."""

    def __init__(self, endpoint: str | None, timeout: float) -> None:
        """Bind.

        Args:
            endpoint: `tcp://address:port`, `address:port` or `address`; port 0 or `*` or none
                takes a free one. None is loopback. All-interfaces addresses are refused.
            timeout: seconds of silence after which a connection counts as lost.

        Raises:
            TransportError: the address is not allowed, does not exist here, or is taken; or this
                process may open no more files.
        """
        host, port = parse_endpoint(endpoint)
        check_descriptors()
        public, secret = zmq.curve_keypair()
        self.server_key = public.decode()
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.curve_server = True
        self._router.setsockopt(zmq.IPV6, int(host.startswith("[")))
        self._router.curve_secretkey = secret
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router.setsockopt(zmq.MAXMSGSIZE, m.MAX_TO_PUBLISHER)
        self._router.setsockopt(zmq.LINGER, 1000)
        self._router.setsockopt(zmq.HANDSHAKE_IVL, 10_000)
        self._router.setsockopt(zmq.HEARTBEAT_IVL, int(1000 * min(5.0, timeout / 4)))
        self._router.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(1000 * timeout))
        self._monitor = self._router.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        try:
            self._router.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as error:
            self._free(0)
            raise TransportError(
                f"cannot listen at {host}:{port or 'any free port'}: {error}; pass "
                "publish_weights(endpoint='address:port') an address of this host and a free port"
            ) from error
        self.endpoint = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._outbox: deque[tuple[bytes, bytes]] = deque()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_out.setblocking(False)
        self._closing = False
        self._failure: Exception | None = None
        self._routes: dict[int, bytes] = {}
        self._ended: list[bytes] = []
        self._desk: Desk | None = None
        self._thread = threading.Thread(target=self._run, name="parallelkit-control", daemon=True)

    def start(self, desk: Desk) -> None:
        """Begin to serve."""
        self._desk = desk
        self._thread.start()

    def send(self, route: bytes, message: Any) -> None:
        """Queue a message; from any thread, does not block. Sent at once, or the peer is lost."""
        self._outbox.append((route, m.encode(message)))
        self._wake()

    def check(self) -> None:
        """Raise `StateError` if the thread has ended, whatever ended it."""
        if self._failure is not None:
            raise StateError(
                f"the control channel has failed ({self._failure!r}): close this publisher and "
                "publish again"
            )

    def close(self) -> None:
        """Send what is queued, end the thread, close the sockets."""
        if self._closing:
            return
        self._closing = True
        self._wake()
        if self._thread.is_alive():
            self._thread.join(10.0)
        elif self._desk is None:  # never started
            self._free(0)
        self._wake_in.close()
        self._wake_out.close()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_in.send(b"x")

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        poller.register(self._wake_out.fileno(), zmq.POLLIN)
        try:
            while True:
                poller.poll()
                with contextlib.suppress(OSError):
                    self._wake_out.recv(4096)
                self._flush()
                self._receive()
                self._watch()
                if self._closing:
                    self._flush()  # what was queued before close(), since the flush above
                    self._linger(poller)
                    return
        except Exception as error:
            self._failure = error
            log.exception("the control channel of a publisher has failed")
        finally:
            self._free(1000)

    def _free(self, linger: int) -> None:
        self._router.disable_monitor()
        self._monitor.close(0)
        self._router.close(linger)
        self._context.term()  # returns once every socket is closed, the monitor too

    def _linger(self, poller: zmq.Poller) -> None:
        """Give peers a moment to read their last message; a close with unread input resets them."""
        deadline = time.monotonic() + LAST_WORDS_SECONDS
        while self._routes and time.monotonic() < deadline:
            poller.poll(20)
            self._receive()
            self._watch()

    def _flush(self) -> None:
        while self._outbox:
            route, message = self._outbox.popleft()
            try:
                self._router.send_multipart([route, message], zmq.DONTWAIT)
            except zmq.ZMQError:  # unreachable, or a thousand messages behind
                self._lose(route)

    def _receive(self) -> None:
        assert self._desk is not None
        while True:
            try:
                frames = self._router.recv_multipart(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return
            route = bytes(frames[0].buffer)
            if route not in self._routes.values():
                # A descriptor number may be used again: take note of its former end first.
                self._note_ends()
            self._routes[frames[-1].get(zmq.SRCFD)] = route
            try:
                if len(frames) != 2:
                    raise ProtocolError(f"a message of {len(frames) - 1} frames instead of 1")
                if len(frames[1]) > m.MAX_HELLO and not self._desk.known(route):
                    raise ProtocolError(f"a first message of {len(frames[1])} bytes")
                message = m.decode_at_publisher(bytes(frames[1].buffer))
                answers = encoded(self._desk.receive(route, message))
            except (ProtocolError, TicketError, TransportError) as error:
                refusal = m.Refused(error=type(error).__name__, message=m.clip(str(error)))
                answers = encoded([(route, refusal)])
            except Exception as error:  # a plugin's transport; this thread serves the others, too
                text = f"the publisher failed: {type(error).__name__}: {error}"
                refusal = m.Refused(error="TransportError", message=m.clip(text))
                answers = encoded([(route, refusal)])
            self._outbox.extend(answers)
            self._flush()

    def _watch(self) -> None:
        """Act on connections that have ended, after their last messages."""
        self._note_ends()
        if self._ended:
            self._receive()
            ended, self._ended = self._ended, []
            for route in ended:
                self._lose(route)

    def _note_ends(self) -> None:
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)
            route = self._routes.pop(event["value"], None)
            if route is not None:
                self._ended.append(route)

    def _lose(self, route: bytes) -> None:
        for fd in [fd for fd, known in self._routes.items() if known == route]:
            del self._routes[fd]
        assert self._desk is not None
        self._desk.lost(route)
