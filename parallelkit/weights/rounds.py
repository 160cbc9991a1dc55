"""What a subscriber says to its publisher within an update, and hears from it."""

from __future__ import annotations

import contextlib
import time
from typing import Any, Final

import attrs

from parallelkit.errors import (
    ParallelKitError,
    PeerLostError,
    ProtocolError,
    UpdateAbortedError,
    UpdateTimeoutError,
)
from parallelkit.weights import messages as m
from parallelkit.weights.client import ControlClient
from parallelkit.weights.placing import Fetch

#: A subscriber waits this much longer than the publisher, whose word on a deadline comes first.
_GRACE_SECONDS: Final = 1.0


@attrs.frozen
class Round:
    """The update that this subscriber takes part in."""

    version: int
    epoch: int
    slot: int
    timeout: float

    def fetch(self) -> Fetch:
        """What its bytes are fetched by, from now on."""
        deadline = time.monotonic() + self.timeout
        return Fetch(self.version, self.epoch, self.slot, deadline)


class Superseded(Exception):
    """Another update began instead; `round` is that."""

    def __init__(self, newer: Round) -> None:
        super().__init__(f"version {newer.version} began instead")
        self.round = newer


class Talk:
    """The messages of updates, over the control channel. Used by one thread at a time."""

    def __init__(self, client: ControlClient, session: bytes) -> None:
        self._client = client
        self._session = session

    def await_begin(self, deadline: float) -> Round | None:
        """Wait until the publisher begins an update; None if it does not until the deadline."""
        while True:
            message = self._client.receive(deadline)
            if message is None:
                return None
            if isinstance(message, m.Begin):
                return _round(message)
            self._refuse_close(message)
            # Anything else belongs to an update that we are no longer in.

    def await_next(self, update: Round, kind: type[Any], what: str, live: int) -> Any:
        """Wait for one message of this update.

        Args:
            kind: of which type; what: what it is, for people.
            live: the version that stays if the update is called off.

        Raises:
            Superseded: the publisher dropped this round, and began another.
            UpdateAbortedError: it called it off.
            UpdateTimeoutError, PeerLostError: it is silent, or gone.
        """
        deadline = time.monotonic() + update.timeout + _GRACE_SECONDS
        while True:
            message = self._client.receive(deadline)
            if message is None:
                raise UpdateTimeoutError(
                    f"the {self._client.peer} sent no {what} of version "
                    f"{update.version} within {update.timeout:g} s",
                    missing=[self._client.peer],
                )
            if self._concerns(message, update, live):
                if isinstance(message, kind):
                    return message
                raise ProtocolError(f"{type(message).__name__} while waiting for the {what}")

    def hear_why(self, update: Round, live: int) -> None:
        """The bytes are gone: raise what the publisher says of that, if it says anything soon."""
        deadline = time.monotonic() + _GRACE_SECONDS
        while True:
            message = self._client.receive(deadline)
            if message is None:
                return
            self._concerns(message, update, live)

    def answer(self, kind: type[Any], update: Round, **fields: Any) -> Any:
        """A message of this update, from this member."""
        return kind(session=self._session, version=update.version, epoch=update.epoch, **fields)

    def say(self, kind: type[Any], update: Round, **fields: Any) -> None:
        """Send one.

        Raises:
            PeerLostError: the publisher is gone.
        """
        self._client.send(self.answer(kind, update, **fields))

    def failed(self, update: Round, phase: str, error: BaseException) -> None:
        """Say that this member could not do its part, if anybody is there to hear it."""
        with contextlib.suppress(ParallelKitError):
            name, text = type(error).__name__, m.clip(str(error))
            self.say(m.Failed, update, phase=phase, error=name, message=text)

    def leave(self) -> None:
        """Say that this member closes."""
        with contextlib.suppress(ParallelKitError):
            self._client.send(m.Leave(session=self._session))

    def _concerns(self, message: Any, update: Round, live: int) -> bool:
        """Whether a message is of this update; raises if it ends the update."""
        self._refuse_close(message)
        if isinstance(message, m.Begin) and message.epoch > update.epoch:
            raise Superseded(_round(message))
        if getattr(message, "epoch", None) != update.epoch:
            return False
        if isinstance(message, m.Abort):
            raise UpdateAbortedError(
                f"the publisher aborted version {update.version}: {message.reason}; version "
                f"{live} stays"
            )
        return True

    def _refuse_close(self, message: Any) -> None:
        if isinstance(message, m.Close):
            peer = self._client.peer
            text = f"the {peer} ended this subscription: {message.reason}"
            raise PeerLostError(text, peers=[peer])
        if isinstance(message, m.Refused):
            raise m.error_of(message)


def _round(message: m.Begin) -> Round:
    return Round(message.version, message.epoch, message.slot, min(message.timeout, 86400.0))
