"""Seeds of MindSpore's pipelines, and generators set aside for what all ranks draw alike."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import numpy as np
from mindspore.dataset.core.config import _config


@contextmanager
def pipeline_seed(seed: int) -> Iterator[None]:
    """Let a pipeline that is made, and gives its first batch, in this block draw by `seed`.

    MindSpore's own operations read its setting when they are made. Its worker processes start
    with the first batch, and seed `random` and NumPy by the setting and their number. Threads
    draw from this process's generators, which are left alone: the public `ds.config.set_seed`
    would seed those, too, beside a thread that draws.
    """
    before = _config.get_seed()
    _config.set_seed(seed % 2**31)  # a worker adds its number; the limit is 2**32 - 1
    try:
        yield
    finally:
        _config.set_seed(before)


@final
class Aside:
    """Generators of `random` and NumPy, put in place while a block runs.

    What runs in the blocks draws from generators of its own, which go on where they were at the
    end of the last block; what runs outside never notices.
    """

    def __init__(self, seed: int) -> None:
        outside = _states()
        random.seed(seed)
        np.random.seed(seed % 2**32)
        self._inside = _states()
        _restore(outside)

    @contextmanager
    def inside(self) -> Iterator[None]:
        outside = _states()
        _restore(self._inside)
        try:
            yield
        finally:
            self._inside = _states()
            _restore(outside)


def _states() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state()


def _restore(states: tuple[Any, ...]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
