"""Random generators of a process, seeded together."""

from __future__ import annotations

import random

import mindspore as ms
import numpy as np

from parallelkit.data import derive_seed


def seed_all(base: int, index: int) -> int:
    """Seed Python's, NumPy's and MindSpore's generators for one data part; return the seed.

    Raises:
        DataShardError: `base` is no integer.
    """
    seed = derive_seed(base, index)
    random.seed(seed)
    ms.set_seed(seed % 2**32)
    ms.manual_seed(seed >> 1)
    np.random.seed(seed % 2**32)  # `set_seed` gives it another one
    return seed
