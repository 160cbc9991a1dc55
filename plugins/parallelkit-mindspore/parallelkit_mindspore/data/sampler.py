"""Samplers: what a user's says about the order of the data, and ours for whole epochs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, final

import attrs
import mindspore.dataset as ds
import numpy as np

from parallelkit.errors import UnsupportedFeatureError


@attrs.frozen(eq=False)
class Order:
    """The order that a sampler means.

    Attributes:
        items: numbers of the items, an integer array; None for all of them, 0, 1, 2, ...
        shuffled: whether it is a plain permutation of all of them.
    """

    items: Any = None
    shuffled: bool = False


def read(sampler: Any, length: int, name: str) -> Order:
    """Read the order that a data set's sampler gives to its `length` items.

    Args:
        name: of the data set, for messages.

    Raises:
        UnsupportedFeatureError: it divides the data already, or its order is its own.
    """
    kind = type(sampler)
    if sampler is None:
        return Order()
    if sampler.is_sharded():
        raise UnsupportedFeatureError(
            f"the {name} is sharded already, so its data would be divided twice; make it without "
            "num_shards, shard_id and DistributedSampler"
        )
    if sampler.child_sampler is None and _is_permutation(sampler):
        return Order(shuffled=bool(sampler.is_shuffled()))
    if kind not in (ds.SequentialSampler, ds.SubsetSampler):
        raise UnsupportedFeatureError(
            f"the {name} has a {kind.__qualname__}, whose order would not be alike on all ranks, "
            "or not be one that can be divided. Allowed are shuffle, num_samples without shuffle, "
            "SequentialSampler, RandomSampler, SubsetSampler, and split(..., randomize=False)"
        )
    inner = read(sampler.child_sampler, length, name)
    if inner.shuffled:
        raise UnsupportedFeatureError(
            f"the {name} takes a part of a random order, which MindSpore draws anew on every "
            "rank; use split(..., randomize=False), or a SubsetSampler of chosen indices"
        )
    if kind is ds.SubsetSampler:
        chosen = np.asarray(sampler.indices, np.int64)
    else:
        many = length if inner.items is None else len(inner.items)
        chosen = np.arange(sampler.start_index or 0, many)
    if sampler.num_samples:
        chosen = chosen[: sampler.num_samples]
    if inner.items is not None:
        chosen = inner.items[chosen]
    elif len(chosen) == length and np.array_equal(chosen, np.arange(length)):
        return Order()
    return Order(items=chosen)


@final
class EpochSampler(ds.Sampler):  # type: ignore[misc]  # MindSpore is untyped
    """Gives a part's items, epoch after epoch, to a pipeline that runs for several.

    MindSpore copies the data set for everything it does with it; every copy begins anew.
    """

    def __init__(self, items: Callable[[int], Sequence[int]], first: int, num_samples: int) -> None:
        """`items` says what belongs to an epoch, always `num_samples`; `first` is the first."""
        super().__init__(num_samples=num_samples)
        self._items, self._epoch = items, first

    def __iter__(self) -> Iterator[int]:
        items = self._items(self._epoch)
        self._epoch += 1
        return iter(items)

    def __deepcopy__(self, memo: dict[int, Any]) -> EpochSampler:
        return EpochSampler(self._items, self._epoch, self.num_samples)


#: Where DistributedSampler begins if it is not told.
_NO_OFFSET: Final = -1


def _is_permutation(sampler: Any) -> bool:
    """Whether it gives each item once, in order or as a plain permutation."""
    if sampler.num_samples:
        return False
    if type(sampler) is ds.SequentialSampler:
        return not sampler.start_index
    if type(sampler) is ds.DistributedSampler:  # of one shard, or it would be refused
        return bool(sampler.offset == _NO_OFFSET)
    return type(sampler) is ds.RandomSampler and not sampler.replacement
