"""A trainer in a process of its own: transformers' Qwen2, trained by torch.

    python torch_trainer.py tied|untied

Lines of JSON as in trainer.py: `publish` answers with a ticket, `update` trains one step,
publishes, and saves a checkpoint of the same weights to `"folder"`.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import transformers
from tiny_qwen import WORDS, config

import parallelkit as pk


def main(kind: str) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    told = transformers.Qwen2Config(**config(tied=kind == "tied"))
    model = transformers.Qwen2ForCausalLM(told).to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with pk.publish_weights(model) as publisher:
        for line in sys.stdin:
            asked = json.loads(line)
            answer: dict[str, Any] = {}
            if asked["do"] == "publish":
                answer = {"ticket": publisher.ticket}
            elif asked["do"] == "update":
                ids = torch.randint(3, WORDS, (2, 32))
                optimizer.zero_grad()
                model(input_ids=ids, labels=ids).loss.backward()
                optimizer.step()
                answer = {"report": publisher.update().to_dict()}
                model.save_pretrained(asked["folder"])
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
