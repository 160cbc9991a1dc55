"""The publisher's end of the `tcp` transport: one arena, served by a thread of its own.

Subscribers pull; the publisher's other threads do nothing for it. The thread owns the socket; the
arena is read while `bump` was not called, and what was read across a `bump` is void: a subscriber
asks for the epoch once more after its last byte, and the answer is given after those bytes were
read out of the arena.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import socket
import threading
from typing import Any, Final

import numpy as np
import zmq
from zmq.utils.monitor import recv_monitor_message

from parallelkit.errors import TransportError
from parallelkit.weights import tcp_wire as w
from parallelkit.weights.endpoint import check_descriptors
from parallelkit.weights.passes import Passes
from parallelkit.weights.tcp_gate import Gate

NAME: Final = "tcp"
#: How often an idle connection is probed, and after which silence it counts as lost.
HEARTBEAT_SECONDS: Final = 5
SILENCE_SECONDS: Final = 30
IO_THREADS: Final = 2

_HANDSHAKE_SECONDS: Final = 10
_CLOSE_SECONDS: Final = 10.0

log = logging.getLogger("parallelkit")


class TcpPublisher:
    """One publisher rank's end."""

    name = NAME

    def __init__(
        self,
        nbytes: int,
        *,
        secret: bytes,
        rank: int,
        host: str = "127.0.0.1",
        memory: memoryview | None = None,
        encrypt: bool = True,
    ) -> None:
        """Listen on a free port and begin to serve.

        Args:
            nbytes: size of the arena.
            secret: 32 bytes that all ranks of the publisher share; passes are made of it.
            rank: this rank of the publisher.
            host: numeric address of one interface, IPv6 in brackets. If it is no address of this
                host, the interface is taken from which that address is reached.
            memory: an arena to serve from, contiguous and of `nbytes`; it has to live until
                `close`. None to make one.
            encrypt: use CURVE keys; without, bytes can be read on their way, not changed.

        Raises:
            TransportError: no memory, or it cannot listen there.
        """
        self.buffer = _arena(nbytes) if memory is None else memory.cast("B")
        if self.buffer.nbytes != nbytes:
            raise TransportError(
                f"the arena to serve has {self.buffer.nbytes} bytes instead of {nbytes}"
            )
        check_descriptors()
        # The first frame that is sent without a copy makes pyzmq import and open things. Here and
        # now it may fail; later it would take the thread along.
        zmq.Frame(bytes(zmq.COPY_THRESHOLD), copy=False)
        self.epoch = 0
        self.rank = rank
        self._gate = Gate(self.buffer, Passes(secret, rank), lambda: self.epoch, encrypted=encrypt)
        self._context = zmq.Context(io_threads=IO_THREADS)
        self._router = self._context.socket(zmq.ROUTER)
        self._key = ""
        if encrypt:
            public, private = zmq.curve_keypair()
            self._router.curve_server = True
            self._router.curve_secretkey = private
            self._key = public.decode()
        _configure(self._router)
        self._monitor = self._router.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        try:
            _bind(self._router, host)
        except TransportError:
            self._free()
            self._forget()
            raise
        self._endpoint = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._routes: dict[int, bytes] = {}
        self._wake_in, self._wake_out = socket.socketpair()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="parallelkit-tcp", daemon=True)
        self._thread.start()

    @property
    def encrypted(self) -> bool:
        """Whether connections use CURVE keys."""
        return bool(self._key)

    def offer(self) -> bytes:
        """How to reach this arena; nothing in it is secret."""
        return w.encode(w.Offer(self._endpoint, self.rank, self.buffer.nbytes, self._key))

    def bump(self) -> int:
        """Advance the epoch: whatever was read before is void. Returns the new epoch."""
        self.epoch += 1
        return self.epoch

    def close(self) -> None:
        """End the thread and all connections; harmless when repeated."""
        if self._closing:
            return
        self._closing = True
        with contextlib.suppress(OSError):
            self._wake_in.send(b"x")
        self._thread.join(_CLOSE_SECONDS)
        self._wake_in.close()
        self._wake_out.close()
        if not self._thread.is_alive():
            self._forget()

    def _forget(self) -> None:
        """Let go of the arena: it may be as large as the model, and be shared with others."""
        self.buffer = memoryview(b"")
        self._gate.forget()

    def _run(self) -> None:
        poller = zmq.Poller()
        for what in (self._router, self._monitor, self._wake_out.fileno()):
            poller.register(what, zmq.POLLIN)
        try:
            while True:
                poller.poll()
                if self._closing:
                    return
                self._receive()
                self._note_ends()
        except Exception:
            log.exception("the tcp transport of publisher rank %d has failed", self.rank)
        finally:
            self._free()

    def _free(self) -> None:
        self._router.disable_monitor()
        self._monitor.close(0)
        self._router.close(0)
        self._context.term()

    def _receive(self) -> None:
        while not self._closing:
            try:
                frames = self._router.recv_multipart(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return
            route, descriptor = frames[0].bytes, frames[-1].get(zmq.SRCFD)
            new = not self._gate.known(route)
            if new:
                # A descriptor's number may be used again: take note of its former end first.
                self._note_ends()
            answer = self._gate.answer(route, [frame.buffer for frame in frames[1:]])
            if new and self._gate.known(route):
                former = self._routes.get(descriptor)
                if former is not None:
                    self._gate.lost(former)
                self._routes[descriptor] = route
            self._send(route, answer)

    def _send(self, route: bytes, answer: list[Any]) -> None:
        try:
            self._router.send_multipart([route, *answer], zmq.DONTWAIT, copy=False)
        except (zmq.ZMQError, OSError):  # gone, or it asks for more and more and reads nothing
            self._gate.lost(route)

    def _note_ends(self) -> None:
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)
            route = self._routes.pop(event["value"], None)
            if route is not None:
                self._gate.lost(route)


