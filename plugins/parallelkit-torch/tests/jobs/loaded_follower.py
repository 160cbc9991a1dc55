"""An engine in a process of its own that follows by its loader.

Standard input is one line, the ticket. Lines of standard output say what is held after each
version, and at the end how it was placed.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import torch

import parallelkit as pk

sys.path.insert(0, str(Path(__file__).parents[1] / "placement"))
from engines import Engine, Sizes, state


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


torch.set_num_threads(1)
engine = Engine(Sizes(experts=2, ranks=2, rank=1), torch.bfloat16)
with pk.subscribe_weights(engine, sys.stdin.readline().strip(), loader=engine.load_weights) as pipe:
    addresses = [parameter.data_ptr() for parameter in engine.parameters()]
    for version in range(1, 4):
        assert pipe.step(60) == version
        with pipe.use() as current:
            assert current is engine
            held = {name: hashlib.sha256(data).hexdigest() for name, data in state(engine)}
        say(version=version, held=held)
    assert [parameter.data_ptr() for parameter in engine.parameters()] == addresses
    say(explain=pipe.explain())
    sys.stdin.readline()  # the publisher has heard the last acknowledgement
