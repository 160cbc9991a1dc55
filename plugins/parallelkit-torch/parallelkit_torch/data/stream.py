"""One part of an iterable data set, the same with any number of workers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count as numbers
from typing import Any, final

import torch
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from parallelkit.data import check_place, derive_seed
from parallelkit.streams import deal
from parallelkit_torch.data.seeds import Aside


@final
class StreamPart(IterableDataset[Any]):
    """The items of a stream that belong to one data coordinate, in the order of the stream.

    Every rank and worker reads the whole stream, and it has to be the same stream. So while it is
    read, it draws from generators of its own, seeded by seed and epoch, and does not see that
    it is in a loader worker: a data set that would split itself by worker gives all its items.

    Attributes:
        dataset: the data set; its `set_epoch`, if any, is called before each pass, in the process
            that reads it.
        index, count, mode, seed: as of `shard_indices`.
        batch_size: items in a batch, which one worker makes.
    """

    def __init__(
        self,
        dataset: IterableDataset[Any],
        *,
        index: int,
        count: int,
        mode: str,
        seed: int,
        batch_size: int,
        shared: bool,
    ) -> None:
        """`shared` is for workers that live on: they see a new pass through shared memory."""
        self.dataset = dataset
        self.index, self.count = check_place(index, count, mode)
        self.mode, self.seed, self.batch_size = mode, seed, batch_size
        self._pass = torch.zeros(2, dtype=torch.int64)  # epoch, start
        if shared:
            self._pass.share_memory_()  # type: ignore[no-untyped-call]

    def begin(self, epoch: int, start: int) -> None:
        """Set the pass that `__iter__` gives from now on, in all processes."""
        self._pass[0], self._pass[1] = epoch, start

    def __iter__(self) -> Iterator[Any]:
        epoch, start = self._pass.tolist()
        info = get_worker_info()
        inside = _Inside(derive_seed(self.seed, epoch))
        inside.enter()
        try:
            set_epoch(self.dataset, epoch)
            mine = deal(
                self.dataset,
                index=self.index,
                count=self.count,
                mode=self.mode,
                start=start,
                batch_size=self.batch_size,
                worker=info.id if info else 0,
                workers=info.num_workers if info else 1,
            )
            for number in numbers():
                inside.enter()
                try:
                    item = next(mine)
                except StopIteration:
                    return
                # Within a batch nobody but the loader has the items; then comes collate_fn.
                if (number + 1) % self.batch_size == 0:
                    inside.leave()
                yield item
        finally:
            inside.leave()


def set_epoch(dataset: object, epoch: int) -> None:
    """Pass the epoch on to a data set that has a method for it."""
    method = getattr(dataset, "set_epoch", None)
    if callable(method):
        method(epoch)


class _Inside:
    """What the code of a stream sees while it runs: its own generators, and no loader worker."""

    def __init__(self, seed: int) -> None:
        self._generators = Aside(seed)
        self._info: Any = None

    def enter(self) -> None:
        self._generators.enter()
        # torch has no public way; a name imported by the data set reads this variable too
        self._info = torch_worker._worker_info or self._info
        torch_worker._worker_info = None

    def leave(self) -> None:
        self._generators.leave()
        if self._info is not None:
            torch_worker._worker_info = self._info
