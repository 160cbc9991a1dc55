"""Small HTTP servers on loopback for tests of the client, one of them with the real guard."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import threading
from collections.abc import Callable
from typing import Any

import pytest
from fake_engine import Answer, FakeApp, FakeEngine, ask
from parallelkit_vllm import wire
from parallelkit_vllm.guard import Guard

TOKEN = "0123456789abcdef0123456789abcdef"


class Web:
    """A small HTTP server on a free port of loopback; `handle(method, path, headers, body)`."""

    def __init__(self, handle: Callable[..., tuple[int, bytes]]) -> None:
        self.requests: list[tuple[str, str, bytes]] = []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                length = int(self.headers.get("content-length", 0))
                body = self.rfile.read(length)
                outer.requests.append((self.command, self.path, body))
                status, data = handle(self.command, self.path, self.headers, body)
                with contextlib.suppress(OSError):
                    self.send_response(status)
                    self.send_header("content-length", str(len(data)))
                    if status in (301, 307):
                        self.send_header("location", "http://127.0.0.1:1/elsewhere")
                    self.end_headers()
                    self.wfile.write(data)

            do_GET = do_POST = answer  # noqa: N815

            def log_message(self, *args: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = False
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class Guarded(Web):
    """The guard before a fake engine, its event loop in a thread."""

    def __init__(self, members: int = 1, engine: FakeEngine | None = None) -> None:
        self.loop = asyncio.new_event_loop()
        self._runner = threading.Thread(target=self.loop.run_forever)
        self._runner.start()
        self.engine = engine or FakeEngine(members)
        self.app = FakeApp(self.engine)
        with pytest.MonkeyPatch.context() as patch:  # the token is read when the guard is made
            patch.setenv(wire.TOKEN_VARIABLE, TOKEN)
            self.guard = Guard(self.app)
        super().__init__(self.handle)

    def handle(self, method: str, path: str, headers: Any, body: bytes) -> tuple[int, bytes]:
        pairs = [(k.lower().encode(), v.encode()) for k, v in headers.items()]
        call = ask(
            self.guard, path, body, method=method, headers=pairs, state=self.app, answer=Answer()
        )
        answer = asyncio.run_coroutine_threadsafe(call, self.loop).result(30)
        return answer.status, answer.body

    def on_loop(self, work: Callable[[], Any]) -> Any:
        async def do() -> Any:
            return work()

        return asyncio.run_coroutine_threadsafe(do(), self.loop).result(10)

    def close(self) -> None:
        super().close()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._runner.join()
        self.loop.close()
