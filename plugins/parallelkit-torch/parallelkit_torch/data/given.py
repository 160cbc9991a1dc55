"""Reading a `DataLoader` that is to be sharded: what it does, said in the words of ours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sized
from typing import Any, Final

import attrs
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from parallelkit.errors import DataShardError, UnsupportedFeatureError
from parallelkit_torch.data.sampler import SizedIterable

#: Options of `DataLoader` that go on as they are.
OPTIONS: Final = (
    "collate_fn",
    "drop_last",
    "in_order",
    "multiprocessing_context",
    "num_workers",
    "persistent_workers",
    "pin_memory",
    "prefetch_factor",
    "timeout",
    "worker_init_fn",
)


@attrs.frozen(kw_only=True, eq=False)
class Given:
    """What a user's `DataLoader` does.

    Attributes:
        batch_size: None where it does not make batches, or a batch sampler does.
        shuffle: whether its order is a plain permutation.
        sampler: one with an order of its own, or None.
        batches: whether `sampler` gives whole batches.
        options: all others, by the names of `OPTIONS`.
    """

    dataset: Any
    batch_size: int | None
    shuffle: bool
    sampler: SizedIterable | None
    batches: bool
    options: dict[str, Any]


def read(
    loader: DataLoader[Any],
    *,
    batch_size: int | None,
    shuffle: bool | None,
    options: Mapping[str, Any],
) -> Given:
    """Read `loader`; the other arguments are those given beside it, which may only agree.

    Raises:
        DataShardError: an argument says another thing than the loader.
        UnsupportedFeatureError: the loader is sharded already, or is read in a way of its own.
    """
    _refuse(loader)
    sampler, batches = _sampler(loader)
    plain = sampler is None
    given = Given(
        dataset=loader.dataset,
        batch_size=loader.batch_size,
        shuffle=plain and isinstance(loader.sampler, RandomSampler),
        sampler=sampler,
        batches=batches,
        options={name: getattr(loader, name) for name in OPTIONS if hasattr(loader, name)},
    )
    if sampler is not None and shuffle is not None:
        raise DataShardError(
            f"shuffle={shuffle!r} contradicts the DataLoader, whose order comes from its "
            f"{type(sampler).__qualname__}; leave shuffle out"
        )
    said = {"batch_size": batch_size, "shuffle": shuffle}
    asked = {name: value for name, value in said.items() if value is not None} | dict(options)
    for name, value in asked.items():
        has = given.options[name] if name in given.options else getattr(given, name)
        if value is not has and value != has:
            raise DataShardError(
                f"{name}={value!r} contradicts the DataLoader, which has {name}={has!r}; change it "
                "there, or give its data set instead of the loader"
            )
    return given


def _refuse(loader: DataLoader[Any]) -> None:
    name = type(loader).__qualname__
    own = [
        method
        for method in ("__iter__", "_get_iterator")
        if getattr(type(loader), method) is not getattr(DataLoader, method)
    ]
    if hasattr(loader, "set_epoch") and hasattr(loader, "count"):
        raise UnsupportedFeatureError(
            f"the {name} is one part of its data already; give the data set or the plain DataLoader"
        )
    if own:
        raise UnsupportedFeatureError(
            f"the {name} has an {own[0]} of its own, which a loader made anew would lose; give "
            "its data set, or a plain DataLoader"
        )
    outer = [loader.sampler, loader.batch_sampler]
    inner = [getattr(sampler, "sampler", None) for sampler in outer]
    for sampler in outer + inner:
        divides = hasattr(sampler, "num_replicas") and hasattr(sampler, "rank")
        if isinstance(sampler, DistributedSampler) or divides:
            raise UnsupportedFeatureError(
                f"the DataLoader has a {type(sampler).__qualname__}, so its data would be divided "
                "twice; give the DataLoader without it (shuffle=True shuffles)"
            )


def _sampler(loader: DataLoader[Any]) -> tuple[SizedIterable | None, bool]:
    """The sampler or batch sampler with an order of its own, if any; whether it makes batches."""
    if isinstance(loader.dataset, IterableDataset):
        return None, False  # torch allows none
    found: Any
    if loader.batch_sampler is not None and type(loader.batch_sampler) is not BatchSampler:
        found, batches = loader.batch_sampler, True
    elif loader.batch_sampler is not None and loader.batch_size is None:
        found, batches = loader.batch_sampler, True  # a plain one given as batch_sampler=
    else:
        found, batches = loader.sampler, False
        if _is_plain(found, loader.dataset):
            return None, False
    if isinstance(found, Sized) and isinstance(found, Iterable):
        return found, batches
    raise UnsupportedFeatureError(
        f"the DataLoader's {type(found).__qualname__} needs __len__ and __iter__, or nobody knows "
        "how to give ranks equal parts"
    )


def _is_plain(sampler: object, dataset: Any) -> bool:
    """Whether `sampler` gives each item once, in order or as a plain permutation."""
    if not isinstance(dataset, Sized):
        return False
    if type(sampler) is SequentialSampler:
        return len(sampler) == len(dataset)
    return (
        type(sampler) is RandomSampler
        and not sampler.replacement
        and len(sampler) == len(sampler.data_source) == len(dataset)
    )
