"""vLLM engines in one process, by commands on standard input; run by a Python that has vLLM.

Each command is a JSON line, and is answered by one or more:

    {"do": "follow", "checkpoint": PATH, "ticket": TICKET, "versions": 3}   an engine that starts
        with a checkpoint's weights, joins, and says what it generates before and at each version
    {"do": "fresh", "checkpoint": PATH}                                     what a new engine does
    {"do": "logits", "checkpoint": PATH, "tokens": [[...]], "save": PATH}   the logits of Hugging
        Face's own model, written as a NumPy array

What an engine generates are the likeliest tokens after a few prompts, and their log-probabilities.

The environment says `VLLM_ENABLE_V1_MULTIPROCESSING=0`: the engine lives in this process.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

SECONDS = 300.0
GREEDY = 16
#: One is longer than a block of the prefix cache, which is of 128 tokens on the CPU.
PROMPT_LENGTHS = (5, 24, 150)

#: vLLM's engines of one process share state: none may go before the last.
_engines: list[Any] = []


def emit(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def engine(checkpoint: str) -> Any:
    from vllm import LLM

    config = json.loads((Path(checkpoint) / "config.json").read_text())
    _engines.append(
        LLM(
            model=checkpoint,
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=256,
            dtype=config["torch_dtype"],
            kv_cache_memory_bytes=32 << 20,
        )
    )
    return _engines[-1]


def greedy(llm: Any) -> dict[str, list[Any]]:
    """Continue prompts of several lengths, always with the likeliest token."""
    from vllm import SamplingParams

    words = llm.llm_engine.model_config.hf_config.vocab_size
    prompts = [
        {"prompt_token_ids": [(7 * place + 3 * length) % words for place in range(length)]}
        for length in PROMPT_LENGTHS
    ]
    how = SamplingParams(
        temperature=0.0, max_tokens=GREEDY, logprobs=0, detokenize=False, ignore_eos=True
    )
    found = [output.outputs[0] for output in llm.generate(prompts, how, use_tqdm=False)]
    return {
        "tokens": [list(one.token_ids) for one in found],
        "logprobs": [[next(iter(at.values())).logprob for at in one.logprobs] for one in found],
    }


def follow(checkpoint: str, ticket: str, versions: int) -> None:
    import parallelkit as pk

    llm = engine(checkpoint)
    emit(version=0, **greedy(llm))
    with pk.subscribe_weights(llm, ticket, timeout=SECONDS) as subscriber:
        for _ in range(versions):
            version = subscriber.step(timeout=SECONDS)
            with subscriber.use() as current:
                emit(version=version, **greedy(current))


def fresh(checkpoint: str) -> None:
    emit(**greedy(engine(checkpoint)))


def logits(checkpoint: str, tokens: list[list[int]], save: str) -> None:
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    with torch.no_grad():
        np.save(save, model(torch.tensor(tokens)).logits.numpy())
    emit(kind=type(model).__name__)


def main() -> None:
    for line in sys.stdin:
        command = json.loads(line)
        {"follow": follow, "fresh": fresh, "logits": logits}[command.pop("do")](**command)


if __name__ == "__main__":
    main()
