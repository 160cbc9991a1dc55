"""Rank 0's side of a trainer's updates: how the follower joins, and what is said of a version."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, Final

import parallelkit as pk
from parallelkit.demo.config import Settings
from parallelkit.demo.events import Likeliest, TicketReady, Updated, say
from parallelkit.demo.process import Parent

#: Starting an engine may take a minute on a busy machine; it is ready before a trainer starts.
_ENGINE_SECONDS: Final = 60.0
#: Shorter than the time limit of the other ranks, which wait for rank 0 meanwhile.
_SHARE: Final = 0.7


class Lead:
    """What rank 0 of a trainer does for its follower; the other ranks have none."""

    def __init__(self, settings: Settings, parent: Parent, publisher: pk.WeightPublisher) -> None:
        """Let the follower join: by a ticket, or by attaching the engine that the parent names."""
        self._settings = settings
        self._parent = parent
        if settings.engine == "module":
            say(TicketReady(publisher.ticket))
            return
        url, token = json.loads(parent.line(_ENGINE_SECONDS, "address of the engine"))
        publisher.attach(url, token=token, name="engine")

    def before(self, step: int) -> None:
        """Wait until the version before was seen: an engine generates whenever it likes.

        With the demo's own settings that was long ago. Every version is so shown and compared.
        """
        if self._settings.engine == "vllm" and step > 0:
            seconds = self._settings.timeout * _SHARE
            self._parent.line(seconds, "word that the engine's text at the last version was seen")

    def after(
        self,
        step: int,
        report: pk.TransferReport,
        logits: bytes,
        loss: float,
        *,
        digest: str,
        likeliest: Callable[[], Likeliest],
    ) -> None:
        """Say that a version is committed; the last one with its logits.

        For an engine also what it has to generate, which `likeliest` finds out.
        """
        say(
            Updated(
                step=step,
                version=report.version,
                report=report.to_dict(),
                validation=loss,
                digest=digest,
                logits=logits if step == self._settings.steps else b"",
                likeliest=likeliest() if self._settings.engine == "vllm" else None,
            )
        )


def endless(loader: Any) -> Iterator[Any]:
    """Go through a context's loader again and again, in another order each epoch."""
    epoch = 0
    while True:
        loader.set_epoch(epoch)
        yield from loader
        epoch += 1
