"""`publisher.attach("http://127.0.0.1:8000", token=...)`: a vLLM server, through its guard."""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import time
from collections.abc import Mapping
from typing import Final

from parallelkit.errors import (
    EngineError,
    EngineTokenError,
    ProtocolError,
    UnguardedEngineError,
    WeightTransferError,
)
from parallelkit.plugin import EngineCommit
from parallelkit_vllm import wire
from parallelkit_vllm.clients.options import AttachOptions
from parallelkit_vllm.clients.raw import RawEngine
from parallelkit_vllm.clients.settings import join_seconds, version_number, version_served
from parallelkit_vllm.clients.web import Address, Server
from parallelkit_vllm.commit import RECOVERY_SECONDS, check_ready, commit, halt
from parallelkit_vllm.handles import Handle

#: What the server may take to say how it is, in seconds.
STATUS_SECONDS: Final = 30.0
_QUARANTINE_SECONDS: Final = 10.0
_numbers = itertools.count()


def connect(url: str, options: Mapping[str, object]) -> HttpEngine | RawServer:
    """Make the client of a server; asks it how it is, and changes nothing.

    Args:
        url: where it is; http on loopback, else https.
        options: those of every client; `token` (default: the variable
            `PARALLELKIT_ENGINE_TOKEN` of this process); `insecure=True` for a server without a
            guard.

    Raises:
        EngineError: a bad URL or option, or a server of some other kind.
        UnguardedEngineError: plain HTTP to another host; or no guard, and not `insecure`.
        EngineTokenError: the token is missing, or another.
        PeerLostError, UpdateTimeoutError: no answer.
    """
    chosen = AttachOptions.of(options, what="attach(url)", also={"token": None, "insecure": False})
    token, insecure = chosen.extra["token"], chosen.extra["insecure"]
    if not (token is None or isinstance(token, str)) or not isinstance(insecure, bool):
        raise EngineError("attach(url): token is a string, insecure a bool")
    address = Address.of(url)
    name = chosen.name or f"vllm-{next(_numbers)} ({address.url[:150]})"
    token = token or os.environ.get(wire.TOKEN_VARIABLE) or None
    server = Server(address, token=token, name=name)
    status, data = server.request("GET", wire.PREFIX + "/status", timeout=STATUS_SECONDS)
    if status == 404:
        if insecure:
            return RawServer(server, chosen)
        raise UnguardedEngineError(
            f"{name} has no guard: anyone who reaches its port could change its weights, and it "
            "stays paused if this process dies in a commit. Start it with --middleware "
            "parallelkit_vllm.Guard, or attach with insecure=True"
        )
    if status == 401:
        raise EngineTokenError(
            f"{name}: the token is {'not the one' if token else 'missing: give the one'} of the "
            f"server's {wire.TOKEN_VARIABLE} (attach(url, token=...))"
        )
    if status != 200:
        raise wire.error_of(data, status, name)
    told: wire.Status = wire.decode(data, wire.Status, name)
    if told.guard != wire.GUARD_PROTOCOL:
        raise ProtocolError(
            f"{name}: its guard speaks protocol {told.guard} (parallelkit {told.parallelkit}), "
            f"this client {wire.GUARD_PROTOCOL}: install the same version at both ends"
        )
    return HttpEngine(server, chosen, told.members)


class HttpHandle(Handle):
    """What `attach` gives for a server. Requests go to the server as ever; this says how it is.

    While it is quarantined the guard answers 503 to whoever wants tokens.

    Attributes:
        name: in reports.
        url: where the server is.
    """

    def __init__(self, name: str, url: str) -> None:
        super().__init__(name)
        self.url = url

    def moved(self, version: int) -> None:
        """(for the client) It is at this version."""
        self._version, self._reason = version, ""

    def stopped(self, reason: str) -> None:
        """(for the client) It generates nothing."""
        self._reason = reason or "no reason was given"


