"""Who has arrived at the store: announced by each rank, counted by rank 0, told to all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from parallelkit.errors import GroupError
from parallelkit.meeting.clock import Deadline, listed, missing_error
from parallelkit.specs import GroupSpec
from parallelkit_torch.wire import Store

_CHUNK = 512  # ranks asked for in one message to the store
_LOOK_SECONDS = 0.5  # for finding out who is missing, past the deadline
_TOLD = 1024  # missing ranks in rank 0's word to the others


def await_everyone(spec: GroupSpec, store: Store, deadline: Deadline, where: str) -> None:
    """Rank 0: wait for every other rank, then give the word; or say who is missing."""
    other: dict[int, int] = {}
    here: list[int] = []
    for ranks in _chunks(range(1, spec.world_size)):
        keys = [f"here/{rank}" for rank in ranks]
        if not _poll(partial(store.check, keys), deadline):
            break
        sizes = [int(said.split(b":")[1]) for said in store.multi_get(keys)]
        other |= {r: n for r, n in zip(ranks, sizes, strict=True) if n != spec.world_size}
        here += ranks
    else:
        store.set("word", f"world {spec.world_size}" if other else "go")
        if other:
            _linger(store, here)
            raise GroupError(
                f"ranks disagree about the world size: rank 0 has {spec.world_size}, "
                + listed([f"rank {r} has {n}" for r, n in sorted(other.items())])
            )
        return
    late, missing = _look(store, range(len(here) + 1, spec.world_size))
    store.set("word", f"missing {len(missing)} {','.join(map(str, missing[:_TOLD]))}")
    _linger(store, here + late)
    raise missing_error(spec, where, missing)


def await_word(spec: GroupSpec, store: Store, deadline: Deadline, where: str, token: str) -> None:
    """Other ranks: announce, then wait for rank 0's word."""
    mine = f"{token}:{spec.world_size}".encode()
    found = store.compare_set(f"here/{spec.rank}", "", mine.decode())
    if found != mine:
        raise GroupError(
            f"another process is rank {spec.rank} already at {where}: two jobs use one port, or "
            "two processes were given one rank. Set master_port (MASTER_PORT) to another port"
        )
    if not _poll(lambda: store.check(["word"]), deadline):
        _, missing = _look(store, range(1, spec.world_size))
        raise missing_error(spec, where, missing or [0])
    word, _, rest = store.get("word").decode().partition(" ")
    if word == "go":
        return
    store.set(f"heard/{spec.rank}", "1")
    if word == "world":
        raise GroupError(
            f"ranks disagree about the world size: rank 0 has {rest}, rank {spec.rank} has "
            f"{spec.world_size}, or another rank differs"
        )
    count, _, ranks_missing = rest.partition(" ")
    raise missing_error(spec, where, [int(rank) for rank in ranks_missing.split(",")], int(count))


def _poll(done: Callable[[], bool], deadline: Deadline) -> bool:
    while not done():
        if not deadline.pause():
            return done()
    return True


def _chunks(ranks: range) -> Iterator[range]:
    for first in range(0, len(ranks), _CHUNK):
        yield ranks[first : first + _CHUNK]


def _look(store: Store, ranks: range) -> tuple[list[int], list[int]]:
    """Who of `ranks` is here and who is not; those not looked at in time count as not here."""
    deadline = Deadline(_LOOK_SECONDS)
    here: list[int] = []
    missing: list[int] = []
    for rank in ranks:
        there = deadline.left > 0 and store.check([f"here/{rank}"])
        (here if there else missing).append(rank)
    return here, missing


def _linger(store: Store, ranks: list[int]) -> None:
    """Keep the store alive until the ranks that are here have read the bad news."""
    deadline = Deadline(1.0)
    for first in range(0, len(ranks), _CHUNK):
        keys = [f"heard/{rank}" for rank in ranks[first : first + _CHUNK]]
        if not _poll(partial(store.check, keys), deadline):
            return
