"""Seeds of loader workers, and generators set aside for what all ranks have to draw alike."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

import attrs
import torch

from parallelkit.data import derive_seed


@final
@attrs.define(eq=False)
class WorkerSeeds:
    """A `worker_init_fn`: seeds a worker's generators by data coordinate, worker and epoch.

    Attributes:
        seed, index: the user's seed, and the data coordinate.
        then: the user's own `worker_init_fn`, called afterwards.
        epoch, start: those of the pass that starts the worker. A pass that goes on in mid-epoch
            has other seeds than one from the front, or it would repeat the front's draws.
    """

    seed: int
    index: int
    then: Callable[[int], None] | None
    epoch: int = 0
    start: int = 0

    def __call__(self, worker: int) -> None:
        resumed = (self.start,) if self.start else ()
        seed = derive_seed(self.seed, self.index, worker, self.epoch, *resumed)
        seed_all(seed)
        torch.manual_seed(seed)  # devices too, for a worker that uses one
        if self.then is not None:
            self.then(worker)


@final
class Aside:
    """States of the generators of `random`, NumPy and torch, put in place for a while.

    What runs between `enter` and `leave` draws from generators of its own, which go on where
    they were at the last `leave`; what runs outside never notices.
    """

    def __init__(self, seed: int) -> None:
        outside = _states()
        seed_all(seed)
        self._inside = _states()
        _restore(outside)
        self._outside: Any = None

    def enter(self) -> None:
        if self._outside is None:
            self._outside = _states()
            _restore(self._inside)

    def leave(self) -> None:
        if self._outside is not None:
            self._inside = _states()
            _restore(self._outside)
            self._outside = None


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Run a block with all generators seeded, and put them back."""
    aside = Aside(seed)
    aside.enter()
    try:
        yield
    finally:
        aside.leave()


def seed_all(seed: int) -> None:
    """Seed the CPU generators of `random`, NumPy (the legacy one) and torch."""
    import numpy as np

    random.seed(seed)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would go on to devices
    np.random.seed(seed % 2**32)  # the legacy generator is what augmentations use


def _states() -> tuple[Any, ...]:
    import numpy as np

    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _restore(states: tuple[Any, ...]) -> None:
    import numpy as np

    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
