"""What every client of an engine of this process looks at before it attaches it."""

from __future__ import annotations

import itertools
from typing import Any, Final

from parallelkit.errors import EngineError
from parallelkit_vllm import wire
from parallelkit_vllm.register import BACKEND

_numbers = itertools.count()

#: What a worker leaves of the time to join, so that its own error arrives before ours, in seconds.
WORKER_MARGIN: Final = 1.0


def engine_name(given: str | None, kind: str) -> str:
    """What the user said, or `llm-0 (LLM)`."""
    return given or f"llm-{next(_numbers)} ({kind})"


def check_backend(config: Any, name: str, kind: str) -> None:
    """See that the engine's workers can follow.

    Raises:
        EngineError: it was started without the weight-transfer engine, or with another.
    """
    chosen = getattr(config, "weight_transfer_config", None)
    backend = getattr(chosen, "backend", None)
    if backend != BACKEND:
        raise EngineError(
            f"{name} was started with {f'backend {backend!r}' if backend else 'none'} for weight "
            f'transfer: start it with weight_transfer_config={{"backend": "{BACKEND}"}} '
            f"(in {'AsyncEngineArgs' if kind == 'AsyncLLM' else kind})"
        )


def version_number(text: str) -> int:
    """The publisher's number of what an engine says that it serves; 0 if it is none."""
    return int(text) if text.isdecimal() and text.isascii() else 0


def version_served(status: wire.Status, name: str) -> int:
    """The same, by what an engine's service says of it.

    Raises:
        EngineError: the engine did not tell.
    """
    if status.weight_version is None:
        raise EngineError(f"{name} did not say which version it serves")
    return version_number(status.weight_version)


def join_seconds(timeout: float) -> float:
    """What a worker may take to join."""
    return max(timeout - WORKER_MARGIN, timeout / 2)
