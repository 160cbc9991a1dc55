"""What the workers of one engine answer to a call, if it fails on some of them.

vLLM (seen in 0.32) reads the workers' answers in the order of their ranks and stops at the first
error. The answers of the ranks behind it stay where they are, and are taken for those to the next
call: from then on every check of these workers is one call late. So the workers tell each other
first, and the last alone raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

import torch

from parallelkit_vllm.errors import WorkerError

#: Bytes of a worker's error that the others learn.
_TEXT_BYTES: Final = 4096

Result = TypeVar("Result")
#: Gives every worker the bytes of each, by rank.
Exchange = Callable[[bytes], list[bytes]]


def answer(worker: Any, call: Callable[[], Result]) -> Result | None:
    """Make a call that all workers of an engine make; collective among them.

    Raises:
        Exception: what the call raised, in an engine of one worker.
        WorkerError: the call failed, here or elsewhere; raised by the last worker alone. The others
            return None.
    """
    parallel = worker.vllm_config.parallel_config
    size = int(parallel.world_size)
    exchange = None if size == 1 else _exchange(size)
    return settle(call, int(parallel.rank), exchange)


def settle(call: Callable[[], Result], rank: int, exchange: Exchange | None) -> Result | None:
    """As `answer`, given the worker's rank and how workers tell each other; None: not at all."""
    if exchange is None:
        return call()
    result: Result | None = None
    problem: Exception | None = None
    try:
        result = call()
    except Exception as error:
        problem = error
    mine = b"" if problem is None else f"{type(problem).__name__}: {problem}".encode()
    texts = exchange(mine[:_TEXT_BYTES])
    failed = {at: text.decode(errors="ignore") for at, text in enumerate(texts) if text}
    if not failed:
        return result
    if rank == len(texts) - 1:
        groups: dict[str, list[int]] = {}
        for at, text in failed.items():
            groups.setdefault(text, []).append(at)
        raise WorkerError(
            "; ".join(f"worker {', '.join(map(str, r))}: {t}" for t, r in groups.items()),
            ranks=list(failed),
        ) from problem
    return None


def _exchange(size: int) -> Exchange | None:
    """By the group that the engine's workers have; None where it has others in it, too."""
    from vllm.distributed.parallel_state import get_world_group

    group = get_world_group().cpu_group
    if torch.distributed.get_world_size(group) != size:
        return None

    def exchange(mine: bytes) -> list[bytes]:
        sent = torch.zeros(_TEXT_BYTES, dtype=torch.uint8)
        if mine:
            sent[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        got = [torch.empty_like(sent) for _ in range(size)]
        torch.distributed.all_gather(got, sent, group=group)
        return [bytes(x.numpy()).rstrip(b"\0") for x in got]

    return exchange
