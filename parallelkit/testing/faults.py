"""Faults that a test peer brings upon itself, at a point that the test names.

Points of a publisher: `publish`, `manifest` and `source` (its code is called), `open` (a member
says hello), `read` (the first tensor is read), `begin`, `stage`, `transfer`, `verify`, `commit` (a
member was told), `committed`. Of a subscriber: `needs`, `open` (it was welcomed), `begin`,
`check`, `transfer`, `prepared`, `commit`, `write` (the second tensor is placed), `finish`,
`committed`.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from parallelkit import hooks
from parallelkit.hookspecs import hookimpl
from parallelkit.plugin import API_VERSION
from parallelkit.testing.arrays import Arrays
from parallelkit.weights import messages as m
from parallelkit.weights.manifest import Manifest

#: What was sent before is given this long to leave, so that the phase is the one that is meant.
SETTLE_SECONDS: Final = 0.3
_GARBAGE: Final = b"\xff" * 64  # as the head of a frame, it announces more bytes than are allowed
_SPARE_BYTES: Final = 4 << 20


class LoaderError(RuntimeError):
    """What a loader raises on purpose."""


class Fault:
    """One fault, which comes once.

    Args:
        emit: writes an event line.
        act: what is done: `kill`, `stop`, `raise`, `memory` (an allocation that fails), `limit` (no
            more address space until `relent`), `disconnect`, `garble` (bytes that are no message,
            on all connections), `arena`, `received`, `staged` or `live` (a byte changes there),
            `serve` (without memory); "" for nothing.
        point: where; "" where `strike` is called from outside.
        version: it comes once this peer has this version, so during the update after it.
    """

    def __init__(
        self, emit: Callable[..., None], *, act: str = "", point: str = "", version: int = 1
    ) -> None:
        self.act = act
        self.point = point
        self.publisher: Any = None
        self.subscriber: Any = None
        self.transport: Any = None
        self.model: Arrays | None = None
        self.received: list[Any] = []
        self._emit = emit
        self._version = version
        self.begun = 0
        self._done = False
        self._limits: tuple[int, int] | None = None

    def count(self) -> None:
        """An update begins here."""
        self.begun += 1

    def due(self, point: str) -> bool:
        """Whether the fault is to come here and now."""
        if self._done or point != self.point:
            return False
        peer = self.publisher or self.subscriber
        return self._version <= (0 if peer is None else peer.version)

    def at(self, point: str) -> None:
        """A point is passed."""
        if self.due(point):
            self.strike()

    def strike(self) -> None:
        """Bring it about; says so before and after."""
        self._done = True
        if self.act in ("kill", "stop", "disconnect", "garble", "arena"):
            time.sleep(SETTLE_SECONDS)
        self._emit("fault", act=self.act, point=self.point)
        getattr(self, f"_{self.act}")()
        self._emit("struck")

    def relent(self) -> None:
        """Take a limit on memory back."""
        if self._limits is not None:
            resource.setrlimit(resource.RLIMIT_AS, self._limits)
            self._limits = None

    def watch_publisher(self, publisher: Any) -> None:
        """Note an open publisher, and when the first member is told a decision."""
        self.publisher = publisher
        server = publisher._coordinator.server
        send, told = server.send, [0]

        def watched(route: bytes, message: Any) -> None:
            send(route, message)
            told[0] = told[0] + 1 if isinstance(message, m.Commit) else 0
            if told[0] == 1:
                self.at("commit")

        server.send = watched

    def watch_subscriber(self, subscriber: Any) -> None:
        """Note a subscriber that joined."""
        self.subscriber = subscriber

    # --- acts

    def _kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def _stop(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def _raise(self) -> None:
        raise LoaderError(f"the loader fails at {self.point!r}, on purpose")

    def _memory(self) -> None:
        np.empty(1 << 60, np.uint8)

    def _limit(self) -> None:
        self._limits = resource.getrlimit(resource.RLIMIT_AS)
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + _SPARE_BYTES, self._limits[1]))

    def _disconnect(self) -> None:
        for connection in connections():
            with connection, contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _garble(self) -> None:
        for connection in connections():
            with connection, contextlib.suppress(OSError):
                connection.send(_GARBAGE, socket.MSG_DONTWAIT)

    def _arena(self) -> None:
        self.transport.buffer[0] ^= 1

    def _live(self) -> None:
        assert self.model is not None
        next(iter(self.model.arrays.values())).reshape(-1).view(np.uint8)[0] ^= 1

    def _received(self) -> None:
        self.received[0].reshape(-1).view(np.uint8)[0] ^= 1

    _staged = _received

    def _serve(self) -> None:
        self._limit()
        try:
            self.subscriber.serve()
        except MemoryError as error:
            self._emit("refused", error=type(error).__name__, message=str(error))
        finally:
            self.relent()


class FaultyArrays(Arrays):
    """A model whose code can be made to fail when the protocol calls it, as source or as sink."""

    def __init__(self, arrays: Any, fault: Fault) -> None:
        super().__init__(arrays)
        self._fault = fault
        self._by_write = fault.point == "write"
        fault.model = self

    def manifest(self) -> Manifest:
        self._fault.at("manifest")
        return super().manifest()

    def needs(self) -> Manifest:
        self._fault.at("needs")
        return super().manifest()

    def begin(self) -> None:
        if self._fault.publisher is not None:
            self._fault.count()
            self._fault.at("source")

    def check(self) -> None:
        self._fault.at("check")

    def host_bytes(self, index: int) -> memoryview:
        if index == 0:
            self._fault.at("read")
        return super().host_bytes(index)

    def destination(self, index: int) -> memoryview | None:
        return None if self._by_write else super().destination(index)

    def write(self, index: int, data: memoryview) -> None:
        if index == 1:
            self._fault.at("write")
        super().write(index, data)

    def finish(self) -> None:
        self._fault.at("finish")


class FaultyTransport:
    """A member's transport, of which a byte arrives changed, or for which there is no memory."""

    def __init__(self, inner: Any, fault: Fault) -> None:
        self._inner = inner
        self._fault = fault
        self._copy: tuple[int, memoryview] | None = None

    @property
    def name(self) -> str:
        """The transport's."""
        return str(self._inner.name)

    def epoch(self, *, deadline: float) -> int:
        """The publisher's."""
        return int(self._inner.epoch(deadline=deadline))

    @property
    def memory(self) -> memoryview | None:
        """The arena, or a copy of it in which one byte differs; None where it has to be pulled."""
        return self._changed(self._inner.memory)

    def pull(self, spans: Any, into: Any, **given: Any) -> None:
        """Pull, and fail or change a byte where it is time."""
        if self._fault.act == "memory":
            self._fault.at("pull")
        self._inner.pull(spans, into, **given)
        self._fault.received = [array for array in into if array.nbytes] or self._fault.received
        if self._fault.act == "received" and self._fault.received:
            self._fault.at("pull")

    def close(self) -> None:
        """Close the transport."""
        self._inner.close()

    def _changed(self, arena: memoryview | None) -> memoryview | None:
        if arena is None or self._fault.act != "received":
            return arena
        if self._fault.due("pull"):
            copy = np.frombuffer(arena, np.uint8).copy()
            self._fault.received = [copy]
            self._fault.strike()
            self._copy = (self._fault.begun, copy.data)
        if self._copy is not None and self._copy[0] == self._fault.begun:
            return self._copy[1]
        return arena