def _arena(nbytes: int) -> memoryview:
    try:
        return np.zeros(nbytes, np.uint8).data
    except (MemoryError, ValueError) as error:
        raise TransportError(f"cannot allocate an arena of {nbytes} bytes: {error}") from error


def _configure(router: zmq.Socket[bytes]) -> None:
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    router.setsockopt(zmq.MAXMSGSIZE, w.MAX_REQUEST)
    router.setsockopt(zmq.LINGER, 0)
    router.setsockopt(zmq.HANDSHAKE_IVL, 1000 * _HANDSHAKE_SECONDS)
    router.setsockopt(zmq.HEARTBEAT_IVL, 1000 * HEARTBEAT_SECONDS)
    router.setsockopt(zmq.HEARTBEAT_TIMEOUT, 1000 * SILENCE_SECONDS)
    # Replies that may wait for one connection; each holds `REPLY_BYTES` at most. Twice what a
    # subscriber of ours lets wait, since room is given back by halves.
    router.setsockopt(zmq.SNDHWM, 4 * w.MAX_WAITING)
    router.setsockopt(zmq.RCVHWM, 4 * w.MAX_WAITING)


def _bind(router: zmq.Socket[bytes], host: str) -> None:
    """Bind to a free port at `host`, or where `host` is reached from."""
    try:
        address = ipaddress.ip_address(host.strip("[]"))
        if (getattr(address, "ipv4_mapped", None) or address).is_unspecified:
            raise ValueError("it means all interfaces")
    except ValueError as error:
        raise TransportError(
            f"the tcp transport cannot listen at {host!r}: {error}; give the numeric address of "
            "one interface in publish_weights(endpoint='address:port')"
        ) from error
    router.setsockopt(zmq.IPV6, int(":" in host))
    try:
        try:
            router.bind(f"tcp://{host}:*")
        except zmq.ZMQError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.ENODEV):
                raise
            router.bind(f"tcp://{interface_towards(host)}:*")
    except (zmq.ZMQError, OSError) as error:
        raise TransportError(
            f"the tcp transport cannot listen at {host}: {error}; pass "
            "publish_weights(endpoint='address:port') an address that this host has or reaches"
        ) from error


def interface_towards(host: str) -> str:
    """The address of this host from which `host`, a numeric address, is reached.

    Nothing is sent. IPv6 comes in brackets.

    Raises:
        OSError: there is no way to it.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host.strip("[]"), 9))
        found = str(probe.getsockname()[0])
    return f"[{found}]" if family == socket.AF_INET6 else found
