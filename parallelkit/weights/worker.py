"""A publisher's rank other than 0: it hands its own parts out, and does what rank 0 asks."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from parallelkit.protocols import WeightSource
from parallelkit.weights.collective import Crew, Message
from parallelkit.weights.exporter import Exporter
from parallelkit.weights.orders import Kinds, Opening, Staging, do_together, open_exporter, staged


class Worker:
    """Opens an arena where the rank hands parts out, and stages into it."""

    def __init__(self, source: WeightSource, crew: Crew, options: dict[str, object]) -> None:
        self._source = source
        self._crew = crew
        self._options = options
        self._kinds = Kinds()
        self._exporter: Exporter | None = None
        self._staged_version = 0

    def follow(self, seconds: float) -> tuple[Message, BaseException | None]:
        """Do what rank 0 asks until it says how its call ended, for at most so many seconds.

        Returns:
            The outcome, and this rank's own error if it is part of it.

        Raises:
            PeerLostError, UpdateTimeoutError: rank 0, or a rank that it waits for, is gone or too
                slow; the group is broken.
            RankMismatchError: rank 0 is in another call.
        """
        deadline = time.monotonic() + seconds
        problem: BaseException | None = None
        try:
            while True:
                said = self._crew.hear(max(deadline - time.monotonic(), 0.01))
                if "open" in said:
                    opening = Opening(**said["open"])
                    work = partial(self._open, opening)
                    _, problem = do_together(self._crew, work, opening.seconds)
                elif "orders" in said:
                    staging = Staging(**said["orders"])
                    work = partial(self._stage, staging)
                    _, problem = do_together(self._crew, work, staging.seconds)
                else:
                    break
        except BaseException:
            self._void()
            raise
        if problem is not None and not isinstance(problem, Exception):
            raise problem  # an interrupt, now that the others know
        self._settle(said)
        return said, problem

    def close(self) -> None:
        """Drop the arena; harmless when repeated."""
        if self._exporter is not None:
            self._exporter.close()

    def _open(self, opening: Opening) -> Message:
        self._exporter, post = open_exporter(
            self._source, self._source.manifest(), self._crew.rank, opening, self._options
        )
        return post.to_plain()

    def _stage(self, staging: Staging) -> Message:
        assert self._exporter is not None
        needs = self._kinds.read(self._source.manifest(), staging)
        self._exporter.arena.advance(staging.epoch)
        self._source.begin()
        hashed = self._exporter.stage(needs, staging.slot, staging.verify, staging.version)
        self._staged_version = staging.version
        return staged(hashed)

    def _settle(self, outcome: dict[str, Any]) -> None:
        """Be where rank 0 is: at its epoch, and with its last committed version."""
        if self._exporter is None:
            return
        self._exporter.arena.advance(int(outcome.get("epoch", 0)))
        if self._staged_version and outcome["version"] == self._staged_version:
            self._exporter.committed()
        else:
            self._exporter.void()
        self._staged_version = 0

    def _void(self) -> None:
        """The outcome is unknown: nobody may use what was staged any more."""
        if self._exporter is not None:
            self._exporter.bump()
