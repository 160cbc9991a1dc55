"""What a guard and its client say to each other: JSON bodies, typed and bounded."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec

from parallelkit import errors
from parallelkit.errors import EngineError, ProtocolError, WeightTransferError
from parallelkit.plugin import EngineCommit

#: Of the routes and bodies below; a guard tells its own.
GUARD_PROTOCOL: Final = 1
PREFIX: Final = "/parallelkit"
TOKEN_VARIABLE: Final = "PARALLELKIT_ENGINE_TOKEN"
TOKEN_CHARACTERS: Final = 16
MAX_BODY: Final = 16 * 1024
#: What a guard calls its engine; a client puts the name that the user knows.
ENGINE: Final = "the engine behind this server"

Owner = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=86400)]
Version = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
Reason = Annotated[str, msgspec.Meta(max_length=2000)]


class Body(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of a request. `owner` is the publisher's number, drawn by its client, no secret."""

    owner: Owner


class InitBody(Body, frozen=True, kw_only=True):
    """The workers join with this ticket."""

    ticket: Annotated[str, msgspec.Meta(min_length=1, max_length=8192)]
    timeout: Seconds


class BeginBody(Body, frozen=True, kw_only=True):
    """An update is about to begin; it is forgotten after `lease` seconds."""

    version: Version
    lease: Seconds


class CommitBody(Body, frozen=True, kw_only=True):
    """Put the version that every worker staged in place, within `timeout` seconds."""

    version: Version
    timeout: Seconds
    cache: Literal["reset", "keep"] = "reset"
    pause: Literal["keep", "wait", "abort"] = "keep"


class AbortBody(Body, frozen=True, kw_only=True):
    """The update that was begun is called off."""

    version: Version
    reason: Reason = ""


class QuarantineBody(Body, frozen=True, kw_only=True):
    """Generate nothing until a later commit works."""

    reason: Reason


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """How the engine behind a guard is.

    `state` is `serving`, `quarantined` or `dead`. `version` is what the present owner committed,
    0 for nothing. `weight_version` is what the engine itself says, None if it did not answer.
    """

    guard: int
    parallelkit: Annotated[str, msgspec.Meta(max_length=100)]
    members: Annotated[int, msgspec.Meta(ge=1, le=2**20)]
    state: Literal["serving", "quarantined", "dead"]
    reason: Annotated[str, msgspec.Meta(max_length=8192)] = ""
    version: Annotated[int, msgspec.Meta(ge=0)] = 0
    weight_version: Annotated[str, msgspec.Meta(max_length=1000)] | None = None
    owner: str = ""
    under_way: Annotated[str, msgspec.Meta(max_length=1000)] = ""
    requests: int = 0


class Committed(msgspec.Struct, frozen=True, kw_only=True):
    """`parallelkit.plugin.EngineCommit`, on its way."""

    pause_seconds: Annotated[float, msgspec.Meta(ge=0)]
    cache: Literal["reset", "kept"]
    weight_version: Annotated[str, msgspec.Meta(max_length=1000)] = ""
    notes: Annotated[list[str], msgspec.Meta(max_length=100)] = []

    def as_commit(self) -> EngineCommit:
        """That, as it is given to the publisher."""
        return EngineCommit(
            pause_seconds=self.pause_seconds,
            cache=self.cache,
            weight_version=self.weight_version,
            notes=tuple(self.notes),
        )


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong, in the form of OpenAI's errors; `type` is the name of an error class."""

    message: str
    type: str = ""
    step: str = ""
    code: int = 0


class ProblemBody(msgspec.Struct, frozen=True, kw_only=True):
    error: Problem


#: Errors that a client raises as the class that they had in the server; others are `EngineError`.
_KNOWN: Final = (
    "EngineCommitError",
    "EngineTokenError",
    "PeerLostError",
    "ProtocolError",
    "QuarantinedError",
    "StateError",
    "TicketError",
    "UpdateTimeoutError",
    "VersionError",
)


def decode(data: bytes, kind: type[Any], what: str) -> Any:
    """Check JSON against a struct.

    Raises:
        ProtocolError: it is not JSON, lacks a field, or has one too many or of another kind.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"{what}: {error}") from error


def error_of(data: bytes, status: int, name: str) -> WeightTransferError:
    """Rebuild the error that a response of some other status than 200 tells.

    Args:
        name: of the engine, put in the place of what the guard calls it, or first.
    """
    try:
        problem = msgspec.json.decode(data, type=ProblemBody).error
    except (msgspec.MsgspecError, UnicodeDecodeError):
        text = data[:200].decode("utf-8", "replace").strip()
        return EngineError(f"{name} answered HTTP {status}: {ascii(text) if text else 'no text'}")
    text = problem.message[:4000]
    text = text.replace(ENGINE, name) if ENGINE in text else f"{name}: {text}"
    if problem.type not in _KNOWN:
        return EngineError(f"{text} (HTTP {status})")
    kind = getattr(errors, problem.type)
    if problem.type == "EngineCommitError":
        return errors.EngineCommitError(text, step=problem.step[:100])
    if problem.type == "PeerLostError":
        return errors.PeerLostError(text, peers=[name])
    if problem.type == "UpdateTimeoutError":
        return errors.UpdateTimeoutError(text, missing=[name])
    return kind(text)  # type: ignore[no-any-return]
