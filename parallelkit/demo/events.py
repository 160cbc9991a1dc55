"""What the demo's processes tell the one that started them: a JSON object a line, on stdout."""

from __future__ import annotations

import sys
from typing import Any, Final

import msgspec


class Started(msgspec.Struct, tag=True, forbid_unknown_fields=True, frozen=True):
    """A trainer: the group is open. `explanation` says what was chosen."""

    parameters: int
    characters: int
    explanation: str


class TicketReady(msgspec.Struct, tag=True, forbid_unknown_fields=True, frozen=True):
    """The trainer: a follower can join."""

    ticket: str


class Starting(msgspec.Struct, tag=True, forbid_unknown_fields=True, frozen=True):
    """The engine: it is not ready yet, and lives."""

    seconds: float


class EngineReady(msgspec.Struct, tag=True, forbid_unknown_fields=True, frozen=True):
    """The engine: it can be attached at `url`, with `token`; `name` says what it is."""

    url: str
    token: str
    name: str


class Step(msgspec.Struct, tag=True, forbid_unknown_fields=True, frozen=True):
    """The trainer: one optimiser step is done. `loss` is the mean over ranks, in nats."""

    step: int
    loss: float


class Likeliest(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The likeliest tokens after the prompt, `GREEDY` of them.

    Attributes:
        tokens: each after those before.
        logprobs: the logarithm of each one's probability.
        margins: by how much each was likelier than the next, in logits; the trainer's only.
    """

    tokens: list[int]
    logprobs: list[float]
    margins: list[float] = []


class Updated(msgspec.Struct, tag=True, forbid_unknown_fields=True, frozen=True):
    """The trainer: a version is committed.

    Attributes:
        step: optimiser steps before it.
        report: `TransferReport.to_dict()`.
        validation: loss on the held-out batch, in nats.
        digest: SHA-256 of the bytes of the logits of that batch.
        logits: the bytes themselves, float32, with the last version only.
        likeliest: with an engine, what it has to generate.
    """

    step: int
    version: int
    report: dict[str, Any]
    validation: float
    digest: str
    logits: bytes = b""
    likeliest: Likeliest | None = None


class Followed(msgspec.Struct, tag=True, forbid_unknown_fields=True, frozen=True):
    """The follower: a version is live there; `digest` and `logits` as in `Updated`.

    Attributes:
        likeliest: of an engine, instead of logits.
        written: tokens that it has generated since the version before, of all requests.
        gap: the longest time between two tokens of one request in that time, in seconds.
    """

    version: int
    sample: str
    digest: str = ""
    logits: bytes = b""
    likeliest: Likeliest | None = None
    written: int = 0
    gap: float = 0.0


class Finished(msgspec.Struct, tag=True, forbid_unknown_fields=True, frozen=True):
    """The trainer: the last version is committed and the publisher closed."""


Event = Started | TicketReady | Starting | EngineReady | Step | Updated | Followed | Finished

_ENCODER: Final = msgspec.json.Encoder()
_DECODER: Final[msgspec.json.Decoder[Event]] = msgspec.json.Decoder(Event)


def say(event: Event) -> None:
    """Write one event to standard output, at once."""
    sys.stdout.buffer.write(_ENCODER.encode(event) + b"\n")
    sys.stdout.buffer.flush()


def read(line: bytes) -> Event | None:
    """Decode a line; None for anything else that a library may have printed."""
    try:
        return _DECODER.decode(line)
    except msgspec.MsgspecError:
        return None
