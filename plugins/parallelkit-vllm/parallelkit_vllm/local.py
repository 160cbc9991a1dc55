"""An engine in this process as a target: `pk.subscribe_weights(llm, ticket)`."""

from __future__ import annotations

from typing import Any, Final

from parallelkit.errors import UnsupportedFeatureError
from parallelkit_vllm.errors import EngineTargetError, ReloadError
from parallelkit_vllm.sink import EngineSink
from parallelkit_vllm.versions import check_version, takes

_INSTEAD: Final = (
    "let the publisher attach it (publisher.attach(llm), in the publisher's process), or start it "
    'with weight_transfer_config={"backend": "parallelkit"} and give each worker the ticket: '
    'llm.init_weight_transfer_engine({"init_info": {"ticket": ticket}})'
)


def local_sink(llm: Any, loader: object = None) -> EngineSink:
    """Make a sink of an `LLM` whose only worker lives in this process.

    Its `module`, which `with subscriber.use() as llm` gives, is the `LLM`. Once new weights are in
    place the prefix cache is empty, and requests that are under way are computed anew.

    Raises:
        EngineTargetError: the engine or its workers live in other processes.
        UnsupportedFeatureError: a loader was given; an engine has its own.
        EngineVersionError: vLLM is too old.
    """
    check_version()
    if loader is not None:
        raise UnsupportedFeatureError(
            "weights reach an engine by its own loader; leave out loader=, or give a bare nn.Module"
        )
    runner = _worker(llm).model_runner
    engine = llm.llm_engine

    def ready() -> None:
        if engine.is_sleeping():
            raise EngineTargetError(
                "the engine is asleep or paused: wake it (llm.wake_up()) before it is updated"
            )

    def placed() -> None:
        all_of_it = {"reset_running_requests": True}
        known = takes(engine.reset_prefix_cache, "reset_running_requests")
        if not engine.reset_prefix_cache(**(all_of_it if known else {})):
            raise ReloadError(
                "the new weights are in place, and the prefix cache could not be emptied: blocks "
                "are in use; finish the requests that are under way, and update again"
            )
        for owner, name in ((engine, "reset_encoder_cache"), (runner, "reset_lora_state")):
            reset = getattr(owner, name, None)  # what else was computed with the old weights
            if reset is not None:
                reset()

    return EngineSink(runner.get_model(), _config(llm), module=llm, ready=ready, placed=placed)


def _config(llm: Any) -> Any:
    return llm.llm_engine.vllm_config


def _worker(llm: Any) -> Any:
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    if core is None:
        raise EngineTargetError(
            "this LLM runs its engine in a process of its own, so that its weights are not here; "
            f"{_INSTEAD}. An engine in this process needs VLLM_ENABLE_V1_MULTIPROCESSING=0"
        )
    wrapper = getattr(core.model_executor, "driver_worker", None)
    worker = getattr(wrapper, "worker", None)
    parallel = _config(llm).parallel_config
    if worker is None or parallel.world_size != 1:
        raise EngineTargetError(
            f"this LLM has {parallel.world_size} workers in processes of their own; {_INSTEAD}"
        )
    return worker
