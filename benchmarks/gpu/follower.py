"""The process whose module follows, for `bench_update.py`.

Orders come as lines of JSON on stdin, answers go as lines of JSON to stdout.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch
from lists import LISTS
from torch import nn

import parallelkit as pk

DEVICE = torch.device(os.environ.get("PARALLELKIT_TEST_DEVICE", "cuda:0"))


def module_of(name: str, quick: bool, *, random: bool) -> nn.Module:
    """A module whose parameters are a list's tensors, in bfloat16."""
    shapes = list(LISTS[name]())[:: 50 if quick else 1]
    tensors = [torch.zeros(shape, dtype=torch.bfloat16, device=DEVICE) for shape in shapes]
    if random:
        for tensor in tensors:
            tensor.view(torch.int16).random_(-(1 << 15), 1 << 15)
    return nn.ParameterList([nn.Parameter(tensor, requires_grad=False) for tensor in tensors])


def checksum(module: nn.Module) -> list[int]:
    """Two numbers for each tensor, that depend on the places of its elements too."""
    found = []
    for parameter in module.parameters():
        words = parameter.detach().reshape(-1).view(torch.int16)
        found += [words.sum(dtype=torch.int64), words[::3].sum(dtype=torch.int64)]
    return [int(x) for x in torch.stack(found).tolist()]


def memory() -> dict[str, int]:
    """Bytes in use: by torch here, and on the whole device."""
    if DEVICE.type != "cuda":
        return {"allocated": 0, "used": 0}
    torch.cuda.synchronize(DEVICE)
    free, total = torch.cuda.mem_get_info(DEVICE)
    return {"allocated": torch.cuda.memory_allocated(DEVICE), "used": total - free}


def settle() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize(DEVICE)


class Follower:
    """Does what it is told."""

    def __init__(self, name: str, quick: bool) -> None:
        self.module = module_of(name, quick, random=False)
        self.targets = [parameter.detach() for parameter in self.module.parameters()]
        self.sources: list[torch.Tensor] = []
        self.subscriber: Any = None

    def subscribe(self, ticket: str) -> Any:
        start = time.perf_counter()
        self.subscriber = pk.subscribe_weights(self.module, ticket, timeout=60.0)
        return {
            "seconds": time.perf_counter() - start,
            "transport": self.subscriber._placement.readers.name,
            "in_place": self.subscriber._in_place,
        }

    def step(self, count: int) -> Any:
        for _ in range(count):
            self.subscriber.step(60.0)
        return {"version": self.subscriber.version}

    def leave(self) -> Any:
        self.subscriber.close()
        self.subscriber = None
        return {}

    def clear(self) -> Any:
        for target in self.targets:
            target.zero_()
        settle()
        return {}

    def checksum(self) -> Any:
        return {"checksum": checksum(self.module)}

    def memory(self) -> Any:
        return memory()

    def open(self, handles: list[list[Any]]) -> Any:
        """Open tensors one by one, as torch's own reductions share them."""
        from torch.multiprocessing.reductions import rebuild_cuda_tensor

        start = time.perf_counter()
        for row in handles:
            size, stride, offset, handle, nbytes, at, counter, counter_at, event, sync = row
            self.sources.append(
                rebuild_cuda_tensor(
                    torch.Tensor,
                    torch.Size(size),
                    tuple(stride),
                    offset,
                    torch.UntypedStorage,
                    torch.bfloat16,
                    DEVICE.index,
                    bytes.fromhex(handle),
                    nbytes,
                    at,
                    False,
                    bytes.fromhex(counter),
                    counter_at,
                    bytes.fromhex(event),
                    sync,
                )
            )
        return {"seconds": time.perf_counter() - start}

    def one_by_one(self) -> Any:
        for target, source in zip(self.targets, self.sources, strict=True):
            target.copy_(source, non_blocking=True)
        settle()
        return {}

    def drop(self) -> Any:
        self.sources.clear()
        return {}


def main() -> None:
    follower = Follower(sys.argv[1], "--quick" in sys.argv)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        try:
            answer = getattr(follower, order.pop("do"))(**order)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
