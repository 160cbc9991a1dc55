"""One part of an iterable, in batches that are made in this thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, final

import attrs
import mindspore as ms
import numpy as np

from parallelkit.data import derive_seed
from parallelkit.errors import DataShardError
from parallelkit.streams import deal
from parallelkit_mindspore.data.columns import names_of, row_of
from parallelkit_mindspore.data.seeds import Aside


@final
@attrs.frozen(eq=False, kw_only=True)
class Stream:
    """The items of a stream that belong to one data coordinate, in the order of the stream.

    Every rank reads the whole stream, and it has to be the same stream. So while it is read,
    it draws from generators of `random` and NumPy of its own, seeded by seed and epoch. That is
    why it is not given to MindSpore's pipeline, whose threads run beside the caller's.

    Attributes:
        source: what is iterated, or a function that gives it.
        index, count, mode, seed: as of `parallelkit.data.shard_indices`.
        names: of the columns; None for those of the first item.
    """

    source: Iterable[Any] | Callable[[], Iterable[Any]]
    index: int
    count: int
    mode: str
    seed: int
    names: tuple[str, ...] | None

    def batches(
        self, epoch: int, start: int, *, batch_size: int, drop_last: bool, as_dict: bool
    ) -> Iterator[Any]:
        """Yield batches of what comes from position `start` on.

        Raises:
            DataShardError: items cannot be put into one batch, or with `"drop"`, there are
                fewer items than parts.
        """
        aside = Aside(derive_seed(self.seed, epoch))
        names = self.names
        with aside.inside():
            items = self.source() if callable(self.source) else self.source
            mine = deal(items, index=self.index, count=self.count, mode=self.mode, start=start)
        while True:
            with aside.inside():
                taken = list(islice(mine, batch_size))
            if not taken or (drop_last and len(taken) < batch_size):
                return
            names = names or names_of(taken[0])
            columns = zip(*(row_of(item, names) for item in taken), strict=True)
            made = [_tensor(name, list(rows)) for name, rows in zip(names, columns, strict=True)]
            yield dict(zip(names, made, strict=True)) if as_dict else made


def _tensor(name: str, rows: list[Any]) -> Any:
    try:
        array = np.stack(rows)
    except ValueError:
        shapes = ", ".join(sorted({str(list(row.shape)) for row in rows}))
        raise DataShardError(
            f"items of a batch have other shapes in column {name!r}: {shapes}; make them alike, "
            "or take batch_size=1"
        ) from None
    return array if array.dtype.kind in "US" else ms.Tensor.from_numpy(array)
