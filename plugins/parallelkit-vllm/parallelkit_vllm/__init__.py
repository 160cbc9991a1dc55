"""vLLM for parallelkit. The plugin is `parallelkit_vllm.plugin`.

Names are imported when they are used, so that importing this package imports no vLLM.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parallelkit_vllm.compat import (
        ColocateWorkerExtension,
        WorkerExtension,
        share_weights,
        stateless_init_process_group,
    )
    from parallelkit_vllm.guard import Guard

__version__ = "0.1.0"

_WHERE = {
    "ColocateWorkerExtension": "parallelkit_vllm.compat",
    "Guard": "parallelkit_vllm.guard",
    "WorkerExtension": "parallelkit_vllm.compat",
    "share_weights": "parallelkit_vllm.compat",
    "stateless_init_process_group": "parallelkit_vllm.compat",
}

__all__ = [
    "ColocateWorkerExtension",
    "Guard",
    "WorkerExtension",
    "share_weights",
    "stateless_init_process_group",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
