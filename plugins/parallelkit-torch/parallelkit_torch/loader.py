"""A loader over one rank's part of a data set, chosen by its data coordinate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, final

import attrs
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from parallelkit import options as opts
from parallelkit.data import check_place, derive_seed, shard_indices
from parallelkit.datastate import Kind, LoaderState
from parallelkit.errors import DataShardError, UnknownLengthError, UnsupportedFeatureError
from parallelkit.loading import Counted, Progress, check_values, int64, length_of
from parallelkit_torch.data import given
from parallelkit_torch.data.checks import check_dataset
from parallelkit_torch.data.sampler import Order, ShardSampler
from parallelkit_torch.data.seeds import WorkerSeeds
from parallelkit_torch.data.stream import StreamPart, set_epoch


def make_loader(
    dataset: Dataset[Any] | DataLoader[Any],
    *,
    index: int,
    count: int,
    batch_size: int | None = None,
    mode: str = "pad",
    shuffle: bool | None = None,
    seed: int = 0,
    **options: Any,
) -> ShardLoader:
    """Make a loader over part `index` of `count` of a data set or of what a `DataLoader` gives.

    A `DataLoader` is made anew over its part, with its data set, batch size, `collate_fn`,
    workers and so on; it is not changed itself. Its `RandomSampler` means `shuffle=True`; any
    other sampler's order, or a batch sampler's batches, are taken once an epoch and dealt to the
    parts, seeded alike on every rank as `Order` says.

    Args:
        dataset: map-style, an `IterableDataset`, or a `DataLoader` over one; alike on all ranks.
        index, count: this rank's data coordinate, of how many.
        batch_size: items in a batch of this part; None for 1, or for the loader's.
        mode: `"pad"`, `"drop"` or `"uneven"`; see `parallelkit.data.shard_indices`.
        shuffle: permute by seed and epoch; None for False, or as the loader does.
        seed: of the order and of the workers, -2**63 to 2**63 - 1.
        options: of `DataLoader`; see `parallelkit_torch.data.given.OPTIONS`.

    Raises:
        DataShardError: a wrong value, one that contradicts the `DataLoader`, or fewer items than
            parts with `"drop"`.
        UnsupportedFeatureError: an unknown option, or data that cannot be sharded.
    """
    if not isinstance(dataset, DataLoader):
        return ShardLoader(
            dataset,
            index=index,
            count=count,
            batch_size=1 if batch_size is None else batch_size,
            mode=mode,
            shuffle=False if shuffle is None else shuffle,
            seed=seed,
            **options,
        )
    opts.check(options, given.OPTIONS, what="context.shard")
    found = given.read(dataset, batch_size=batch_size, shuffle=shuffle, options=options)
    return ShardLoader(
        found.dataset,
        index=index,
        count=count,
        batch_size=found.batch_size,
        mode=mode,
        shuffle=found.shuffle,
        seed=seed,
        order=None if found.sampler is None else Order(found.sampler, seed, found.batches),
        **found.options,
    )


@final
class ShardLoader(DataLoader[Any]):
    """A `DataLoader` over the part of a data set that belongs to one data coordinate.

    Ranks with the same data coordinate load the same items in the same order. `"pad"` and
    `"drop"` give every rank the same number of batches; `"uneven"` may give some one more, so a
    loop that makes collective calls for each batch needs one of the others. Nothing here is
    collective: no rank waits for another.

    With `num_workers`, each worker's `random`, NumPy and torch generators are seeded by data
    coordinate, worker and epoch (the epoch when the worker started: persistent workers keep
    theirs). Without workers, items are made in this process with its own generators, which are
    left alone; seed them with `loader.seed` where ranks have to differ.

    An `IterableDataset` is read whole by every rank and worker; see
    `parallelkit_torch.data.stream.StreamPart`, also for what is random in it.

    Attributes:
        index, count: this part, of how many.
        epoch: as set by `set_epoch` or `load_state_dict`.
        seed: the seed of this data coordinate and epoch, of 64 bits.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        index: int,
        count: int,
        batch_size: int | None = 1,
        mode: str = "pad",
        shuffle: bool = False,
        seed: int = 0,
        order: Order | None = None,
        **options: Any,
    ) -> None:
        """Check everything at once; `make_loader` calls this, with `order` for a caller's sampler.

        Raises:
            DataShardError: a wrong value, or fewer items than shards with `"drop"`.
            UnsupportedFeatureError: an unknown option, or data that cannot be sharded.
        """
        kept = opts.check(options, given.OPTIONS, what="context.shard")
        check_values(batch_size, shuffle, kept)
        check_dataset(dataset, shuffle=shuffle, ordered=order is not None)
        self._place = check_place(index, count, mode)
        place: dict[str, Any] = {"index": self.index, "count": self.count, "mode": mode}
        place["seed"] = seed = int64("seed", seed)
        self._stream: StreamPart | None = None
        self._order: ShardSampler | None = None
        kind: Kind = "items"
        source: dict[str, Any] = {"dataset": dataset, "batch_size": batch_size}
        if isinstance(dataset, IterableDataset):
            kind = "stream"
            lasting = bool(kept.get("persistent_workers"))
            self._stream = StreamPart(dataset, batch_size=batch_size or 1, shared=lasting, **place)
            source["dataset"] = self._stream
            if (length := length_of(dataset)) is not None:
                shard_indices(length, **place)  # "drop" is checked here, not when it has ended
        else:
            data: Any = dataset  # checked to have what is needed
            self._order = ShardSampler(data, shuffle=shuffle, order=order, **place)
            len(self._order)  # every argument is checked here, not at the first batch
            source["sampler"] = self._order
            if order is not None:
                kind = "batches" if order.batches else "sampler"
            if kind == "batches":
                kept.pop("drop_last", None)
                source = {"dataset": dataset, "batch_sampler": self._order}
        self._seeds = WorkerSeeds(seed, self.index, kept.get("worker_init_fn"))
        kept["worker_init_fn"] = self._seeds
        # The base seed of workers comes from here, not from the process's generator.
        kept["generator"] = torch.Generator()
        try:
            super().__init__(**source, **kept)
        except (ValueError, TypeError) as error:
            raise DataShardError(f"DataLoader refuses the options: {error}") from error
        self._next = LoaderState(
            kind=kind, length=self._length(), mode=mode, shuffle=shuffle, seed=seed
        )
        self._progress: Progress | None = None
        self._tell_epoch(0)

    @property
    def index(self) -> int:
        return self._place[0]

    @property
    def count(self) -> int:
        return self._place[1]

    @property
    def epoch(self) -> int:
        return self._next.epoch

    @property
    def seed(self) -> int:
        return derive_seed(self._next.seed, self.index, self.epoch)

    def set_epoch(self, epoch: int) -> None:
        """Choose the permutation and the seeds of an epoch; call it alike on every rank.

        Goes on to the data set and the caller's sampler where they have such a method. The epoch
        that the loader is at already changes nothing, so a loaded state stays loaded.

        Raises:
            DataShardError: `epoch` is not an integer of 64 bits.
        """
        epoch = int64("epoch", epoch)
        if epoch != self.epoch:
            self._next = attrs.evolve(_from_front(self._next), epoch=epoch)
            self._progress = None
        self._tell_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Say how far the latest pass is, as plain data; alike on all ranks in step.

        Counts what was given to the loop, not what workers have made ahead. With `"uneven"`, save
        the state of data coordinate 0, which has the most batches.

        Raises:
            UnsupportedFeatureError: `in_order=False`, where it is not known which batches those
                were.
        """
        if not self.in_order and self.num_workers > 1:
            raise UnsupportedFeatureError(
                "state_dict needs in_order=True: batches that overtake others leave gaps"
            )
        if self._progress is None:
            return self._next.plain()
        state = self._progress.state(
            count=self.count, batch_size=self.batch_size, drop_last=self.drop_last
        )
        return state.plain()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next pass give exactly what was not given when `state` was taken.

        Call it alike on every rank, between passes. The number of ranks, workers and items in a
        batch may differ from then. Passes after the next one are whole. A state of an epoch that
        was over gives one empty pass.

        Raises:
            DataStateError: `state` is damaged, or of other data or settings; nothing changed.
        """
        read = LoaderState.from_plain(state)
        read.check_fits(attrs.evolve(self._next, length=self._length()))
        self._next = read
        self._progress = None
        self._tell_epoch(read.epoch)

    def __iter__(self) -> Any:
        """Begin a pass; one that goes on from a loaded state is used up by this."""
        begun = attrs.evolve(self._next, length=self._length())
        choose: Callable[[], None] | None = None
        if begun.finished:
            pass
        elif self._stream is not None:
            choose = partial(self._stream.begin, begun.epoch, begun.consumed)
        elif self._order is not None:
            made = self._order.plan(begun.epoch, begun.consumed, begun.order)
            begun = attrs.evolve(begun, order=made.digest)
            choose = partial(setattr, self._order, "current", made)
        self._next = _from_front(self._next)
        self._progress = Progress(begun)
        if choose is None:
            return Counted(iter(()), self._progress)
        self._seeds.epoch, self._seeds.start = begun.epoch, begun.consumed
        self.generator.manual_seed(derive_seed(begun.seed, self.index, begun.epoch) >> 1)
        choose()
        # Without workers torch reads the sampler at the first batch, and another pass may have
        # begun by then.
        again = choose if self.num_workers == 0 else None
        return Counted(super().__iter__(), self._progress, again)

    def __len__(self) -> int:
        """Batches of a whole epoch, also where the next pass goes on in mid-epoch.

        Raises:
            UnknownLengthError: the data set is a stream without a length.
        """
        if self._stream is None:
            return super().__len__()
        length = length_of(self._stream.dataset)
        if length is None:
            raise UnknownLengthError(
                f"{type(self._stream.dataset).__qualname__} has no __len__, so the number of "
                "batches is not known before the stream ends"
            )
        items = len(shard_indices(length, index=self.index, count=self.count, mode=self._next.mode))
        size = self.batch_size or 1
        return items // size if self.drop_last else -(-items // size)

    def _length(self) -> int | None:
        return None if self._order is None else self._order.length

    def _tell_epoch(self, epoch: int) -> None:
        set_epoch(self._stream.dataset if self._stream else self.dataset, epoch)
        if self._order is not None and self._order.order is not None:
            self._order.order.set_epoch(epoch)


def _from_front(state: LoaderState) -> LoaderState:
    return attrs.evolve(state, consumed=0, finished=False, order=None)
