"""Two ranks of one engine: `python tensor_parallel.py <old checkpoint> <new checkpoint>`.

Prints as JSON what a fresh engine of the new checkpoint generates, and what one of the old
generates before and after an update, and after ones that failed on one rank. Run in a
process of its own: each engine starts three more.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import tiny_qwen as tiny

import parallelkit as pk

ENGINE: dict[str, Any] = {
    "tensor_parallel_size": 2,
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "max_model_len": 256,
    "max_num_batched_tokens": 512,
    "dtype": "bfloat16",
    "kv_cache_memory_bytes": 16 << 20,
}


def one_by_one(llm: Any) -> list[list[int]]:
    return [tiny.greedy(llm, asked=[prompt])[0] for prompt in tiny.prompts()]


def end(llm: Any) -> None:
    llm.llm_engine.engine_core.shutdown()
    gc.collect()


def upset(llm: Any, rank: int, publisher: Any, source: Any, path: Path) -> dict[str, Any]:
    """Let an update fail on one rank, and make the same one again."""
    llm.collective_rpc("upset_next_load", args=("raise", 0.0, rank))
    source.put(tiny.read_file(path / "model.safetensors"))
    failed = ""
    try:
        publisher.update()
    except pk.ParallelKitError as error:
        failed = f"{type(error).__name__}: {error}"
    ranks = llm.collective_rpc("which_rank")  # each answers this call, not the one before
    report = publisher.update().to_dict()
    states = [m["state"] for m in report["members"]] + [e["state"] for e in report["engines"]]
    return {"failed": failed, "ranks": ranks, "states": states, "tokens": one_by_one(llm)}


def main(old: str, new: str) -> None:
    from vllm import LLM

    llm = LLM(model=new, **ENGINE)
    told: dict[str, Any] = {"fresh": one_by_one(llm)}
    end(llm)
    llm = LLM(
        model=old,
        weight_transfer_config={"backend": "parallelkit"},
        worker_extension_cls="upset.Upset",
        **ENGINE,
    )
    source = tiny.Source(tiny.read_file(Path(old) / "model.safetensors"))
    with pk.publish_weights(source, timeout=120.0) as publisher:
        handle = publisher.attach(llm)
        told["before"] = one_by_one(llm)
        source.put(tiny.read_file(Path(new) / "model.safetensors"))
        report = publisher.update().to_dict()
        told["after"] = one_by_one(llm)
        told["version"] = handle.version
        told["members"] = [[m["name"], m["state"], m["version"]] for m in report["members"]]
        told["engines"] = [[e["state"], e["weight_version"]] for e in report["engines"]]
        told["upset"] = [
            upset(llm, rank, publisher, source, path)
            for rank, path in ((0, Path(old)), (1, Path(new)))
        ]
    end(llm)
    print(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
