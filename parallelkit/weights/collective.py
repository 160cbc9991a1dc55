"""What the ranks of one publisher tell each other: what they publish, and how rank 0 failed."""

from __future__ import annotations

from typing import Any, Final

from parallelkit import errors
from parallelkit.errors import (
    ParallelKitError,
    PartialCommitError,
    RankMismatchError,
    UpdateAbortedError,
    WeightTransferError,
)
from parallelkit.protocols import ProcessGroup
from parallelkit.weights.report import TransferReport, report_from_dict


def agree(group: ProcessGroup, mine: str, problem: Exception | None) -> None:
    """Let every rank know what every rank is about to publish; all go on, or none does.

    Collective over `group`.
    """
    said = [str(group.broadcast_object(mine, src)) for src in range(group.world_size)]
    if problem is not None:
        raise problem
    if len(set(said)) > 1:
        table = "\n".join(f"  rank {rank}: {text}" for rank, text in enumerate(said))
        raise RankMismatchError(
            f"the ranks do not publish the same model with the same arguments:\n{table}\n"
            "With replicas every rank publishes the same model in the same way"
        )


def pack_error(error: Exception) -> dict[str, Any]:
    """Plain form of an error, for the other ranks."""
    packed: dict[str, Any] = {"error": type(error).__name__, "message": str(error)}
    if isinstance(error, UpdateAbortedError):
        packed["failures"] = error.failures
    if isinstance(error, PartialCommitError) and isinstance(error.report, TransferReport):
        packed["report"] = error.report.to_dict()
    return packed


def unpack_error(packed: dict[str, Any], rank: int = 0) -> ParallelKitError:
    """The error to raise on another rank for what `pack_error` made on `rank`."""
    kind = _ERRORS.get(str(packed["error"]), WeightTransferError)
    message = f"{packed['message']} (as rank {rank} reports)"
    if issubclass(kind, UpdateAbortedError):
        return kind(message, failures=packed.get("failures"))
    if issubclass(kind, PartialCommitError):
        return kind(message, report=report_from_dict(packed["report"]))
    return kind(message)


_ERRORS: Final[dict[str, type[ParallelKitError]]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, ParallelKitError)
}
