"""A MindSpore data set that is to be sharded: what it does, and copies of it over one part."""

from __future__ import annotations

import copy
import weakref
from itertools import pairwise
from typing import Any, Final, final

import attrs
import mindspore.dataset as ds
from mindspore.dataset.engine import datasets as engine

from parallelkit.errors import DataShardError, UnsupportedFeatureError
from parallelkit_mindspore.data import sampler as samplers

#: Operations that make one row of each, or a batch of some, in order.
_ROW_BY_ROW: Final = (engine.MapDataset, engine.RenameDataset, engine.ProjectDataset)

_HINTS: Final = {
    "ShuffleDataset": "shard(..., shuffle=True) shuffles",
    "RepeatDataset": "each pass is an epoch",
    "ZipDataset": "make one GeneratorDataset of a source that reads both",
    "ConcatDataset": "make one GeneratorDataset of a source that reads both",
    "TakeDataset": "num_samples= of the source takes the first",
    "SkipDataset": "a SequentialSampler(start_index=...) skips the first",
}


@final
@attrs.frozen(kw_only=True, eq=False)
class Pipeline:
    """What is known of a user's data set; `over` makes the same over chosen items.

    Attributes:
        dataset: the user's, never changed.
        length: of the order.
        order: what its sampler means.
        batch_size, drop_last: of its batches, where it makes them; else None.
    """

    dataset: Any
    length: int
    order: samplers.Order
    batch_size: int | None
    drop_last: bool | None

    def over(self, sampler: Any, *, batch_size: int, drop_last: bool) -> Any:
        """Return a copy that takes its items from `sampler`, in batches.

        The arguments count where the data set makes no batches itself.
        """
        made = copy.deepcopy(self.dataset)
        made.parent = []
        chain = _chain(made)
        for above, below in pairwise(chain):
            below.parent = [weakref.ref(above)]  # or it says that the original is its consumer
        for node in chain:
            node.dataset_size = None  # it may have been asked for, of all items
        chain[-1].sampler = sampler
        if self.batch_size is None:
            made = made.batch(batch_size, drop_remainder=drop_last)
        return made

    @property
    def takes_epochs(self) -> bool:
        """Whether a sampler of Python can give each epoch another order: not to MindRecord."""
        return not isinstance(_chain(self.dataset)[-1], ds.MindDataset)


def read(dataset: Any) -> Pipeline:
    """Read what a MindSpore data set does.

    Raises:
        DataShardError: it has batches of no fixed size.
        UnsupportedFeatureError: it cannot be sharded; says which part of it, and what can.
    """
    *above, source = _chain(dataset)
    batches = [node for node in above if isinstance(node, engine.BatchDataset)]
    for node in above:
        if not isinstance(node, _ROW_BY_ROW) and node not in batches:
            _refuse(node)
    if len(batches) > 1:
        raise UnsupportedFeatureError("the data set makes batches of batches; let it make one kind")
    _check_source(source)
    size = batches[0].batch_size if batches else None
    if size is not None and (batches[0].batch_size_func is not None or size < 1):
        raise DataShardError(
            "the data set's batches have no fixed size, and ranks need the same in every batch; "
            "give batch a number"
        )
    length = _length(source)
    order = samplers.read(source.sampler, length, type(source).__qualname__)
    return Pipeline(
        dataset=dataset,
        length=length if order.items is None else len(order.items),
        order=order,
        batch_size=size,
        drop_last=bool(batches[0].drop_remainder) if batches else None,
    )


def _chain(dataset: Any) -> list[Any]:
    """The data set and what it is made from, down to its source."""
    found = [dataset]
    while found[-1].children:
        if len(found[-1].children) > 1:
            _refuse(found[-1])
        found.append(found[-1].children[0])
    return found


def _check_source(source: Any) -> None:
    name = type(source).__qualname__
    if not isinstance(source, engine.MappableDataset):
        raise UnsupportedFeatureError(
            f"a {name} cannot be read at chosen places. MindSpore deals its rows to ranks in its "
            "own way; give a data set with a sampler (GeneratorDataset, ImageFolderDataset, "
            "MindDataset, ...), or an iterable of Python"
        )
    if isinstance(source, ds.GeneratorDataset):
        if source.has_batch_sampler:
            raise UnsupportedFeatureError(
                f"the {name} has a batch_sampler; give it without, and batch_size= to shard"
            )
        if not hasattr(source.source, "__getitem__"):
            raise UnsupportedFeatureError(
                f"the {name} is made of an iterable; give that to shard itself, every rank then "
                "reads it whole and keeps its part"
            )


def _length(source: Any) -> int:
    if isinstance(source, ds.GeneratorDataset):
        return len(source.source)  # of none, MindSpore makes an error
    whole = copy.deepcopy(source)
    whole.parent = []
    whole.dataset_size = None
    whole.sampler = ds.SequentialSampler()
    return int(whole.get_dataset_size())


def _refuse(node: Any) -> None:
    name = type(node).__qualname__
    hint = _HINTS.get(name, "give the data set as it is before that")
    raise UnsupportedFeatureError(
        f"a data set with a {name} cannot be sharded: {hint}. Allowed over the source are map, "
        "rename, project and one batch"
    )
