"""A loader over one rank's part of a data set, chosen by its data coordinate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, final

import attrs
import mindspore.dataset as ds

from parallelkit import options as opts
from parallelkit.data import check_place, derive_seed, shard_indices
from parallelkit.datastate import LoaderState
from parallelkit.errors import DataShardError, UnknownLengthError, UnsupportedFeatureError
from parallelkit.loading import Counted, Progress, check_values, int64, length_of
from parallelkit_mindspore import runtime
from parallelkit_mindspore.data import columns, failures, pipeline
from parallelkit_mindspore.data.checks import is_stream, name_of
from parallelkit_mindspore.data.sampler import EpochSampler
from parallelkit_mindspore.data.seeds import pipeline_seed
from parallelkit_mindspore.data.stream import Stream

#: All options; the last three are for Python data sets, of which a pipeline is made here.
OPTIONS: Final = (
    *("drop_last", "drop_remainder", "output"),
    *("column_names", "num_parallel_workers", "python_multiprocessing"),
)
OUTPUTS: Final = ("tuple", "dict")
#: The most items in a batch of MindSpore's pipelines.
_LARGEST: Final = 2**31 - 1


def make_loader(
    dataset: Any,
    *,
    index: int,
    count: int,
    batch_size: int | None = None,
    mode: str = "pad",
    shuffle: bool | None = None,
    seed: int = 0,
    **options: Any,
) -> ShardLoader:
    """Make a loader over part `index` of `count` of a data set.

    Args:
        dataset: alike on all ranks, one of
            a MindSpore data set that has a sampler, with `map`, `rename`, `project` and one
            `batch` over it or not (it is copied, not changed);
            anything with `__len__` and `__getitem__`;
            an iterable, or a function that makes one: a stream, which every rank reads whole.
        index, count: this rank's data coordinate, of how many.
        batch_size: items in a batch of this part; None for 1, or for the data set's own.
        mode: `"pad"`, `"drop"` or `"uneven"`; see `parallelkit.data.shard_indices`.
        shuffle: permute by seed and epoch. None is as the MindSpore data set does, and most do
            where `shuffle` was not given to them; for others None is False.
        seed: of the order and of random operations, -2**63 to 2**63 - 1.
        options:
            output: `"tuple"` or `"dict"`: what a batch is; default `"tuple"`.
            drop_last (or drop_remainder): leave out a last batch of fewer items; default False.
            column_names: default those of a mapping, else `column_0` and so on.
            num_parallel_workers: of a data set with `__getitem__`; default 1, a thread.
            python_multiprocessing: whether several workers are processes; default True.

    Raises:
        DataShardError: a wrong value, one that contradicts the data set, or fewer items than
            parts with `"drop"`.
        UnsupportedFeatureError: an unknown option, or data that cannot be sharded.
        WrongThreadError: another thread uses MindSpore.
    """
    runtime.own("context.shard")
    kept = opts.check(options, OPTIONS, what="context.shard")
    if "drop_remainder" in kept:  # MindSpore's name of it
        if "drop_last" in kept:
            raise DataShardError("drop_last and drop_remainder are one option; give one of them")
        kept["drop_last"] = kept.pop("drop_remainder")
    workers = kept.get("num_parallel_workers", 1)
    check_values(batch_size, False if shuffle is None else shuffle, kept)
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise DataShardError(f"num_parallel_workers is {workers!r}; it is a positive integer")
    if kept.get("output", "tuple") not in OUTPUTS:
        raise DataShardError(
            f"output is {kept['output']!r}; it is one of {', '.join(map(repr, OUTPUTS))}"
        )
    place = check_place(index, count, mode)
    return ShardLoader(
        dataset,
        place=place,
        batch_size=batch_size,
        mode=mode,
        shuffle=shuffle,
        seed=int64("seed", seed),
        options=kept,
    )


@final
class ShardLoader:
    """The part of a data set that belongs to one data coordinate, in batches of MindSpore tensors.

    Ranks with the same data coordinate load the same items in the same order. `"pad"` and
    `"drop"` give every rank the same number of batches; `"uneven"` may give some one more, so a
    loop that makes collective calls for each batch needs one of the others. Nothing here is
    collective: no rank waits for another.

    A batch is a list of tensors, or with `output="dict"` a dict of them by column; text stays
    NumPy's. Each pass starts a pipeline of MindSpore, whose threads and processes end with it.

    Attributes:
        index, count: this part, of how many.
        batch_size, drop_last: of this part's batches.
        epoch: as set by `set_epoch` or `load_state_dict`.
        seed: the seed of this data coordinate and epoch, of 64 bits.
        native: a MindSpore data set of this part.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        place: tuple[int, int],
        batch_size: int | None,
        mode: str,
        shuffle: bool | None,
        seed: int,
        options: dict[str, Any],
    ) -> None:
        """Read the data set; `make_loader` has checked all values. See there."""
        self.index, self.count = place
        if isinstance(dataset, ShardLoader):
            raise UnsupportedFeatureError(
                "a ShardLoader is one part of its data already; give the data set"
            )
        self._dataset = dataset
        self._as_dict = options.get("output") == "dict"
        self._pipeline: pipeline.Pipeline | None = None
        self._stream: Stream | None = None
        length: int | None = None
        if is_stream(dataset):
            self._stream = _stream(dataset, place, mode, shuffle, seed, options)
            known = length_of(dataset)
        else:
            self._pipeline = _pipeline(dataset, options)
            known = length = self._pipeline.length
            if shuffle is None:
                shuffle = self._pipeline.order.shuffled
        found = self._pipeline
        self.batch_size, self.drop_last = _batches(found, batch_size, options.get("drop_last"))
        self._next = LoaderState(
            kind="items" if found else "stream",
            length=length,
            mode=mode,
            shuffle=bool(shuffle),
            seed=seed,
        )
        self._progress: Progress | None = None
        if known is not None:
            self._positions(known, 0)  # "drop" is checked here, not at the first batch
        self._tell_epoch(0)

    @property
    def epoch(self) -> int:
        return self._next.epoch

    @property
    def seed(self) -> int:
        return derive_seed(self._next.seed, self.index, self.epoch)

    @property
    def native(self) -> Any:
        """A MindSpore data set that gives whole epochs of this part, from `epoch` on.

        For `Model.train(epochs, loader.native)`, with `dataset_sink_mode` or without: each epoch
        gives our part in our order of that epoch. What it gives is not counted: `state_dict` and
        `epoch` stay, so set the next epoch afterwards. Random operations in it draw by
        MindSpore's own seed. A pass that was begun and not ended does not matter. Each use of the
        attribute makes another data set.

        Raises:
            UnsupportedFeatureError: the data is a stream, or MindRecord with `shuffle`, or a state
                of mid-epoch is loaded.
            DataShardError: this part has no items.
        """
        runtime.own("loader.native")
        state, found = self._next, self._pipeline
        if found is None:
            raise UnsupportedFeatureError(
                "a stream has no native data set: it is read with generators of its own, which "
                "MindSpore's threads cannot have. Iterate over the loader"
            )
        if state.consumed or state.finished:
            raise UnsupportedFeatureError(
                f"the loader goes on at position {state.consumed} of epoch {state.epoch}, and a "
                "native data set gives whole epochs. Iterate over the loader until the epoch's "
                "end, then set_epoch"
            )
        size = len(self._part(state.epoch, 0))
        if not size:
            raise DataShardError(f"part {self.index} of {self.count} has no items")
        sampler: Any
        if not state.shuffle:
            sampler = ds.SubsetSampler(list(self._part(state.epoch, 0)))
        elif found.takes_epochs:
            sampler = EpochSampler(lambda epoch: self._part(epoch, 0), state.epoch, size)
        else:
            raise UnsupportedFeatureError(
                "a MindDataset cannot be given another order each epoch; iterate over the loader, "
                "or take shuffle=False"
            )
        return found.over(sampler, batch_size=self.batch_size, drop_last=self.drop_last)

    def set_epoch(self, epoch: int) -> None:
        """Choose the permutation and the seeds of an epoch; call it alike on every rank.

        Goes on to the data set where it has such a method. The epoch that the loader is at
        already changes nothing, so a loaded state stays loaded.

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

        Counts what was given to the loop, not what the pipeline has made ahead. With
        `"uneven"`, save the state of data coordinate 0, which has the most batches.
        """
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
        read.check_fits(self._next)
        self._next = read
        self._progress = None
        self._tell_epoch(read.epoch)

    def __iter__(self) -> Iterator[Any]:
        """Begin a pass; one that goes on from a loaded state is used up by this.

        Raises:
            WrongThreadError: another thread uses MindSpore.
        """
        runtime.own("a pass over a loader")
        begun = self._next
        self._next = _from_front(begun)
        self._progress = Progress(begun)
        if begun.finished:
            return Counted(iter(()), self._progress)
        if self._stream is not None:
            batches = self._stream.batches(
                begun.epoch,
                begun.consumed,
                batch_size=self.batch_size,
                drop_last=self.drop_last,
                as_dict=self._as_dict,
            )
            return Counted(batches, self._progress)
        return Counted(self._passed(begun), self._progress)

    def __len__(self) -> int:
        """Batches of a whole epoch, also where the next pass goes on in mid-epoch.

        Raises:
            UnknownLengthError: the data set is a stream without a length.
        """
        length = self._next.length if self._stream is None else length_of(self._dataset)
        if length is None:
            raise UnknownLengthError(
                f"{name_of(self._dataset)} has no __len__, so the number of batches is not known "
                "before the stream ends"
            )
        items = len(self._positions(length, 0))
        return items // self.batch_size if self.drop_last else -(-items // self.batch_size)

    def _passed(self, begun: LoaderState) -> Iterator[Any]:
        """The rest of an epoch, by a pipeline that lives as long as this generator."""
        items = list(self._part(begun.epoch, begun.consumed))
        if not items or (self.drop_last and len(items) < self.batch_size):
            return  # MindSpore would take this for a mistake
        found = self._pipeline
        assert found is not None
        made = found.over(
            ds.SubsetSampler(items), batch_size=self.batch_size, drop_last=self.drop_last
        )
        resumed = (begun.consumed,) if begun.consumed else ()
        begin: Callable[..., Any] = (
            made.create_dict_iterator if self._as_dict else made.create_tuple_iterator
        )
        running: Any = None
        try:
            with pipeline_seed(derive_seed(begun.seed, self.index, begun.epoch, *resumed)):
                running = begin(num_epochs=1)
                batches = failures.told(running)
                first = next(batches)
            yield first
            del first
            yield from batches
        finally:
            if running is not None:
                running.stop()
            batches = iter(())
            del running, made  # worker processes end with these

    def _part(self, epoch: int, start: int) -> Sequence[int]:
        """Items of this part, of the data set's source."""
        found, state = self._pipeline, self._next
        assert found is not None
        chosen = shard_indices(
            found.length,
            index=self.index,
            count=self.count,
            mode=state.mode,
            shuffle=state.shuffle,
            seed=state.seed,
            epoch=epoch,
            start=start,
        )
        if found.order.items is None:
            return chosen
        return [int(found.order.items[position]) for position in chosen]

    def _positions(self, length: int, start: int) -> Sequence[int]:
        return shard_indices(
            length, index=self.index, count=self.count, mode=self._next.mode, start=start
        )

    def _tell_epoch(self, epoch: int) -> None:
        method = getattr(self._dataset, "set_epoch", None)
        if callable(method):
            method(epoch)


