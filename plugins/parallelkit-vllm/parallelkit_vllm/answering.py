"""What the workers of one engine answer to a call, if it fails on some of them.

vLLM (seen in 0.32) reads the workers' answers in the order of their ranks and stops at the first
error. The answers of the ranks behind it stay where they are, and are taken for those to the next
call: from then on every check of these workers is one call late. So the workers tell each other
first, and the last alone raises.

They tell each other by the key-value store of torch's process group, not by vLLM's group of the
CPU. A collective of that one has a time-out too (gloo's 30 minutes, or
`cpu_distributed_timeout_seconds`), but one that ran out, or that one rank never entered, breaks
the group for vLLM. A worker need not come here: vLLM may refuse the call on it before.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

import torch

from parallelkit_vllm.errors import WorkerError

_log = logging.getLogger(__name__)

#: Seconds that a worker whose call has ended waits for the others'.
SECONDS: Final = 1800.0

#: Bytes of a worker's error that the others learn.
_TEXT_BYTES: Final = 4096
_POLL_SECONDS: Final = 0.005
_PREFIX: Final = "parallelkit/answers"

Result = TypeVar("Result")
#: Gives every worker the bytes of each, by rank; None for one that did not come in time.
Exchange = Callable[[bytes], list[bytes | None]]


def answer(worker: Any, call: Callable[[], Result], *, seconds: float = SECONDS) -> Result | None:
    """Make a call that all workers of an engine make; collective among them.

    Args:
        seconds: how much longer than this worker's the call of another may take. One that is stuck
            or dead is named in the error then. Nothing is broken by it: the next call is exchanged
            as usual.

    Raises:
        Exception: what the call raised, in an engine of one worker.
        WorkerError: the call failed, here or elsewhere, or a worker did not say in time; raised by
            the last worker alone. The others return None.
    """
    parallel = worker.vllm_config.parallel_config
    size, rank = int(parallel.world_size), int(parallel.rank)
    exchange = None if size == 1 else _exchange(size, rank, seconds)
    return settle(call, rank, exchange)


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
    silent = "did not say in time how its call went; it is stuck, or refused the call"
    failed = {
        at: silent if text is None else text.decode(errors="ignore")
        for at, text in enumerate(texts)
        if text != b""
    }
    if not failed:
        return result
    groups: dict[str, list[int]] = {}
    for at, text in failed.items():
        groups.setdefault(text, []).append(at)
    told = "; ".join(f"worker {', '.join(map(str, r))}: {t}" for t, r in groups.items())
    if rank == len(texts) - 1:
        raise WorkerError(told, ranks=list(failed)) from problem
    if None in texts:  # the last one may be the one that is silent
        _log.warning("%s", told)
    return None


class StoreExchange:
    """Workers tell each other through a store with `set`, `get`, `check` and `delete_key`.

    A round in which one is missing is not counted, by any that came: they meet in it again.

    Args:
        store: torch's; reached by all of them.
        size, rank: how many workers there are, and which one this is.
    """

    def __init__(self, store: Any, size: int, rank: int) -> None:
        self._store = store
        self._size = size
        self._rank = rank
        self._round = 0

    def __call__(self, mine: bytes, seconds: float) -> list[bytes | None]:
        """Tell the others, and wait so many seconds for what they say.

        Raises:
            RuntimeError: the store is gone, and with it the worker that keeps it.
        """
        deadline = time.monotonic() + seconds
        own = self._key(self._rank)
        self._store.set(own, mine.decode(errors="ignore"))
        texts: list[bytes | None] = [None] * self._size
        missing = list(range(self._size))
        while True:
            for at in [at for at in missing if self._store.check([self._key(at)])]:
                texts[at] = bytes(self._store.get(self._key(at)))
                missing.remove(at)
            if not missing:
                if self._round:  # all have read it: they are in this round
                    self._store.delete_key(self._key(self._rank, self._round - 1))
                self._round += 1
                return texts
            if time.monotonic() >= deadline:
                self._store.delete_key(own)  # none shall take it for the next one
                return texts
            time.sleep(_POLL_SECONDS)

    def _key(self, rank: int, number: int | None = None) -> str:
        return f"{_PREFIX}/{self._round if number is None else number}/{rank}"


#: This process's, by the store.
_exchanges: dict[int, StoreExchange] = {}


def _exchange(size: int, rank: int, seconds: float) -> Exchange | None:
    """By the store that the engine's workers have; None where it has others in it, too."""
    from torch.distributed import distributed_c10d
    from vllm.distributed.parallel_state import get_world_group

    group = get_world_group().cpu_group
    if (
        torch.distributed.get_world_size(group) != size
        or torch.distributed.get_world_size() != size
    ):
        return None
    store = distributed_c10d._get_default_store()
    found = _exchanges.get(id(store))
    if found is None:
        found = _exchanges[id(store)] = StoreExchange(store, size, rank)
    return lambda mine: found(mine, seconds)
