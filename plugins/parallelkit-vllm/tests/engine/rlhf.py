"""What a script for vLLM's RLHF example does, with parallelkit's names imported.

`python rlhf.py broadcast|colocate <checkpoint of the engine> <checkpoint of the trainer> <workers>`
prints what it saw, as JSON. The engine has processes of its own; the trainer is this process.
With several workers a fresh engine of as many is asked first, since tokens may differ from one's.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import tiny_qwen as tiny
import torch
from parallelkit_vllm import share_weights, stateless_init_process_group
from stateless_rank import listens

ENGINE: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "max_model_len": 256,
    "max_num_batched_tokens": 512,
    "dtype": "bfloat16",
    "kv_cache_memory_bytes": 16 << 20,
}


def get_open_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def broadcast(llm: Any, model: torch.nn.Module, told: dict[str, Any]) -> None:
    """The example with one trainer and one engine."""
    size = 1 + llm.llm_engine.vllm_config.parallel_config.world_size
    before = listens()
    pool = ThreadPoolExecutor(1)
    master_address, master_port = "127.0.0.1", get_open_port()
    handle = pool.submit(
        llm.collective_rpc, "init_weight_update_group", args=(master_address, master_port, 1, size)
    )
    model_update_group = stateless_init_process_group(
        master_address, master_port, 0, size, torch.device("cpu")
    )
    handle.result()
    told["listens"] = [a for a in listens() if a not in before]

    def sync(only: Callable[[int], bool] = lambda at: True) -> None:
        for at, (name, p) in enumerate(model.named_parameters()):
            if only(at):
                dtype_name = str(p.dtype).split(".")[-1]
                handle = pool.submit(
                    llm.collective_rpc, "update_weight", args=(name, dtype_name, p.shape)
                )
                model_update_group.broadcast(p, src=0)
                handle.result()

    def refused(*args: Any) -> list[str]:
        handle = pool.submit(llm.collective_rpc, "update_weight", args=args)
        said = []
        for call in (lambda: model_update_group.broadcast(torch.zeros(4), src=0), handle.result):
            try:
                call()
            except Exception as error:
                said.append(str(error))
        return said

    told["refused"] = refused("model.norm.wieght", "float32", (4,))
    sync(lambda at: at < 5)
    told["half changed"] = llm.collective_rpc("check_weights_changed")
    told["half"] = tiny.greedy(llm)
    sync()
    llm.reset_prefix_cache()
    told["changed"] = llm.collective_rpc("check_weights_changed")
    told["after"] = tiny.greedy(llm)

    for _, p in model.named_parameters():
        p.data.zero_()
    sync()
    assert all(llm.collective_rpc("check_weights_changed"))
    model_update_group.close()


def colocate(llm: Any, model: torch.nn.Module, told: dict[str, Any]) -> None:
    """The example with a trainer and an engine on one device."""
    device, *_ = llm.collective_rpc("report_device_id")
    with share_weights(model) as shared:
        ipc_handles = shared.handles()
        assert list(ipc_handles) == [device]
        llm.collective_rpc("update_weights_from_ipc_handles", args=(ipc_handles,))
        llm.reset_prefix_cache()
        told["changed"] = llm.collective_rpc("check_weights_changed")
        told["after"] = tiny.greedy(llm)
        for _, p in model.named_parameters():
            p.data.zero_()
        newer = shared.handles()
        try:
            llm.collective_rpc("update_weights_from_ipc_handles", args=(ipc_handles,))
        except Exception as error:
            told["stale"] = str(error)
        llm.collective_rpc("update_weights_from_ipc_handles", args=(newer,))
        assert all(llm.collective_rpc("check_weights_changed"))


def main(how: str, old: str, new: str, workers: str = "1") -> None:
    from transformers import AutoModelForCausalLM
    from vllm import LLM

    engine = ENGINE | {"tensor_parallel_size": int(workers)}
    extension = {"broadcast": "WorkerExtension", "colocate": "ColocateWorkerExtension"}[how]
    told: dict[str, Any] = {}
    if int(workers) > 1:
        fresh = LLM(model=new, **engine)
        told["fresh"] = tiny.greedy(fresh)
        fresh.llm_engine.engine_core.shutdown()
    llm = LLM(model=old, worker_extension_cls=f"parallelkit_vllm.compat.{extension}", **engine)
    told["before"] = tiny.greedy(llm)
    told["unchanged"] = llm.collective_rpc("check_weights_changed")
    model = AutoModelForCausalLM.from_pretrained(new)
    told["dtype"] = str(model.dtype)
    {"broadcast": broadcast, "colocate": colocate}[how](llm, model, told)
    told["zero"] = tiny.greedy(llm, asked=[tiny.prompts()[0]])
    llm.llm_engine.engine_core.shutdown()
    print(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
