"""A MindSpore trainer sends a Cell's parameters by their addresses; a torch process receives them.

Rank 0 imports MindSpore, rank 1 torch, and neither the other. Bytes are compared by digests that
each framework's own way out of the tensor gives.
"""

from __future__ import annotations

import hashlib
import json
import sys
import warnings
from typing import Any

import harness as h
from parallelkit_hccl import HcclReceiver, HcclSender, Packing, located

KINDS: list[Packing | None] = [None, Packing(buffer_bytes=20_000)]


def digest(data: bytes) -> str:
    return hashlib.blake2b(data).hexdigest()


def trainer() -> None:
    import mindspore as ms
    from mindspore import nn

    # MindSpore itself does that, at exit.
    warnings.filterwarnings("ignore", "getName", DeprecationWarning)

    class Net(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Dense(64, 96).to_float(ms.bfloat16)
            self.norm = nn.LayerNorm((96,))
            self.second = nn.Dense(96, 10)

        def construct(self, x: Any) -> Any:
            return self.second(self.norm(self.first(x)))

    net = Net()
    half = ms.Parameter(ms.ops.randn(129, 65).astype(ms.bfloat16), name="half")
    named = [*((name, p) for name, p in net.parameters_and_names()), ("half", half)]
    ms.runtime.synchronize()
    rows = [(name, str(p.dtype).lower(), list(p.shape)) for name, p in named]
    h.note("manifest", json.dumps(rows))
    with h.opened() as communicator:
        for number, packing in enumerate(KINDS):
            for _, p in named:  # a step of training: new values in the same memory
                p.copy_(ms.ops.randn(*p.shape).astype(p.dtype))
            ms.runtime.synchronize()
            h.note(
                f"digests{number}", json.dumps([digest(p.asnumpy().tobytes()) for _, p in named])
            )
            HcclSender(communicator, packing=packing).send(located(named))
    assert "torch" not in sys.modules


def engine() -> None:
    import torch

    rows = json.loads(h.read("manifest"))
    assert {dtype for _, dtype, _ in rows} == {"bfloat16", "float32"}
    named = [(name, torch.zeros(shape, dtype=getattr(torch, dtype))) for name, dtype, shape in rows]
    with h.opened() as communicator:
        for number, packing in enumerate(KINDS):
            HcclReceiver(communicator, packing=packing).receive(located(named))
            got = [digest(t.view(torch.uint8).numpy().tobytes()) for _, t in named]
            assert got == json.loads(h.read(f"digests{number}"))
    assert "mindspore" not in sys.modules


trainer() if h.RANK == 0 else engine()
assert h.live() == 0
