"""What the loaders of all frameworks share: checks of arguments, and how far a pass is.

A pass is counted as batches reach the loop, apart from what makes them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, final

import attrs

from parallelkit.datastate import LoaderState
from parallelkit.errors import DataShardError

#: Seeds and epochs are below this and at least its negative: msgpack and tensors hold them.
_LIMIT: Final = 2**63


@final
@attrs.define(eq=False)
class Progress:
    """What a loader remembers of its latest pass; not the iterator, whose workers end with it.

    Attributes:
        begun: the state from which the pass began.
        given: batches that the loop was given.
        ended: whether it was told that there are no more.
    """

    begun: LoaderState
    given: int = 0
    ended: bool = False

    def state(self, *, count: int, batch_size: int | None, drop_last: bool) -> LoaderState:
        """The state now, as every part of the data has it that is in step with this one."""
        return self.begun.after(
            self.given,
            count=count,
            batch_size=batch_size or 1,
            drop_last=drop_last,
            ended=self.ended or self.begun.finished,
        )


@final
@attrs.define(eq=False)
class Counted(Iterator[Any]):
    """Batches, counted as they are given; `before` is called once before the first is made."""

    _batches: Iterator[Any]
    _progress: Progress
    _before: Callable[[], None] | None = None

    def __next__(self) -> Any:
        if self._before is not None:
            self._before()
            self._before = None
        try:
            batch = next(self._batches)
        except StopIteration:
            self._progress.ended = True
            raise
        self._progress.given += 1
        return batch


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
