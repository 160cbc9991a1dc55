"""The entry point `vllm.general_plugins`: vLLM calls `register` in each of its processes."""

from __future__ import annotations

import logging
import warnings
from typing import Final

#: The name of the engine: `weight_transfer_config={"backend": "parallelkit"}`.
BACKEND: Final = "parallelkit"

_log = logging.getLogger(__name__)


def register() -> None:
    """Make the engine known to vLLM. Raises nothing, since vLLM would not start; it logs.

    Called in the main process, in EngineCore and in every worker, possibly more than once. The
    engine's own module is imported by vLLM when a worker makes one.
    """
    try:
        _register()
    except Exception as error:  # an engine that does not use parallelkit must start all the same
        _log.warning(
            "the weight-transfer engine %r is not registered: %s: %s",
            BACKEND,
            type(error).__name__,
            error,
        )


def _register() -> None:
    from parallelkit_vllm.versions import check_version, need

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_version()
    for warning in caught:
        _log.warning("%s", warning.message)
    from vllm.distributed.weight_transfer import factory

    why = f"registering the engine {BACKEND!r}"
    engines = need(factory, "WeightTransferEngineFactory", why)
    if BACKEND in getattr(engines, "_registry", ()):
        return
    need(engines, "register_engine", why)(BACKEND, "parallelkit_vllm.native", "ParallelKitEngine")
