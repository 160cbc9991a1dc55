"""Which of several subscribers in this process has written a target, or a part of one, last.

Each of them knows the version that it wrote itself. Once another one has written there, that is not
what the target holds, and nothing else would show it. And no two write the same memory at one time,
nor one while the other's user holds it.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from parallelkit.errors import StateError
from parallelkit.weights.overlap import Span, shared

if TYPE_CHECKING:
    from parallelkit.weights.placing import Placing
    from parallelkit.weights.turns import Turns


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

    def __init__(self, name: str, turns: Turns | None = None) -> None:
        """
        Args:
            name: for messages.
            turns: by which it is known whether its user holds the target.
        """
        self.name = name
        self.displaced = ""
        self._turns = turns
        self._busy = False
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
            self._displace()

    def _displace(self) -> None:
        self.displaced = ""
        for other in self._others():
            other.displaced = (
                f"{self.name}, another subscriber of this process, has written its target "
                "since, or a part of it; close one of the two"
            )

    def _others(self) -> list[Writer]:
        """Those whose target is the same, or has some of the same memory."""
        known = [other for other in Writer._all if other is not self and other._target is not None]
        return [o for o in known if o._target is self._target or self._meets(o)]

    def _meets(self, other: Writer) -> bool:
        """Whether both write some of the same memory."""
        known = self._met.get(other)
        if known is None or known.ours is not self._memory or known.theirs is not other._memory:
            met = shared(self._memory, other._memory)
            known = self._met[other] = _Meeting(self._memory, other._memory, met)
        return known.met

    def claims(self, target: Any, memory: Sequence[Span] = ()) -> None:
        """It is about to write a target: see `writes` for the arguments.

        Raises:
            StateError: another one writes some of it at this moment, or its user holds it.
        """
        with Writer._lock:
            before = self._target, self._memory
            self._target, self._memory = target, memory
            for other in self._others():
                holds = other._holds()
                if holds:
                    self._target, self._memory = before
                    raise StateError(
                        f"{other.name}, another subscriber of this process, {holds} this target, "
                        "or a part of it, at this moment; close one of the two"
                    )
            self._busy = True
            self._displace()

    @contextlib.contextmanager
    def writing(self, placement: Placing) -> Iterator[None]:
        """While a version is placed: whatever comes of it, others have not what they wrote.

        Unless it never claimed the target, such as in the wrong thread: nothing was written then.
        """
        try:
            yield
        finally:
            if self._busy:
                self.writes(placement.module, placement.memory)
            self._busy = False

    def leaves(self) -> None:
        """It writes no more."""
        self._target, self._memory = None, ()
        self._met.clear()

    def _holds(self) -> str:
        """What it does with its target at this moment; empty for nothing."""
        if self._busy:
            return "writes"
        return "has in use" if self._turns is not None and self._turns.in_use else ""