def _pipeline(dataset: Any, options: Mapping[str, Any]) -> pipeline.Pipeline:
    given = {name: options[name] for name in OPTIONS[3:] if name in options}
    if isinstance(dataset, ds.Dataset):
        for name in given:
            raise DataShardError(f"{name} belongs to the {name_of(dataset)}; give it there")
        return pipeline.read(dataset)
    names = given.pop("column_names", None)
    if names is None and len(dataset):
        first = dataset[0]
        names = columns.check_names(columns.names_of(first))
        columns.pipeline_row(first, names)  # what the first item tells, before anything is made
    names = columns.check_names(("column_0",) if names is None else names)
    try:
        rows = columns.Rows(dataset, names)
        made = ds.GeneratorDataset(rows, list(names), shuffle=False, **given)
    except (ValueError, TypeError) as error:
        raise DataShardError(f"GeneratorDataset refuses the options: {error}") from error
    return pipeline.read(made)


def _stream(
    dataset: Any,
    place: tuple[int, int],
    mode: str,
    shuffle: bool | None,
    seed: int,
    options: Mapping[str, Any],
) -> Stream:
    name = name_of(dataset)
    if shuffle:
        raise UnsupportedFeatureError(
            f"shuffle=True with {name}: a stream gives its items in its own order. Shuffle inside "
            "it (random and NumPy are seeded alike on every rank)"
        )
    for option in ("num_parallel_workers", "python_multiprocessing"):
        if option in options:
            raise UnsupportedFeatureError(
                f"{option} with {name}: a stream is read in the thread of the loop; give a data "
                "set with __len__ and __getitem__ for workers"
            )
    names = options.get("column_names")
    return Stream(
        source=dataset,
        index=place[0],
        count=place[1],
        mode=mode,
        seed=seed,
        names=None if names is None else columns.check_names(names),
    )


def _batches(
    found: pipeline.Pipeline | None, batch_size: int | None, drop_last: bool | None
) -> tuple[int, bool]:
    """Size of batches, and whether a smaller last one is left out."""
    if found is not None and (batch_size or 1) > _LARGEST:
        raise DataShardError(f"batch_size is {batch_size}; MindSpore's pipelines take {_LARGEST}")
    if found is None or found.batch_size is None:
        return batch_size or 1, bool(drop_last)
    has = {"batch_size": found.batch_size, "drop_last": found.drop_last}
    for name, value in {"batch_size": batch_size, "drop_last": drop_last}.items():
        if value is not None and value != has[name]:
            raise DataShardError(
                f"{name}={value!r} contradicts the data set, which has {name}={has[name]!r}; "
                "change it there, or give the data set as it is before its batch"
            )
    return found.batch_size, bool(found.drop_last)


def _from_front(state: LoaderState) -> LoaderState:
    return attrs.evolve(state, consumed=0, finished=False, order=None)
