"""A loader over one rank's part of a data set, chosen by its data coordinate."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sized
from typing import Any, Final, final

import attrs
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from parallelkit.data import derive_seed, shard_indices
from parallelkit.errors import DataShardError, UnsupportedFeatureError
from parallelkit_torch import options as opts

_OPTIONS: Final = (
    "collate_fn",
    "drop_last",
    "multiprocessing_context",
    "num_workers",
    "persistent_workers",
    "pin_memory",
    "prefetch_factor",
    "timeout",
    "worker_init_fn",
)


@final
@attrs.define(eq=False)
class ShardSampler(Sampler[int]):
    """The items of one shard, by `parallelkit.data.shard_indices`."""

    dataset: Sized
    index: int
    count: int
    mode: str
    shuffle: bool
    seed: int
    epoch: int = 0

    def _items(self) -> Any:
        return shard_indices(
            len(self.dataset),
            index=self.index,
            count=self.count,
            mode=self.mode,
            shuffle=self.shuffle,
            seed=self.seed,
            epoch=self.epoch,
        )

    def __len__(self) -> int:
        return len(self._items())

    def __iter__(self) -> Iterator[int]:
        return iter(self._items())


@attrs.frozen
class _WorkerSeeds:
    """Seeds a loader worker's generators by data coordinate, worker and epoch."""

    sampler: ShardSampler
    then: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        seed = derive_seed(self.sampler.seed, self.sampler.index, worker, self.sampler.epoch)
        random.seed(seed)
        torch.manual_seed(seed)
        _seed_numpy(seed)
        if self.then is not None:
            self.then(worker)


@final
class ShardLoader(DataLoader[Any]):
    """A `DataLoader` over the part of a data set that belongs to one data coordinate.

    Ranks with the same data coordinate load the same items in the same order. `"pad"` and
    `"drop"` give every rank the same number of batches; `"uneven"` may give some one more, so a
    loop that makes collective calls for each batch needs one of the others.

    With `num_workers`, each worker's `random`, NumPy and torch generators are seeded by data
    coordinate, worker and epoch (the epoch when the worker started: persistent workers keep
    theirs). Without workers, items are made in this process with its own generators, which are
    left alone; seed them with `loader.seed` where ranks have to differ.

    Attributes:
        index, count: this part, of how many.
        epoch: as set by `set_epoch`.
        seed: the seed of this data coordinate and epoch, of 64 bits.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        index: int,
        count: int,
        batch_size: int = 1,
        mode: str = "pad",
        shuffle: bool = False,
        seed: int = 0,
        **options: Any,
    ) -> None:
        """Check everything at once; `ParallelContext.shard` calls this.

        Raises:
            DataShardError: a wrong value, or fewer items than shards with `"drop"`.
            UnsupportedFeatureError: an unknown option, or a data set without items to choose.
        """
        kept = opts.check(options, _OPTIONS, what="context.shard")
        _check_dataset(dataset)
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise DataShardError(f"batch_size is {batch_size!r}; it is a positive integer")
        sampler = ShardSampler(
            dataset,  # type: ignore[arg-type]  # checked to have a length
            index=index,
            count=count,
            mode=mode,
            shuffle=shuffle,
            seed=seed,
        )
        len(sampler)  # every argument is checked here, not at the first batch
        kept["worker_init_fn"] = _WorkerSeeds(sampler, kept.get("worker_init_fn"))
        # The base seed of workers comes from here, not from the process's generator.
        generator = torch.Generator()
        super().__init__(
            dataset, batch_size=batch_size, sampler=sampler, generator=generator, **kept
        )
        self._shard = sampler
        self.set_epoch(0)

    @property
    def index(self) -> int:
        return self._shard.index

    @property
    def count(self) -> int:
        return self._shard.count

    @property
    def epoch(self) -> int:
        return self._shard.epoch

    @property
    def seed(self) -> int:
        return derive_seed(self._shard.seed, self.index, self.epoch)

    def set_epoch(self, epoch: int) -> None:
        """Choose the permutation and the seeds of an epoch; call it alike on every rank.

        Raises:
            DataShardError: `epoch` is not an integer.
        """
        derive_seed(0, epoch)
        self._shard.epoch = epoch
        self.generator.manual_seed(self.seed >> 1)


def _check_dataset(dataset: object) -> None:
    if isinstance(dataset, IterableDataset):
        raise UnsupportedFeatureError(
            f"{type(dataset).__qualname__} is an IterableDataset: there are no items to choose "
            "from by number. Split it in its own __iter__, or give a map-style data set"
        )
    if not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__"):
        raise UnsupportedFeatureError(
            f"a {type(dataset).__qualname__} cannot be sharded; a data set has __len__ and "
            "__getitem__"
        )
    if isinstance(dataset, Mapping):
        raise UnsupportedFeatureError(
            f"a {type(dataset).__qualname__} is indexed by keys; give a sequence of its items"
        )


def _seed_numpy(seed: int) -> None:
    import numpy as np

    np.random.seed(seed % 2**32)  # the legacy generator is what augmentations use
