"""Whose turn it is with live weights: that of a thread which uses them, or of an update."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Final

import attrs

from parallelkit.errors import StateError

#: A thread that waits for its turn looks so often whether the one that has it still runs.
_LOOK_SECONDS: Final = 0.5


@attrs.frozen(eq=False)
class _Use:
    """One use that has begun, and the thread that began it."""

    thread: threading.Thread


class Turns:
    """A lock of one thread at a time. While it is held as a context, live weights may be written.

    A use does not hold it: it keeps other threads away by being listed. So a use that is left in
    another thread than the one that began it, or never, since its thread has ended, is an error
    there and stops nobody else. Re-entrant, and safe in signal handlers.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.RLock())
        self._uses: list[_Use] = []

    @property
    def in_use(self) -> bool:
        """Whether a use has begun, in this thread or another, and is not over."""
        return any(use.thread.is_alive() for use in list(self._uses))

    def __enter__(self) -> None:
        """Wait until no other thread uses the weights, and keep them from beginning to."""
        self._changed.acquire()
        try:
            while self._others():
                self._changed.wait(_LOOK_SECONDS)
        except BaseException:
            self._changed.release()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._changed.release()

    @contextlib.contextmanager
    def use(self, ready: Callable[[], None]) -> Iterator[None]:
        """Use the weights: until this is left no other thread uses or writes them.

        Args:
            ready: called before, when it is this thread's turn.

        Raises:
            StateError: left in another thread. It is over then, for both.
        """
        mine = _Use(threading.current_thread())
        try:
            with self:
                ready()
                self._uses.append(mine)
            yield
        finally:
            with self._changed:
                if mine in self._uses:
                    self._uses.remove(mine)
                self._changed.notify_all()
        here = threading.current_thread()
        if here is not mine.thread:
            raise StateError(
                f"`with subscriber.use()` was entered in thread {mine.thread.name!r} and left in "
                f"{here.name!r}: the weights may have changed under the first; enter and leave it "
                "in one thread"
            )

    def _others(self) -> bool:
        here = threading.current_thread()
        self._uses[:] = [use for use in self._uses if use.thread.is_alive()]
        return any(use.thread is not here for use in self._uses)
