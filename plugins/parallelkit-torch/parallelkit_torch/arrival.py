"""Who has arrived at the store: announced by each rank, counted by rank 0, told to all."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NoReturn

import attrs

from parallelkit.errors import GroupError, RendezvousTimeoutError
from parallelkit.specs import GroupSpec
from parallelkit_torch.wire import Store

_POLL_SECONDS = (0.002, 0.2)  # first and longest pause between two looks


@attrs.define
class Deadline:
    """The end of the rendezvous; pauses between looks grow from call to call."""

    seconds: float
    end: float = attrs.field(init=False)
    _pause: float = attrs.field(default=_POLL_SECONDS[0], init=False)

    def __attrs_post_init__(self) -> None:
        self.end = time.monotonic() + self.seconds

    @property
    def left(self) -> float:
        return max(0.0, self.end - time.monotonic())

    def pause(self) -> bool:
        """Sleep a little; False once the time is over."""
        if self.left <= 0:
            return False
        time.sleep(min(self._pause, self.left))
        self._pause = min(self._pause * 1.5, _POLL_SECONDS[1])
        return True


def await_everyone(spec: GroupSpec, store: Store, deadline: Deadline, where: str) -> None:
    """Rank 0: wait for every other rank, then give the word; or say who is missing."""
    waiting = [f"here/{rank}" for rank in range(1, spec.world_size)]
    if _poll(lambda: store.check(waiting), deadline):
        sizes = {r: int(store.get(f"here/{r}").split(b":")[1]) for r in range(1, spec.world_size)}
        other = {rank: size for rank, size in sizes.items() if size != spec.world_size}
        store.set("word", f"world {spec.world_size}" if other else "go")
        if other:
            _linger(store, [f"heard/{r}" for r in sizes])
            raise GroupError(
                f"ranks disagree about the world size: rank 0 has {spec.world_size}, "
                + ", ".join(f"rank {r} has {n}" for r, n in sorted(other.items()))
            )
        return
    missing = [r for r in range(1, spec.world_size) if not store.check([f"here/{r}"])]
    store.set("word", "missing " + ",".join(map(str, missing)))
    _linger(store, [f"heard/{r}" for r in range(1, spec.world_size) if r not in missing])
    _raise_missing(spec, where, missing)


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
        keys = [f"here/{rank}" for rank in range(1, spec.world_size)]
        missing = [r for r, key in enumerate(keys, 1) if not store.check([key])]
        _raise_missing(spec, where, missing or [0])
    word, _, rest = store.get("word").decode().partition(" ")
    if word == "go":
        return
    store.set(f"heard/{spec.rank}", "1")
    if word == "world":
        raise GroupError(
            f"ranks disagree about the world size: rank 0 has {rest}, rank {spec.rank} has "
            f"{spec.world_size}, or another rank differs"
        )
    _raise_missing(spec, where, [int(rank) for rank in rest.split(",")])


def _poll(done: Callable[[], bool], deadline: Deadline) -> bool:
    while not done():
        if not deadline.pause():
            return done()
    return True


def _linger(store: Store, keys: list[str]) -> None:
    """Keep the store alive until the ranks that are here have read the bad news."""
    if keys:
        _poll(lambda: store.check(keys), Deadline(1.0))


def _raise_missing(spec: GroupSpec, where: str, missing: list[int]) -> NoReturn:
    shown = ", ".join(map(str, missing[:16])) + (", ..." if len(missing) > 16 else "")
    raise RendezvousTimeoutError(
        f"{len(missing)} of {spec.world_size} ranks did not arrive at {where} within "
        f"{spec.timeout:g} s: missing rank(s) {shown}. Check their logs, or raise timeout",
        missing=missing,
    )
