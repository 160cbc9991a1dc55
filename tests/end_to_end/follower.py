"""A Torch follower of `trainer.py`: the ticket on standard input, one JSON line a version."""

from __future__ import annotations

import json
import sys

import torch
from trainer import digest, model_of

import parallelkit as pk

torch.set_num_threads(1)
model = model_of(4)
with torch.no_grad():
    for parameter in model.parameters():
        parameter.zero_()
compiled = torch.compile(model, backend="eager")
with pk.subscribe_weights(compiled, sys.stdin.readline()) as follower:
    while True:
        try:
            version = follower.step(30.0)
        except pk.ParallelKitError as error:
            print(json.dumps({"error": type(error).__name__}), flush=True)
            break
        with follower.use() as current:
            assert current is compiled
            print(json.dumps({"version": version, "digest": digest(model)}), flush=True)