class HttpEngine:
    """An engine client by the guard's routes: each does its whole work inside the server."""

    def __init__(self, server: Server, options: AttachOptions, members: int) -> None:
        self._server = server
        self._options = options
        self._owner = secrets.token_hex(16)
        self.name = server.name
        self.members = members
        self.handle = HttpHandle(self.name, server.address.url)

    def init(self, ticket: str, *, timeout: float) -> None:
        """See `EngineClient`; raises what the guard or a worker said."""
        body = wire.InitBody(owner=self._owner, ticket=ticket, timeout=join_seconds(timeout))
        self._ask("init", body, timeout)

    def begin(self, version: int, *, timeout: float) -> None:
        """See `EngineClient`. The guard keeps admin calls away for twice the timeout."""
        body = wire.BeginBody(owner=self._owner, version=version, lease=2 * timeout)
        self._ask("begin", body, timeout)

    def commit(self, version: int, *, timeout: float) -> EngineCommit:
        """See `EngineClient`."""
        body = wire.CommitBody(
            owner=self._owner,
            version=version,
            timeout=_inside(timeout),
            cache=self._options.cache,  # type: ignore[arg-type]
            pause=self._options.pause,  # type: ignore[arg-type]
        )
        data = self._ask("commit", body, timeout)
        done: wire.Committed = wire.decode(data, wire.Committed, self.name)
        self.handle.moved(version)
        return done.as_commit()

    def abort(self, version: int, reason: str, *, timeout: float) -> None:
        """See `EngineClient`."""
        body = wire.AbortBody(owner=self._owner, version=version, reason=reason[:2000])
        self._ask("abort", body, timeout)

    def quarantine(self, reason: str) -> None:
        """See `EngineClient`. A server that does not answer shut its door itself, or is gone."""
        self.handle.stopped(reason)
        body = wire.QuarantineBody(owner=self._owner, reason=reason[:2000])
        try:
            self._ask("quarantine", body, _QUARANTINE_SECONDS)
        except WeightTransferError as error:
            self.handle.stopped(f"{reason} (and the guard could not be told: {error})")

    def version(self, *, timeout: float) -> int:
        """See `EngineClient`."""
        data = self._ask("status", None, timeout)
        return version_served(wire.decode(data, wire.Status, self.name), self.name)

    def close(self) -> None:
        """Nothing is kept open."""

    def _ask(self, route: str, body: wire.Body | None, timeout: float) -> bytes:
        method = "GET" if body is None else "POST"
        path = f"{wire.PREFIX}/{route}"
        status, data = self._server.request(method, path, body, timeout=timeout)
        if status != 200:
            raise wire.error_of(data, status, self.name)
        return data


class RawServer:
    """An engine client by vLLM's own routes, for `insecure=True`."""

    def __init__(self, server: Server, options: AttachOptions) -> None:
        """
        Raises:
            EngineError: the server does not have those routes.
        """
        self._server = server
        self._options = options
        self.name = server.name
        self.handle = HttpHandle(self.name, server.address.url)
        engine = RawEngine(server, STATUS_SECONDS)
        self.members = int(engine.get("/get_world_size", "world_size"))

    def init(self, ticket: str, *, timeout: float) -> None:
        """See `EngineClient`."""
        info = {"ticket": ticket, "timeout": join_seconds(timeout)}
        RawEngine(self._server, timeout).post("/init_weight_transfer_engine", {"init_info": info})

    def begin(self, version: int, *, timeout: float) -> None:
        """See `EngineClient`."""
        engine = RawEngine(self._server, timeout)
        end = time.monotonic() + timeout
        ours = self.handle.state == "quarantined"
        asyncio.run(check_ready(engine, deadline=end, name=self.name, ours=ours))

    def commit(self, version: int, *, timeout: float) -> EngineCommit:
        """See `EngineClient`; each step is a request."""
        end = time.monotonic() + _inside(timeout)
        done = asyncio.run(
            commit(
                RawEngine(self._server, timeout),
                version,
                cache=self._options.cache,
                pause=self._options.pause,
                deadline=end,
                name=self.name,
            )
        )
        self.handle.moved(version)
        return done

    def abort(self, version: int, reason: str, *, timeout: float) -> None:
        """See `EngineClient`; nothing was touched."""

    def quarantine(self, reason: str) -> None:
        """End what is in flight. Nothing keeps new requests from the engine: there is no guard."""
        self.handle.stopped(f"{reason} (no guard keeps requests away)")
        engine = RawEngine(self._server, _QUARANTINE_SECONDS)
        end = time.monotonic() + _QUARANTINE_SECONDS
        try:
            asyncio.run(halt(engine, deadline=end, name=self.name))
        except WeightTransferError as error:
            self.handle.stopped(f"{self.handle.reason} (what is in flight goes on: {error})")

    def version(self, *, timeout: float) -> int:
        """See `EngineClient`."""
        told = RawEngine(self._server, timeout).get("/weight_info", "weight_version")
        return version_number(str(told))

    def close(self) -> None:
        """Nothing is kept open."""


def _inside(timeout: float) -> float:
    """What the engine's side may take, so that its own end arrives here within `timeout`."""
    return max(timeout - RECOVERY_SECONDS - 1.0, timeout / 2)
