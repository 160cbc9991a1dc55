"""How far a pass is: counted as batches reach the loop, apart from what makes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, final

import attrs

from parallelkit.datastate import LoaderState


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
