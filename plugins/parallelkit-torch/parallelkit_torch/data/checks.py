"""Arguments of a loader, checked before anything else happens."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sized
from typing import Any, Final

from torch.utils.data import IterableDataset

from parallelkit.errors import DataShardError, UnsupportedFeatureError

#: Seeds and epochs are below this and at least its negative: msgpack and tensors hold them.
_LIMIT: Final = 2**63


def check_values(batch_size: object, shuffle: object, options: Mapping[str, Any]) -> None:
    """Check what `DataLoader` would not, or not well.

    Raises:
        DataShardError: a wrong value.
    """
    whole = isinstance(batch_size, int) and not isinstance(batch_size, bool)
    if batch_size is not None and (not whole or batch_size < 1):  # type: ignore[operator]
        raise DataShardError(f"batch_size is {batch_size!r}; it is a positive integer")
    for name, value in {"shuffle": shuffle, "drop_last": options.get("drop_last", False)}.items():
        if not isinstance(value, bool):
            raise DataShardError(f"{name} is {value!r}; it is True or False")
    workers = options.get("num_workers", 0)
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 0:
        raise DataShardError(f"num_workers is {workers!r}; it is 0 or a positive integer")


def check_dataset(dataset: object, *, shuffle: bool, ordered: bool) -> None:
    """Check that a data set can be sharded; `ordered` if a sampler says what its items are.

    Raises:
        UnsupportedFeatureError: it cannot.
    """
    name = type(dataset).__qualname__
    if isinstance(dataset, IterableDataset):
        if shuffle:
            raise UnsupportedFeatureError(
                f"shuffle=True with {name}: an IterableDataset gives its items in its own order. "
                "Shuffle inside it (its random generators are seeded alike on every rank)"
            )
        return
    if not hasattr(dataset, "__getitem__") or not (ordered or isinstance(dataset, Sized)):
        raise UnsupportedFeatureError(
            f"a {name} cannot be sharded; a data set has __len__ and __getitem__, or is an "
            "IterableDataset"
        )
    if isinstance(dataset, Mapping) and not ordered:
        raise UnsupportedFeatureError(f"a {name} is indexed by keys; give a sequence of its items")


def int64(name: str, value: int) -> int:
    """Return `value`, a seed or an epoch, as a plain integer.

    Raises:
        DataShardError: it is no integer of 64 bits.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = _LIMIT
    # by comparison: `in range(...)` walks the range for what is not exactly an int
    if isinstance(value, bool) or not -_LIMIT <= number < _LIMIT:
        raise DataShardError(f"{name} is {value!r}; allowed is an integer of 64 bits")
    return number


def length_of(dataset: object) -> int | None:
    """The length of a data set, or None where it has none, or says so only when asked."""
    try:
        return len(dataset)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None
