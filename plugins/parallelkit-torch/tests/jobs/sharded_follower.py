"""Whole models in a process of its own that follow ranks, one after the other.

Each line of standard input is JSON with the `sizes` of `sharded_models.make` and a `ticket`; lines
of standard output say what is held.
"""

from __future__ import annotations

import json
import sys

import torch
from sharded_models import fingerprint, make

import parallelkit as pk
from parallelkit.errors import UpdateAbortedError


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


def follow(ticket: str, sizes: dict[str, int]) -> None:
    model = make(**sizes)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.fill_(77)
    with pk.subscribe_weights(model, ticket) as follower:
        while True:
            try:
                version = follower.step(60)
            except UpdateAbortedError as error:
                say(aborted=str(error), version=follower.version)
                continue
            except pk.ParallelKitError as error:
                say(error=type(error).__name__, version=follower.version)
                return
            with follower.use() as current:
                held = {name: fingerprint(t) for name, t in current.state_dict().items()}
            say(version=version, held=held)


torch.set_num_threads(1)
for line in sys.stdin:
    follow(**json.loads(line))
