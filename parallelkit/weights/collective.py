"""What the ranks of one publisher tell each other: what they publish, what to do, how it went."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

from parallelkit import errors
from parallelkit.errors import (
    CollectiveError,
    CollectiveTimeoutError,
    NonFiniteError,
    ParallelKitError,
    PartialCommitError,
    PeerLostError,
    RankMismatchError,
    UpdateAbortedError,
    UpdateTimeoutError,
    WeightTransferError,
)
from parallelkit.protocols import ProcessGroup
from parallelkit.weights.report import TransferReport, report_from_dict

Message = dict[str, Any]


class Crew:
    """The ranks of a publisher: rank 0 says what to do, those that export say how it went.

    Attributes:
        exporters: the ranks that hand parts out, ascending; rank 0 is always one.
        broken: whether a collective has failed: nothing can be said by the group any more.
    """

    def __init__(self, group: ProcessGroup | None, exporters: Sequence[int] = (0,)) -> None:
        self.rank = group.rank if group is not None else 0
        self.group = group if group is not None and group.world_size > 1 else None
        self.exporters = tuple(exporters) if self.group is not None else (0,)
        self.broken = False

    @property
    def several(self) -> bool:
        """Whether other ranks than 0 hand parts out."""
        return len(self.exporters) > 1

    def tell(self, message: Message) -> None:
        """Tell every other rank something. Rank 0; nothing where there are none.

        Raises:
            PeerLostError, UpdateTimeoutError: a rank is gone or too slow; the group is broken.
        """
        self._broadcast(message, 0, None)

    def hear(self, seconds: float) -> Message:
        """What rank 0 tells, waited for so many seconds. Ranks other than 0.

        Raises:
            PeerLostError, UpdateTimeoutError: rank 0 is gone, or silent.
            RankMismatchError: it is in another call.
        """
        assert self.group is not None
        try:
            said = self.group.broadcast_object(None, timeout=seconds)
        except CollectiveError as error:
            self.broken = True
            raise _at_fault(error, 0) from error
        if not isinstance(said, dict) or not {"version", "orders", "open"} & set(said):
            raise RankMismatchError(
                "the ranks are out of step: rank 0 is in another call than this rank. Every rank "
                "makes the same calls of publish_weights, wait and update, in the same order"
            )
        return said

    def exchange(self, mine: Message, deadline: float) -> dict[int, Message]:
        """Let every rank know what each exporting rank says. Every rank calls it.

        Args:
            mine: this rank's word; not used where it exports nothing, unless it is an error.
            deadline: monotonic seconds.

        Raises:
            PeerLostError, UpdateTimeoutError: a rank is gone or too slow; the group is broken.
        """
        if not self.several:
            return {0: mine}
        return {src: self._broadcast(mine, src, deadline) for src in self.exporters}

    def _broadcast(self, mine: Message, src: int, deadline: float | None) -> Message:
        if self.group is None:
            return mine
        seconds = None if deadline is None else max(deadline - time.monotonic(), 0.01)
        try:
            said = self.group.broadcast_object(mine, src, timeout=seconds)
        except CollectiveError as error:
            self.broken = True
            raise _at_fault(error, src) from error
        if not isinstance(said, dict):
            raise RankMismatchError(f"publisher rank {src} is in another call than this rank")
        return said


def _at_fault(error: CollectiveError, src: int) -> PeerLostError | UpdateTimeoutError:
    """What to raise for a broadcast of `src` that broke.

    The ranks that the error knows of need not be its sender, which is named where none is known.
    """
    ranks = error.missing if isinstance(error, CollectiveTimeoutError) else error.gone
    names = [f"publisher rank {rank}" for rank in ranks or (src,)]
    text = ", ".join(names)
    if isinstance(error, CollectiveTimeoutError):
        return UpdateTimeoutError(f"{text} did not answer in time: {error}", missing=names)
    return PeerLostError(f"{text} {'is' if len(names) == 1 else 'are'} gone: {error}", peers=names)


def failed_rank(answers: dict[int, Message]) -> int | None:
    """The lowest rank whose answer is an error."""
    return next((rank for rank in sorted(answers) if "error" in answers[rank]), None)


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


def pack_error(error: BaseException) -> dict[str, Any]:
    """Plain form of an error, for the other ranks."""
    packed: dict[str, Any] = {"error": type(error).__name__, "message": str(error)}
    if isinstance(error, UpdateAbortedError):
        packed["failures"] = error.failures
    if isinstance(error, NonFiniteError):
        packed["tensors"] = list(error.tensors)
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
    if issubclass(kind, NonFiniteError):
        return kind(message, tensors=packed.get("tensors", ()))
    return kind(message)


_ERRORS: Final[dict[str, type[ParallelKitError]]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, ParallelKitError)
}
