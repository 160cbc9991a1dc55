"""What `publisher.attach` gives: for engines of this process's own, to generate with.

A handle refuses while its engine is quarantined. The `LLM` or `AsyncLLM` itself knows nothing of
that: whoever uses it past the handle may get tokens of weights that are of no version.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any, Final

from parallelkit.errors import QuarantinedError, UpdateTimeoutError
from parallelkit_vllm.door import TaskDoor

#: How long a call of a handle waits for others to end, in seconds.
PATIENCE_SECONDS: Final = 600.0


class Handle:
    """What every handle says of its engine.

    Attributes:
        name: in reports.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._version = 0
        self._reason = ""

    @property
    def version(self) -> int:
        """The version that was put in place last; 0 for the checkpoint's own weights."""
        return self._version

    @property
    def state(self) -> str:
        """`serving` or `quarantined`."""
        return "quarantined" if self.reason else "serving"

    @property
    def reason(self) -> str:
        """Why it is quarantined."""
        return self._reason

    def __repr__(self) -> str:
        return f"<{self.name}: {self.state}, version {self.version}>"


class OfflineHandle(Handle):
    """An `LLM`, with which one thread at a time generates, and nobody during an update.

    Attributes:
        name: in reports; llm: the engine, unguarded.
        patience: seconds that `generate` waits for another call, or for an update.
    """

    def __init__(self, name: str, llm: Any) -> None:
        super().__init__(name)
        self.llm = llm
        self.patience = PATIENCE_SECONDS
        self._changed = threading.Condition()
        self._holder = ""
        self._shuts = 0

    def generate(self, *args: Any, **options: Any) -> Any:
        """`LLM.generate`, by the weights of one version from beginning to end.

        Raises:
            QuarantinedError: the weights are of no version.
            UpdateTimeoutError: an update, or another call, did not end within `patience` seconds.
        """
        with self._generating():
            return self.llm.generate(*args, **options)

    def chat(self, *args: Any, **options: Any) -> Any:
        """`LLM.chat`; raises as `generate` does."""
        with self._generating():
            return self.llm.chat(*args, **options)

    @contextlib.contextmanager
    def _generating(self) -> Iterator[None]:
        self._refuse_if_quarantined()
        self.take("generate", self.patience)
        try:
            self._refuse_if_quarantined()  # an update that came before may have failed
            yield
        finally:
            self.give_up("generate")

    def _refuse_if_quarantined(self) -> None:
        if self._reason:
            raise QuarantinedError(
                f"{self.name} is quarantined and generates nothing: {self._reason}. The next "
                "update that commits brings it back"
            )

    # --- for the client

    def take(self, holder: str, seconds: float) -> None:
        """Have the engine alone.

        Raises:
            UpdateTimeoutError: somebody else has it, and did not end within so many seconds.
        """
        deadline = time.monotonic() + seconds
        with self._changed:
            while self._holder:
                left = deadline - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    raise UpdateTimeoutError(
                        f"{self.name}: {holder} waited {seconds:.3g} s for {self._holder} to end; "
                        "an AsyncLLM or a server generates and takes updates at the same time",
                        missing=[self.name],
                    )
            self._holder = holder

    def give_up(self, holder: str) -> None:
        """Let others have the engine, if `holder` has it."""
        with self._changed:
            if self._holder == holder:
                self._holder = ""
                self._changed.notify_all()

    @property
    def shuts(self) -> int:
        """How often it was shut; see `moved`."""
        return self._shuts

    def shut(self, reason: str) -> None:
        """Refuse to generate from now on. Called from any thread."""
        with self._changed:
            self._shuts += 1
            self._reason = reason or "no reason was given"

    async def empty(self, seconds: float) -> None:
        """Nobody is inside: an update has the engine alone."""

    def moved(self, version: int, shuts: int) -> None:
        """It is at this version. It generates again, unless it was shut since `shuts` was read."""
        with self._changed:
            self._version = version
            if self._shuts == shuts:
                self._reason = ""


class AsyncHandle(Handle):
    """An `AsyncLLM`, which generates also while it takes updates.

    Attributes:
        name: in reports; engine: the `AsyncLLM`, unguarded.
    """

    def __init__(self, name: str, engine: Any, door: TaskDoor) -> None:
        super().__init__(name)
        self.engine = engine
        self._door = door

    @property
    def reason(self) -> str:
        """Why it is quarantined."""
        return self._door.reason

    async def generate(self, *args: Any, **options: Any) -> AsyncIterator[Any]:
        """`AsyncLLM.generate`; use it on the engine's loop.

        An update may come in between. With `pause="keep"` the request goes on with the new
        weights, and `weight_versions` of what it yields says which tokens are of which version.

        Raises:
            QuarantinedError: the weights are of no version; or they came to be while this request
                was under way, which was ended.
        """
        async with self._door.inside():
            async with contextlib.aclosing(self.engine.generate(*args, **options)) as outputs:
                async for output in outputs:
                    yield output

    def moved(self, version: int) -> None:
        """(for the client) It is at this version."""
        self._version = version
