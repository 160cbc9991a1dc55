"""One update, from begin to the decision and the commit: the coordinator of a two-phase commit.

begin    -> ready       every member takes part          failure, loss or deadline here:
transfer -> prepared    every member holds the bytes     everyone aborts and stays old
---- decision ----
commit   -> committed   every member has them in place   failure here: that member is
                                                         quarantined (or lost), by name
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np

from parallelkit.errors import (
    CorruptionError,
    PeerLostError,
    StateError,
    UpdateAbortedError,
    UpdateTimeoutError,
    WeightTransferError,
)
from parallelkit.weights import messages as m
from parallelkit.weights.blocks import Digests
from parallelkit.weights.control import ControlServer, Lost, Stop
from parallelkit.weights.members import Member, Members
from parallelkit.weights.plan import TransferPlan
from parallelkit.weights.report import MemberReport


@attrs.define(eq=False)
class Update:
    """The state of one update.

    Attributes:
        version, epoch: sent with every message; answers of another epoch are ignored.
        members: who takes part, fixed at begin.
        deadline: monotonic seconds by which the decision must fall.
        timeout: seconds for the commit, after the decision.
        phases: seconds by phase, filled in as they end.
    """

    server: ControlServer
    table: Members
    plan: TransferPlan
    version: int
    epoch: int
    members: list[Member]
    timeout: float
    phases: dict[str, float] = attrs.field(factory=dict)
    deadline: float = attrs.field(init=False)
    prepared: dict[bytes, m.Prepared] = attrs.field(factory=dict, init=False)
    _clock: float = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._clock = time.monotonic()
        self.deadline = self._clock + self.timeout

    def lap(self, phase: str) -> None:
        """Book the time since the last call to a phase."""
        now = time.monotonic()
        self.phases[phase] = self.phases.get(phase, 0.0) + now - self._clock
        self._clock = now

    def begin(self) -> None:
        """Tell every member; does not wait."""
        self.table.listen()
        self._tell(m.Begin(version=self.version, epoch=self.epoch, timeout=self.timeout))

    def wait_ready(self) -> None:
        """Wait until every member takes part, or raise before the decision."""
        self._collect(m.Ready, "begin", "call step(), or serve()")

    def transfer(self) -> None:
        """The bytes are in place to be fetched; does not wait."""
        self._tell(m.Transfer(version=self.version, epoch=self.epoch))

    def wait_prepared(self) -> None:
        """Wait until every member holds and has hashed the bytes, or raise before the decision."""
        answers = self._collect(m.Prepared, "transfer", "fetch and verify the bytes")
        self.prepared = answers

    def compare(self, source: Digests, wanted: Sequence[bool]) -> None:
        """Compare every member's digests with the source's, or raise before the decision."""
        mask = np.array(wanted, bool)
        failures: dict[str, str] = {}
        tensors: list[str] = []
        for member in self.members:
            message = self.prepared[member.route]
            if len(message.digests) % 8:
                failures[member.name] = f"sent {len(message.digests)} bytes as digests of 8 each"
                continue
            theirs = np.frombuffer(message.digests, "<u8") if message.digests else source[:0]
            if len(theirs) != (len(source) if mask.any() else 0):
                failures[member.name] = f"sent {len(theirs)} digests for {len(source)} blocks"
                continue
            bad = np.flatnonzero(mask[: len(theirs)] & (theirs != source[: len(theirs)]))
            if len(bad):
                names = sorted({n for block in bad[:64] for n in self.plan.names_in(int(block))})
                tensors += names
                failures[member.name] = (
                    f"{len(bad)} of {self.plan.blocks} blocks arrived changed, in "
                    + ", ".join(names[:6])
                    + (" ..." if len(names) > 6 else "")
                )
        if failures:
            cause = CorruptionError(
                "bytes arrived changed: " + _listing(failures), tensors=sorted(set(tensors))
            )
            raise self._aborted("verify", failures, cause)

    def abort(self, reason: str) -> None:
        """Tell every member that is there to keep what it has."""
        self._tell(m.Abort(version=self.version, epoch=self.epoch, reason=m.clip(reason, 1000)))

    def commit(self, check_readback: Callable[[m.Committed], str]) -> list[MemberReport]:
        """Tell every member the decision and wait; never raises for what a member does.

        Args:
            check_readback: returns what is wrong with a member's read-back digests, or "".
        """
        self._tell(m.Commit(version=self.version, epoch=self.epoch))
        waiting = {member.route: member for member in self.members}
        reports: dict[bytes, MemberReport] = {}
        deadline = time.monotonic() + self.timeout

        def settle(member: Member, state: Any, reason: str, answer: m.Committed | None) -> None:
            del waiting[member.route]
            good = state in ("committed", "staged")
            self.table.settle(
                member,
                "joined" if good else "quarantined",
                reason,
                self.version if good else None,
            )
            reports[member.route] = MemberReport(
                name=member.name,
                state=state,
                version=self.version if good else member.version,
                prepare_seconds=self.prepared[member.route].seconds,
                pause_seconds=answer.pause if answer else 0.0,
                reason=reason,
            )

        while waiting:
            try:
                item = self.table.inbox.get(deadline)
            except BaseException:  # interrupted: who has not answered is in doubt
                for silent in list(waiting.values()):
                    settle(silent, "quarantined", "the publisher was interrupted", None)
                raise
            if item is None:
                break
            sender = waiting.get(item.route)
            if sender is None or isinstance(item, Stop):
                continue
            if isinstance(item, Lost):
                settle(sender, "lost", "its connection ended during commit", None)
            elif isinstance(item.message, m.Committed) and self._mine(item.message):
                wrong = check_readback(item.message)
                state = "staged" if item.message.staged else "committed"
                settle(sender, "quarantined" if wrong else state, wrong, item.message)
            elif isinstance(item.message, m.Failed) and self._mine(item.message):
                settle(sender, "quarantined", f"{item.message.error}: {item.message.message}", None)
        for member in list(waiting.values()):
            settle(member, "quarantined", f"no acknowledgement within {self.timeout:g} s", None)
        return [reports[member.route] for member in self.members]

    def _tell(self, message: Any) -> None:
        for member in self.members:
            if member.present:
                self.server.send(member.route, message)

    def _mine(self, message: Any) -> bool:
        return bool(message.version == self.version and message.epoch == self.epoch)

    def _collect(self, kind: type[Any], phase: str, duty: str) -> dict[bytes, Any]:
        waiting = {member.route: member for member in self.members}
        answers: dict[bytes, Any] = {}
        for member in self.members:
            if not member.present:
                raise self._gone(phase, member)
        while waiting:
            item = self.table.inbox.get(self.deadline)
            if item is None:
                names = [member.name for member in waiting.values()]
                cause: WeightTransferError = UpdateTimeoutError(
                    f"{', '.join(names)} did not {duty} within {self.timeout:g} s", missing=names
                )
                failures = dict.fromkeys(names, f"did not {duty} within {self.timeout:g} s")
                raise self._aborted(phase, failures, cause)
            if isinstance(item, Stop):
                raise StateError("close() while update() was running")
            sender = next((x for x in self.members if x.route == item.route), None)
            if sender is None:
                continue
            if isinstance(item, Lost):
                raise self._gone(phase, sender)
            if isinstance(item.message, m.Failed) and self._mine(item.message):
                text = f"{item.message.error}: {item.message.message}"
                cause = WeightTransferError(f"{sender.name} failed in {item.message.phase}: {text}")
                raise self._aborted(item.message.phase, {sender.name: text}, cause)
            if isinstance(item.message, kind) and self._mine(item.message):
                answers[item.route] = item.message
                waiting.pop(item.route, None)
        return answers

    def _gone(self, phase: str, member: Member) -> UpdateAbortedError:
        reason = member.reason or "its connection ended"
        cause = PeerLostError(f"{member.name} is gone: {reason}", peers=[member.name])
        return self._aborted(phase, {member.name: reason}, cause)

    def _aborted(
        self, phase: str, failures: dict[str, str], cause: WeightTransferError
    ) -> UpdateAbortedError:
        error = UpdateAbortedError(
            f"update to version {self.version} aborted in {phase}; every member keeps its old "
            f"version. {_listing(failures)}",
            failures=failures,
        )
        error.__cause__ = cause
        return error


def _listing(failures: dict[str, str]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in failures.items())
