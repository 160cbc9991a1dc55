"""A server without a guard: vLLM's own weight routes, as the coroutines of its engine client.

The publisher does each step by a request of its own. If it dies in the middle, the engine stays
paused until somebody resumes it; that is why a guard is asked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec

from parallelkit.errors import EngineError, ProtocolError
from parallelkit_vllm import wire
from parallelkit_vllm.clients.web import Server


class RawEngine:
    """What `parallelkit_vllm.commit` needs of an engine, over HTTP. Every call has a deadline."""

    errored = False
    dead_error = ""

    def __init__(self, server: Server, timeout: float) -> None:
        """
        Args:
            timeout: seconds for each request.
        """
        self._server = server
        self._timeout = timeout

    def get(self, path: str, field: str) -> Any:
        """Ask for one value.

        Raises:
            EngineError: the server has no such route, or refused.
            ProtocolError: the answer lacks the value.
        """
        answer = self._ask("GET", path, None)
        if field not in answer:
            raise ProtocolError(f"{self._server.name}: GET {path} told no {field!r}")
        return answer[field]

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> None:
        """Have something done.

        Raises:
            EngineError: the server has no such route, or refused.
        """
        self._ask("POST", path, body)

    async def is_sleeping(self) -> bool:
        return bool(await asyncio.to_thread(self.get, "/is_sleeping", "is_sleeping"))

    async def pause_generation(self, *, mode: str, clear_cache: bool = True) -> None:
        flag = "true" if clear_cache else "false"
        await asyncio.to_thread(self.post, f"/pause?mode={mode}&clear_cache={flag}")

    async def start_weight_update(self) -> None:
        await asyncio.to_thread(self.post, "/start_weight_update", {})

    async def update_weights(self, request: Any) -> None:
        body = {"update_info": request.update_info}
        await asyncio.to_thread(self.post, "/update_weights", body)

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        body = {} if weight_version is None else {"weight_version": weight_version}
        await asyncio.to_thread(self.post, "/finish_weight_update", body)

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> None:
        flag = "true" if reset_running_requests else "false"
        path = f"/reset_prefix_cache?reset_running_requests={flag}"
        await asyncio.to_thread(self.post, path)

    async def get_weight_version(self) -> str:
        return str(await asyncio.to_thread(self.get, "/weight_info", "weight_version"))

    async def resume_generation(self) -> None:
        await asyncio.to_thread(self.post, "/resume")

    def _ask(self, method: str, path: str, body: Any) -> dict[str, Any]:
        status, data = self._server.request(method, path, body, timeout=self._timeout)
        if status == 404:
            raise EngineError(
                f"{self._server.name}: no route {path.partition('?')[0]}: without a guard the "
                "server has to be started with VLLM_SERVER_DEV_MODE=1 and a weight_transfer_config"
            )
        if status != 200:
            raise wire.error_of(data, status, self._server.name)
        if not data:
            return {}
        try:
            answer = msgspec.json.decode(data)
        except msgspec.DecodeError as error:
            raise ProtocolError(f"{self._server.name}: {method} {path}: {error}") from error
        return answer if isinstance(answer, dict) else {}
