"""An inference engine in this process that can be made to fail: its workers are subscribers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from parallelkit.errors import QuarantinedError, UpdateTimeoutError
from parallelkit.specs import EngineCommit
from parallelkit.testing.brittle import BrittleArrays
from parallelkit.testing.peer import sample_model, values
from parallelkit.weights import WeightSubscriber, subscribe_weights

Upset = Callable[[], None]


class FakeEngine:
    """An `EngineClient`, its own handle, and the engine.

    Attributes:
        said: the calls that the publisher made, in order, such as `begin 1`.
        upsets: what a call does first, by its name (`init`, `begin`, `commit`, `abort`,
            `quarantine`): raise, sleep. Stays until removed.
        reason: why it is quarantined, or "".
        workers, models: one subscriber and its arrays for each worker, once attached.
    """

    def __init__(
        self,
        name: str = "engine",
        workers: int = 2,
        *,
        model: Callable[[], BrittleArrays] | None = None,
        absent: Sequence[int] = (),
    ) -> None:
        """
        Args:
            model: makes what a worker holds.
            absent: workers that do not join.
        """
        self.name = name
        self.members = workers
        self.said: list[str] = []
        self.upsets: dict[str, Upset] = {}
        self.reason = ""
        self.paused = self.closed = False
        self.workers: list[WeightSubscriber] = []
        self.models: list[BrittleArrays] = []
        self._absent = set(absent)
        self._make = model or (lambda: BrittleArrays(sample_model().arrays))
        self._lock = threading.Lock()
        self._quarantines = 0
        self._version = 0

    @property
    def handle(self) -> FakeEngine:
        return self

    def generate(self) -> set[float]:
        """The values in all workers: one where the engine is of one version.

        Raises:
            QuarantinedError: the engine is quarantined.
        """
        if self.reason:
            raise QuarantinedError(f"{self.name}: {self.reason}")
        return {value for model in self.models for value in values(model)}

    def init(self, ticket: str, *, timeout: float) -> None:
        self._say("init")
        for member in range(self.members):
            if member in self._absent:
                continue
            model = self._make()
            worker = subscribe_weights(model, ticket, member=member, timeout=timeout)
            worker.serve()
            self.workers.append(worker)
            self.models.append(model)

    def begin(self, version: int, *, timeout: float) -> None:
        self._say(f"begin {version}")

    def commit(self, version: int, *, timeout: float) -> EngineCommit:
        deadline, before = time.monotonic() + timeout, self._quarantines
        began, self.paused = time.monotonic(), True
        try:
            self._say(f"commit {version}")
            for worker in self.workers:
                if worker.step(max(deadline - time.monotonic(), 0.0)) != version:
                    raise UpdateTimeoutError(f"{worker.name} holds no version {version}")
        finally:
            self.paused = False
        with self._lock:
            if self._quarantines == before:
                self.reason = ""
            self._version = version
        return EngineCommit(
            pause_seconds=time.monotonic() - began, cache="reset", weight_version=str(version)
        )

    def abort(self, version: int, reason: str, *, timeout: float) -> None:
        self._say(f"abort {version}")

    def quarantine(self, reason: str) -> None:
        with self._lock:
            self.reason, self._quarantines = reason, self._quarantines + 1
        self._say("quarantine")

    def version(self, *, timeout: float) -> int:
        return self._version

    def close(self) -> None:
        self.closed = True
        self._say("close")

    def end(self) -> None:
        """The engine's process ends."""
        for worker in self.workers:
            worker.close()

    def _say(self, what: str) -> None:
        self.said.append(what)
        self.upsets.get(what.partition(" ")[0], lambda: None)()
