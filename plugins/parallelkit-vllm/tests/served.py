"""A server like vLLM's, with an engine that is made up: `python served.py <port>`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import uvicorn
from fake_engine import FakeEngine
from parallelkit_vllm import Guard
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route


class SlowEngine(FakeEngine):
    """Takes a while to put a version in place."""

    async def update_weights(self, request: Any) -> None:
        await asyncio.sleep(0.3)
        await super().update_weights(request)


async def plain(request: Request) -> Response:
    return JSONResponse({"path": request.url.path})


async def completions(request: Request) -> Response:
    count = (await request.json())["count"]
    return JSONResponse([pair async for pair in request.app.state.engine_client.generate(count)])


async def stuck(request: Request) -> Response:
    async def lines() -> AsyncIterator[bytes]:
        yield b"0\n"
        await asyncio.Event().wait()

    return StreamingResponse(lines())


def main() -> None:
    app = Starlette(
        routes=[
            Route("/health", plain),
            Route("/pause", plain, methods=["POST"]),
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/stuck", stuck, methods=["POST"]),
        ]
    )
    app.state.engine_client = SlowEngine()
    app.state.args = SimpleNamespace(api_server_count=1)
    app.add_middleware(Guard)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="info")


if __name__ == "__main__":
    main()
