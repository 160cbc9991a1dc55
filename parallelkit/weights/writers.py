"""Which of several subscribers in this process has written a target, or a part of one, last.

Each of them knows the version that it wrote itself. Once another one has written there, that is not
what the target holds, and nothing else would show it.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from parallelkit.errors import WrongThreadError
from parallelkit.weights.overlap import Span, shared

if TYPE_CHECKING:
    from parallelkit.weights.placement import Placement


class _Meeting(NamedTuple):
    """What two writers wrote, and whether some of it is the same memory."""

    ours: Sequence[Span]
    theirs: Sequence[Span]
    met: bool


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
        self._memory: Sequence[Span] = ()
        self._met: weakref.WeakKeyDictionary[Writer, _Meeting] = weakref.WeakKeyDictionary()
        with Writer._lock:
            Writer._all.add(self)

    def writes(self, target: Any, memory: Sequence[Span] = ()) -> None:
        """It writes a target, or has written it.

        Args:
            target: the object.
            memory: where the tensors lie that were written, as far as that is known. Another
                target that has some of it too, such as a part of a model or rows of a tensor, is
                written as well. It is looked through again only where it is another object.
        """
        with Writer._lock:
            self._target, self._memory = target, memory
            self.displaced = ""
            for other in Writer._all:
                if other is self or other._target is None:
                    continue
                if other._target is target or self._meets(other):
                    other.displaced = (
                        f"{self.name}, another subscriber of this process, has written its target "
                        "since, or a part of it; close one of the two"
                    )

    def _meets(self, other: Writer) -> bool:
        """Whether both write some of the same memory."""
        known = self._met.get(other)
        if known is None or known.ours is not self._memory or known.theirs is not other._memory:
            met = shared(self._memory, other._memory)
            known = self._met[other] = _Meeting(self._memory, other._memory, met)
        return known.met

    @contextlib.contextmanager
    def writing(self, placement: Placement) -> Iterator[None]:
        """While a version is placed: whatever comes of it, others have not what they wrote."""
        try:
            yield
        except WrongThreadError:  # before a byte was written
            raise
        except BaseException:
            self.writes(placement.module, placement.memory)
            raise
        self.writes(placement.module, placement.memory)

    def leaves(self) -> None:
        """It writes no more."""
        self._target, self._memory = None, ()
        self._met.clear()
