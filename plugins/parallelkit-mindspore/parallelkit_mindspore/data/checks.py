"""The data set of a loader, checked before anything else happens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set

import mindspore.dataset as ds

from parallelkit.errors import DataShardError, UnsupportedFeatureError
from parallelkit.loading import length_of


def is_stream(dataset: object) -> bool:
    """Say whether a data set is read from front to end: an iterable, or a function of one.

    Raises:
        DataShardError: it is an array without dims.
        UnsupportedFeatureError: it is nothing that can be sharded.
    """
    name = name_of(dataset)
    if isinstance(dataset, ds.Dataset):
        return False
    if getattr(dataset, "ndim", None) == 0:
        raise DataShardError(f"a {name} without dims has no items; give one of at least one dim")
    if isinstance(dataset, Mapping):
        raise UnsupportedFeatureError(
            f"a {name} is indexed by keys; give a sequence of its items, or a NumpySlicesDataset"
        )
    if isinstance(dataset, Iterator):
        raise UnsupportedFeatureError(
            f"a {name} is used up by one pass; give the function that makes it, or an iterable "
            "that can be read again"
        )
    if isinstance(dataset, Set):
        raise UnsupportedFeatureError(f"a {name} has no order that ranks agree on; give a list")
    if hasattr(dataset, "__getitem__") and length_of(dataset) is not None:
        return False
    if not (hasattr(dataset, "__iter__") or callable(dataset)):
        raise UnsupportedFeatureError(
            f"a {name} cannot be sharded; a data set has __len__ and __getitem__, is an iterable, "
            "a function that makes one, or a MindSpore data set"
        )
    return True


def name_of(dataset: object) -> str:
    """Name a data set in a message: a function by its own name, else by its type."""
    return str(getattr(dataset, "__qualname__", type(dataset).__qualname__))