class Traps:
    """A plugin that watches: who says hello, and the transports that other plugins open."""

    parallelkit_api = API_VERSION

    def __init__(self, fault: Fault) -> None:
        self._fault = fault
        self._asking = False

    @hookimpl(tryfirst=True)
    def parallelkit_transports(self, request: Any) -> None:
        if request.subscriber is not None:
            self._fault.at("open")

    @hookimpl(tryfirst=True)
    def parallelkit_open_transport(self, spec: Any) -> Any:
        if self._asking:
            return None
        self._fault.at("publish")
        transport = self._ask(lambda: hooks.open_transport(spec))
        self._fault.transport = self._fault.transport or transport
        return transport

    @hookimpl(tryfirst=True)
    def parallelkit_connect_transport(
        self, name: str, offer: bytes, key: bytes, options: Mapping[str, Any]
    ) -> Any:
        if self._asking:
            return None
        self._fault.at("open")
        transport = self._ask(lambda: hooks.connect_transport(name, offer, key, options))
        return None if transport is None else FaultyTransport(transport, self._fault)

    def _ask(self, call: Callable[[], Any]) -> Any:
        """Ask the other plugins."""
        self._asking = True
        try:
            return call()
        finally:
            self._asking = False


def connections() -> list[socket.socket]:
    """This process's TCP connections, as duplicates that the caller closes."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                continue
            held = socket.socket(fileno=os.dup(int(number)))
        except OSError:
            continue
        try:
            if held.family in (socket.AF_INET, socket.AF_INET6):
                held.getpeername()
                found.append(held)
                continue
        except OSError:  # it listens
            pass
        held.close()
    return found
