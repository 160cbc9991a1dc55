"""One rank of a stateless group: `python stateless_rank.py <what> <rank> <size> <port> <timeout>`.

Prints what it saw as one line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from parallelkit_vllm.stateless import StatelessGroup, stateless_init_process_group

from parallelkit.errors import ParallelKitError

DTYPES = ("bfloat16", "float16", "float32", "int64", "uint8", "bool", "float8_e4m3fn", "complex64")


def listens() -> list[str]:
    """Where this process listens: IPv4 addresses as the kernel writes them, or `v6`."""
    mine = set()
    for fd in Path("/proc/self/fd").iterdir():
        try:
            mine.add(str(fd.readlink()))
        except OSError:
            continue
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in mine:
                found.append(fields[1].partition(":")[0] if table == "tcp" else "v6")
    return found


def failure(error: Exception) -> list[Any]:
    told = getattr(error, "missing", None) or getattr(error, "gone", None) or ()
    return [type(error).__name__, str(error), list(told)]


def attempt(group: StatelessGroup, tensor: torch.Tensor, src: int = 0) -> list[Any] | None:
    try:
        group.broadcast(tensor, src=src)
    except ParallelKitError as error:
        return failure(error)
    return None


def moves(group: StatelessGroup, told: dict[str, Any]) -> None:
    rank = group.rank
    told["listens"] = listens()
    good = {}
    for src in range(group.world_size):
        for name in DTYPES:
            values = torch.arange(12).reshape(3, 4) % 2 if name == "bool" else torch.arange(12) + 1
            wanted = values.reshape(3, 4).to(getattr(torch, name))
            x = wanted.clone() if rank == src else torch.zeros_like(wanted)
            group.broadcast(x, src=src)
            good[f"{name} from {src}"] = bool((x.float() == wanted.float()).all())
    strided = torch.full((6, 4), float(rank)).t()[::2]
    group.broadcast(strided, src=1)
    good["strides"] = bool((strided == 1).all()) and not strided.is_contiguous()
    scalar, nothing = torch.tensor(rank + 5), torch.empty(0, 3)
    group.broadcast(scalar, src=0)
    group.broadcast(nothing, src=0, stream=None)
    good["scalar"] = int(scalar) == 5
    learned = torch.nn.Parameter(torch.full((3,), float(rank)))
    group.broadcast(learned, src=1)
    good["parameter"] = learned.tolist() == [1.0] * 3 and learned.grad_fn is None
    large = torch.full((8 << 20,), rank, dtype=torch.uint8)
    group.broadcast(large, src=0)
    good["large"] = not bool(large.any())
    told["good"] = good
    told["default group"] = dist.is_initialized()


def differs(group: StatelessGroup, told: dict[str, Any]) -> None:
    rank = group.rank
    told["shape"] = attempt(group, torch.zeros(3 + rank))
    told["dtype"] = attempt(group, torch.zeros(3, dtype=torch.int32 if rank else torch.float32))
    told["source"] = attempt(group, torch.zeros(3), src=rank % 2)
    if rank == 1:
        group.refuse("there is no 'model.norm.wieght'")
        told["refused"] = None
    else:
        told["refused"] = attempt(group, torch.zeros(3))
    told["after"] = attempt(group, torch.zeros(3))


def dies(group: StatelessGroup, told: dict[str, Any]) -> None:
    if group.rank == group.world_size - 1:
        os._exit(9)
    told["first"] = attempt(group, torch.zeros(1000))
    told["second"] = attempt(group, torch.zeros(1000))
    told["broken"] = group.broken


def dies_in_the_middle(group: StatelessGroup, told: dict[str, Any]) -> None:
    """After all ranks agreed, and before the bytes."""
    if group.rank == group.world_size - 1:
        group._gloo = type("Gone", (), {"broadcast": lambda *a: os._exit(9)})
    told["first"] = attempt(group, torch.zeros(8 << 20))
    told["second"] = attempt(group, torch.zeros(1))


def stays_away(group: StatelessGroup, told: dict[str, Any]) -> None:
    if group.rank == 1:
        time.sleep(group.timeout + 2.0)
    told["first"] = attempt(group, torch.zeros(10))
    told["second"] = attempt(group, torch.zeros(10))


def closes(group: StatelessGroup, told: dict[str, Any]) -> None:
    if group.rank == 1:
        group.close()
        group.close()
    told["first"] = attempt(group, torch.zeros(10))


def main(what: str, rank: int, size: int, port: int, timeout: float) -> None:
    before = dict(os.environ)
    told: dict[str, Any] = {}
    begun = time.monotonic()
    try:
        group = stateless_init_process_group("127.0.0.1", port, rank, size, "cpu", timeout=timeout)
    except ParallelKitError as error:
        told["no group"] = failure(error)
    else:
        globals()[what](group, told)
        if what != "moves":  # or it is closed at exit, as by scripts that do not
            group.close()
            told["left open"] = listens()
    told["seconds"] = time.monotonic() - begun
    told["environment"] = before == dict(os.environ)
    print(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5]), float(sys.argv[5]))
