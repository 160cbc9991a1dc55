"""Which of several subscribers in this process has written a target, or a part of one, last.

Each of them knows the version that it wrote itself. Once another one has written there, that is not
what the target holds, and nothing else would show it.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from parallelkit.errors import WrongThreadError
from parallelkit.weights.buckets import overlapping
from parallelkit.weights.regions import Bytes

if TYPE_CHECKING:
    from parallelkit.weights.placement import Placement


class Writer:
    """One subscriber, as a writer of its target.

    Attributes:
        name: for messages.
        displaced: what is wrong since another one wrote the same target; empty while nothing is.
    """

    _all: ClassVar[weakref.WeakSet[Writer]] = weakref.WeakSet()
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, name: str) -> None:
        self.name = name
        self.displaced = ""
        self._target: Any = None
        self._written: Sequence[Bytes] = ()
        with Writer._lock:
            Writer._all.add(self)

    def writes(self, target: Any, memory: Sequence[Bytes] = ()) -> None:
        """It writes a target, or has written it.

        Args:
            target: the object; memory: those of its tensors that were written in place, which
                have no bytes in common. Another target that has some of them too, such as a part
                of a model or rows of a tensor, is written as well.
        """
        with Writer._lock:
            self._target, self._written = target, memory
            self.displaced = ""
            for other in Writer._all:
                if other is self or other._target is None:
                    continue
                if other._target is target or overlapping((*memory, *other._written)):
                    other.displaced = (
                        f"{self.name}, another subscriber of this process, has written its target "
                        "since, or a part of it; close one of the two"
                    )

    @contextlib.contextmanager
    def writing(self, placement: Placement) -> Iterator[None]:
        """While a version is placed: whatever comes of it, others have not what they wrote."""
        try:
            yield
        except WrongThreadError:  # before a byte was written
            raise
        except BaseException:
            self.writes(placement.module, placement.written)
            raise
        self.writes(placement.module, placement.written)

    def leaves(self) -> None:
        """It writes no more."""
        self._target, self._written = None, ()
