"""`Guard`: what a vLLM server needs before a publisher may attach it by its URL.

vLLM's `--api-key` covers the routes of users and none of those that change weights. The guard
demands a token of its own on every other route, has routes that do a whole commit inside the
server, and lets nobody generate while the weights are of no version.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

from parallelkit.errors import (
    EngineTokenError,
    ParallelKitError,
    PeerLostError,
    ProtocolError,
    QuarantinedError,
    StateError,
    UpdateTimeoutError,
)
from parallelkit_vllm import asgi, wire
from parallelkit_vllm.asgi import App, GoneError, Receive, RequestError, Scope, Send
from parallelkit_vllm.door import TaskDoor
from parallelkit_vllm.service import EngineService

#: Open to whoever reaches the port: liveness, and what `--api-key` covers.
OPEN: Final = frozenset({"/health", "/ping", "/version"})
OPEN_PREFIXES: Final = ("/v1", "/v2", "/inference", "/cohere")

#: What would disturb an update; refused while one is under way, to those with the token too.
DISTURBING: Final = frozenset(
    {
        "/collective_rpc",
        "/finish_weight_update",
        "/init_weight_transfer_engine",
        "/pause",
        "/release_kv_cache_memory",
        "/resume",
        "/scale_elastic_ep",
        "/shutdown_weight_transfer_engine",
        "/sleep",
        "/start_draft_weight_update",
        "/start_weight_update",
        "/update_weight_version",
        "/update_weights",
        "/wake_up",
        "/weight_checker",
    }
)
#: What generates nothing, so that a quarantined engine may answer it.
HARMLESS: Final = (
    OPEN
    | DISTURBING
    | {
        "/abort_requests",
        "/get_world_size",
        "/is_paused",
        "/is_sleeping",
        "/load",
        "/metrics",
        "/metrics/",
        "/reset_encoder_cache",
        "/reset_mm_cache",
        "/reset_prefix_cache",
        "/server_info",
        "/v1/models",
        "/weight_info",
    }
)

_ROUTES: Final[dict[str, tuple[str, type[wire.Body] | None]]] = {
    "status": ("GET", None),
    "init": ("POST", wire.InitBody),
    "begin": ("POST", wire.BeginBody),
    "commit": ("POST", wire.CommitBody),
    "abort": ("POST", wire.AbortBody),
    "quarantine": ("POST", wire.QuarantineBody),
}
_STATUS: Final[tuple[tuple[type[ParallelKitError], int], ...]] = (
    (EngineTokenError, 401),
    (ProtocolError, 400),
    (StateError, 409),
    (QuarantinedError, 503),
    (PeerLostError, 503),
    (UpdateTimeoutError, 504),
    (ParallelKitError, 500),
)


class Guard:
    """ASGI middleware: `--middleware parallelkit_vllm.Guard`.

    The token is the environment variable `PARALLELKIT_ENGINE_TOKEN` of the server; without one of
    16 characters or more the server does not start. Requests bear it as
    `Authorization: Bearer <token>`.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._problem = ""
        self._token = b""
        try:
            self._token = asgi.digest(read_token(os.environ))
        except EngineTokenError as error:
            self._problem = str(error)
        self._door = TaskDoor()
        self._service: EngineService | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = scope["type"]
        if kind == "lifespan":
            return await self._lifespan(scope, receive, send)
        if kind not in ("http", "websocket"):
            raise RequestError(400, f"a connection of the kind {kind!r:.40}")
        reply = _Reply(kind, receive, send)
        try:
            await self._admit(scope, receive, reply)
        except GoneError:
            return None
        except RequestError as error:
            problem = wire.Problem(message=str(error), code=error.status)
            await reply.refuse(error.status, problem, error.headers)
        except ParallelKitError as error:
            status = next(code for kind, code in _STATUS if isinstance(error, kind))
            name = type(error).__name__
            step = getattr(error, "step", "")
            problem = wire.Problem(message=str(error), type=name, step=step, code=status)
            await reply.refuse(status, problem, {})
        return None

    async def _admit(self, scope: Scope, receive: Receive, reply: _Reply) -> None:
        """Let a request through, or answer it.

        Raises:
            RequestError, ParallelKitError: it is refused.
        """
        path = asgi.route_path(scope)
        if self._problem:
            raise RequestError(503, self._problem)
        if not is_open(path) and not asgi.bears(scope, self._token):
            raise RequestError(
                401,
                f"this route needs the token of the server's {wire.TOKEN_VARIABLE}, as a bearer "
                "token; the API key does not open it",
                headers={"www-authenticate": "Bearer"},
            )
        if asgi.under(path, wire.PREFIX):
            return await self._own(path, scope, receive, reply)
        service = self._service
        if path in DISTURBING and service is not None and service.under_way:
            raise StateError(f"{path} is refused while {service.under_way} is under way")
        if path in HARMLESS:
            await self._app(scope, receive, reply.send)
            if path in DISTURBING:
                self._serve(scope).noted(path, reply.status)
            return None
        async with self._door.inside():
            return await self._app(scope, receive, reply.send)

    async def _own(self, path: str, scope: Scope, receive: Receive, reply: _Reply) -> None:
        name = path.removeprefix(wire.PREFIX).removeprefix("/")
        if name not in _ROUTES or scope["type"] != "http":
            raise RequestError(404, f"no such route; there are: {', '.join(_ROUTES)}")
        method, kind = _ROUTES[name]
        if scope["method"] != method:
            raise RequestError(405, f"{path} takes {method}", headers={"allow": method})
        arguments = []
        if kind is not None:
            data = await asgi.read_body(scope, receive, wire.MAX_BODY)
            arguments = [wire.decode(data, kind, path)]
        result = await getattr(self._serve(scope), name)(*arguments)
        await asgi.answer(reply.send, 200, result)

    def _serve(self, scope: Scope) -> EngineService:
        if self._service is None:
            engine = getattr(scope["app"].state, "engine_client", None)
            if engine is None:
                raise RequestError(503, "this server has no engine, or it is not up yet")
            self._service = EngineService(engine, self._door)
        return self._service

    async def _lifespan(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = self._problem or _too_many_servers(scope)
        if not problem:
            return await self._app(scope, receive, send)
        self._problem = problem
        await receive()  # lifespan.startup
        message = f"parallelkit_vllm.Guard: {problem}"
        await send({"type": "lifespan.startup.failed", "message": message})
        return None


class _Reply:
    """Sends, and knows whether the answer has begun: its status, 0 before."""

    def __init__(self, kind: str, receive: Receive, send: Send) -> None:
        self._kind = kind
        self._receive = receive
        self._send = send
        self.status = 0

    async def send(self, message: asgi.Message) -> None:
        self.status = self.status or message.get("status", 101)
        await self._send(message)

    async def refuse(self, status: int, problem: wire.Problem, headers: dict[str, str]) -> None:
        """Say no. An answer that has begun is left incomplete, so that it does not look whole."""
        if self.status:
            return
        if self._kind == "websocket":
            await self._receive()  # websocket.connect
            await self._send({"type": "websocket.close", "code": 1008, "reason": ""})
        else:
            await asgi.answer(self._send, status, wire.ProblemBody(error=problem), headers)


def is_open(path: str) -> bool:
    """Whether a path needs no token. One that climbs (`/v1/../pause`) is taken for no other."""
    if ".." in path.split("/"):
        return False
    return path in OPEN or any(asgi.under(path, prefix) for prefix in OPEN_PREFIXES)


def read_token(environ: Mapping[str, str]) -> str:
    """Return the token that the environment has.

    Raises:
        EngineTokenError: there is none, it is short, or cannot be in a header.
    """
    token = environ.get(wire.TOKEN_VARIABLE, "")
    how = f"set {wire.TOKEN_VARIABLE} to a secret, such as the output of: openssl rand -hex 32"
    if not token:
        raise EngineTokenError(f"no token: {how}")
    if len(token) < wire.TOKEN_CHARACTERS:
        raise EngineTokenError(
            f"a token of {len(token)} characters: it needs {wire.TOKEN_CHARACTERS} or more; {how}"
        )
    if not (token.isascii() and token.isprintable()) or " " in token:
        raise EngineTokenError(f"a token with blanks or other than printable ASCII: {how}")
    return token


def _too_many_servers(scope: Scope) -> str:
    """Several API servers of one engine would each have a door of their own."""
    state: Any = getattr(scope.get("app"), "state", None)
    count = getattr(getattr(state, "args", None), "api_server_count", None) or 1
    if count <= 1:
        return ""
    return f"--api-server-count is {count}: the guard knows one server's requests; give 1"
