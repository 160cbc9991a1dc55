"""An engine client and a server of one, made up: what the guard needs of vLLM, and no vLLM.

The engine keeps the rule that matters: whoever makes it generate while an update is open has
killed it.
"""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

STEPS = (
    "pause_generation",
    "start_weight_update",
    "update_weights",
    "finish_weight_update",
    "reset_prefix_cache",
    "get_weight_version",
    "resume_generation",
)


class FakeEngine:
    """Coroutines of vLLM's `AsyncLLM`.

    Attributes:
        calls: names, in order.
        fail: step -> error raised by it (and then forgotten).
        hang: step -> event that it waits for (and then forgotten).
    """

    def __init__(self, members: int = 1) -> None:
        self.vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(world_size_across_dp=members)
        )
        self.errored = False
        self.dead_error: Exception = RuntimeError("the engine core died")
        self.calls: list[str] = []
        self.arguments: dict[str, Any] = {}
        self.fail: dict[str, Exception] = {}
        self.hang: dict[str, asyncio.Event] = {}
        self.sleeping = False
        self.paused = False
        self.open = False
        self.served = "default"
        self.weights = 0
        self.requests: dict[object, str] = {}
        self._line = asyncio.Lock()  # the core works off its calls one by one

    async def _step(self, name: str, **arguments: Any) -> None:
        async with self._line:
            self.calls.append(name)
            self.arguments[name] = arguments
            if name in self.hang:
                await self.hang.pop(name).wait()
            if name in self.fail:
                raise self.fail.pop(name)

    async def is_sleeping(self) -> bool:
        return self.sleeping or self.paused

    async def init_weight_transfer_engine(self, request: Any) -> None:
        await self._step("init_weight_transfer_engine", **request.init_info)

    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None:
        await self._step("pause_generation", mode=mode, clear_cache=clear_cache)
        if mode == "wait":
            while self.requests:
                await asyncio.sleep(0.001)
        if mode == "abort":
            self.requests = dict.fromkeys(self.requests, "abort")
        self.paused = True

    async def start_weight_update(self) -> None:
        await self._step("start_weight_update")
        if self.open:
            raise RuntimeError("start_weight_update called while an update is already active")
        self.open = True

    async def update_weights(self, request: Any) -> None:
        try:
            await self._step("update_weights", **request.update_info)
        except Exception:
            self.open = False
            self.weights = -1
            raise
        self.weights = request.update_info["version"]

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        await self._step("finish_weight_update", weight_version=weight_version)
        if not self.open:
            raise RuntimeError("finish_weight_update called without a matching start")
        self.open = False
        if weight_version is not None:
            self.served = weight_version

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        await self._step("reset_prefix_cache", reset_running_requests=reset_running_requests)
        return True

    async def get_weight_version(self) -> str:
        await self._step("get_weight_version")
        return self.served

    async def resume_generation(self) -> None:
        await self._step("resume_generation")
        self.paused = False

    async def generate(self, count: int) -> Any:
        """Yield (token, weights that made it); ends early with ("abort", None)."""
        mine = object()
        self.requests[mine] = ""
        try:
            for token in range(count):
                await asyncio.sleep(0.001)
                while self.paused and self.requests[mine] != "abort":
                    await asyncio.sleep(0.001)
                if self.requests[mine] == "abort":
                    yield "abort", None
                    return
                if self.open or self.weights < 0:
                    self.errored = True
                    raise self.dead_error
                yield token, self.weights
        finally:
            self.requests.pop(mine, None)


class FakeApp:
    """What is behind the guard: streams on /v1/completions, and echoes other paths."""

    def __init__(self, engine: FakeEngine, args: Any = None) -> None:
        self.state = SimpleNamespace(engine_client=engine, args=args or SimpleNamespace())
        self.engine = engine
        self.seen: list[str] = []
        self.before: asyncio.Event | None = None
        self.started = False
        self.status = 200

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await receive()
            self.started = True
            return await send({"type": "lifespan.startup.complete"})
        self.seen.append(scope["path"])
        if scope["type"] == "websocket":
            await receive()
            return await send({"type": "websocket.accept"})
        if not scope["path"].endswith("/v1/completions"):
            return await _whole(send, {"path": scope["path"]}, self.status)
        body = await read(receive)
        if self.before is not None:
            await self.before.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        async for token, weights in self.engine.generate(json.loads(body)["count"]):
            line = json.dumps([token, weights]).encode() + b"\n"
            await send({"type": "http.response.body", "body": line, "more_body": True})
        return await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _whole(send: Any, value: Any, status: int) -> None:
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": json.dumps(value).encode()})


async def read(receive: Any) -> bytes:
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body", False):
            return body


class Answer:
    """What came back; `complete` as a client would see it by the framing."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self.complete = False
        self.messages: list[Any] = []

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def lines(self) -> list[Any]:
        return [json.loads(line) for line in self.body.splitlines()]

    @property
    def message(self) -> str:
        return str(self.json["error"]["message"])

    async def send(self, message: Any) -> None:
        self.messages.append(message)
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {k.decode(): v.decode() for k, v in message["headers"]}
        elif message["type"] == "http.response.body":
            self.body += message.get("body", b"")
            self.complete = not message.get("more_body", False)


async def ask(
    app: Any,
    path: str,
    body: bytes | dict[str, Any] | None = None,
    *,
    token: str | bytes | None = None,
    method: str | None = None,
    headers: list[tuple[bytes, bytes]] | None = None,
    state: Any = None,
    root_path: str = "",
    kind: str = "http",
    chunks: list[Any] | None = None,
    answer: Answer | None = None,
) -> Answer:
    """Make one request of an ASGI app. `chunks` replaces the body: ASGI messages, or seconds."""
    answer = answer or Answer()
    data = json.dumps(body).encode() if isinstance(body, dict) else body or b""
    pairs = list(headers or [])
    if token is not None:
        value = token if isinstance(token, bytes) else token.encode()
        pairs.append((b"authorization", b"Bearer " + value))
    if chunks is None and data:
        pairs.append((b"content-length", str(len(data)).encode()))
    first = {"type": "websocket.connect"} if kind == "websocket" else None
    queue = [first or {"type": "http.request", "body": data, "more_body": False}]
    queue = list(queue if chunks is None else chunks)

    async def receive() -> Any:
        while queue:
            item = queue.pop(0)
            if not isinstance(item, int | float):
                return item
            await asyncio.sleep(item)
        await asyncio.Event().wait()  # the caller is there, and silent
        return None

    scope = {
        "type": kind,
        "method": method or ("GET" if body is None and chunks is None else "POST"),
        "path": path,
        "root_path": root_path,
        "headers": pairs,
        "app": state,
    }
    await app(scope, receive, answer.send)
    return answer
