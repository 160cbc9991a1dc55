"""A door before an engine: requests are counted while they are inside, and ended when it shuts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from parallelkit.errors import QuarantinedError

#: What a request that was cancelled may take to leave, in seconds.
_LEAVING_SECONDS = 1.0


class TaskDoor:
    """Each asyncio task inside is one request. Belongs to one event loop.

    Shut, it lets nobody in. A request that is still inside a while later is cancelled, so that
    one that was let in and had not reached the engine yet generates nothing either.
    """

    def __init__(self) -> None:
        self.reason = ""
        self.shuts = 0
        self._inside: dict[object, asyncio.Task[object]] = {}
        self._ended: set[object] = set()
        self._left = asyncio.Event()

    @property
    def inside_now(self) -> int:
        """How many requests are inside."""
        return len(self._inside)

    @contextlib.asynccontextmanager
    async def inside(self) -> AsyncIterator[None]:
        """Be inside with the running task.

        Raises:
            QuarantinedError: the door is shut; or it was while inside, and this request was ended.
        """
        if self.reason:
            raise QuarantinedError(self.message)
        task = asyncio.current_task()
        assert task is not None  # in a coroutine there is one
        mine = object()
        self._inside[mine] = task
        try:
            yield
        except asyncio.CancelledError:
            if mine not in self._ended:
                raise
            task.uncancel()
            raise QuarantinedError(self.message) from None
        finally:
            self._inside.pop(mine, None)
            self._ended.discard(mine)
            self._left.set()

    @property
    def message(self) -> str:
        """What a request is told while the door is shut."""
        return (
            f"the engine is quarantined and generates nothing: {self.reason}. The next update "
            "that commits brings it back"
        )

    def shut(self, reason: str) -> None:
        """Let nobody in from now on."""
        self.shuts += 1
        self.reason = reason or "no reason was given"

    def open(self) -> None:
        """Let requests in again."""
        self.reason = ""

    async def empty(self, seconds: float) -> None:
        """Wait so many seconds for those inside to leave, then cancel them."""
        if await self._wait(seconds):
            return
        for entry, task in self._inside.items():
            self._ended.add(entry)
            task.cancel()
        await self._wait(_LEAVING_SECONDS)

    async def _wait(self, seconds: float) -> bool:
        end = asyncio.get_running_loop().time() + seconds
        while self._inside:
            self._left.clear()
            left = end - asyncio.get_running_loop().time()
            if left <= 0:
                return False
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._left.wait(), left)
        return True
