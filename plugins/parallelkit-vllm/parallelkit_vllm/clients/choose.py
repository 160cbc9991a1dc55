"""Which client controls what was given to `publisher.attach`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from parallelkit.protocols import EngineClient


def engine_client(target: Any, options: Mapping[str, object]) -> EngineClient | None:
    """The client of a server by its URL, of an `LLM`, or of an `AsyncLLM`; else None.

    Told by the form of a string, and by modules that are imported already: who has an `LLM` has
    imported vLLM.
    """
    if isinstance(target, str):
        if not target.lower().startswith(("http://", "https://")):
            return None
        from parallelkit_vllm.clients.http import connect

        return connect(target, options)
    if _is(target, "vllm.entrypoints.llm", "LLM"):
        from parallelkit_vllm.clients.offline import OfflineEngine

        return OfflineEngine(target, options)
    if _is(target, "vllm.v1.engine.async_llm", "AsyncLLM"):
        from parallelkit_vllm.clients.asynchronous import AsyncEngine

        return AsyncEngine(target, options)
    return None


def _is(target: Any, module: str, name: str) -> bool:
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(target, kind)
