"""One update, from begin to the decision and the commit: the coordinator of a two-phase commit.

begin    -> ready       every member takes part          failure, loss or deadline here:
transfer -> prepared    every member holds the bytes     everyone aborts and stays old
---- decision ----
commit   -> committed   every member has them in place   failure here: that member is
                                                         quarantined (or lost), by name

In place, `prepared` means that a member is ready to fetch, which it does after the decision.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from parallelkit.errors import (
    CorruptionError,
    PeerLostError,
    StateError,
    UpdateAbortedError,
    UpdateTimeoutError,
    WeightTransferError,
)
from parallelkit.weights import messages as m
from parallelkit.weights.control import ControlServer, Lost, Stop
from parallelkit.weights.members import Member, Members
from parallelkit.weights.needs import Needs
from parallelkit.weights.report import MemberReport
from parallelkit.weights.truth import Truth, misplaced


@attrs.define(eq=False)
class Update:
    """The state of one update.

    Attributes:
        version, epoch: sent with every message; answers of another epoch are ignored.
        slot: which part of the arenas the bytes are in.
        members: who takes part, fixed at begin.
        in_place: whether members fetch after the decision.
        deadline: monotonic seconds by which the decision must fall.
        timeout: seconds for the commit, after the decision.
        phases: seconds by phase, filled in as they end.
    """

    server: ControlServer
    table: Members
    version: int
    epoch: int
    slot: int
    members: list[Member]
    timeout: float
    in_place: bool = False
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
        self._tell(
            m.Begin(version=self.version, epoch=self.epoch, slot=self.slot, timeout=self.timeout)
        )

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

    def compare(self, truths: Mapping[Needs, Truth]) -> None:
        """Compare every member's digests with the source's, or raise before the decision.

        In place there is nothing to compare yet.
        """
        if self.in_place:
            return
        failures: dict[str, str] = {}
        tensors: set[str] = set()
        for member in self.members:
            reason, names = _truth(truths, member).problem(self.prepared[member.route].digests)
            if reason:
                failures[member.name] = reason
                tensors.update(names)
        if failures:
            cause = CorruptionError(
                "bytes arrived changed: " + _listing(failures), tensors=sorted(tensors)
            )
            raise self.aborted("verify", failures, cause)

    def abort(self, reason: str) -> None:
        """Tell every member that is there to keep what it has."""
        self._tell(m.Abort(version=self.version, epoch=self.epoch, reason=m.clip(reason, 1000)))

    def commit(
        self,
        truths: Mapping[Needs, Truth],
        *,
        readback: bool,
        settled: Callable[[Member, MemberReport], None],
    ) -> list[MemberReport]:
        """Tell every member the decision and wait; never raises for what a member does.

        Args:
            truths: the source's digests, for members that fetch now or read back.
            readback: whether members send digests of live memory, to be compared.
            settled: told at once what became of each member.
        """
        for member in self.members:
            if member.present:
                wire = _truth(truths, member).wire if self.in_place else b""
                commit = m.Commit(version=self.version, epoch=self.epoch, digests=wire)
                self.server.send(member.route, commit)
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
                transport=member.transport,
                sources=tuple(_truth(truths, member).by_rank.items()),
                repeated=answer.repeated if answer else 0,
                live_tensors=answer.live if answer and good else 0,
                staged_tensors=answer.received if answer and good else 0,
            )
            if not interrupted:
                settled(member, reports[member.route])

        interrupted = False
        while waiting:
            try:
                item = self.table.inbox.get(deadline)
            except BaseException:  # interrupted: who has not answered is in doubt
                interrupted = True
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
                wrong = ""
                if readback and not item.message.staged:
                    wrong = misplaced(_truth(truths, sender), item.message.readback)
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
        gone = next((member for member in self.members if not member.present), None)
        while waiting:
            # What one that is gone said before says more.
            item = self.table.inbox.get(self.deadline if gone is None else time.monotonic())
            if item is None and gone is not None:
                break
            if item is None:
                names = [member.name for member in waiting.values()]
                cause: WeightTransferError = UpdateTimeoutError(
                    f"{', '.join(names)} did not {duty} within {self.timeout:g} s", missing=names
                )
                failures = dict.fromkeys(names, f"did not {duty} within {self.timeout:g} s")
                raise self.aborted(phase, failures, cause)
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
                raise self.aborted(item.message.phase, {sender.name: text}, cause)
            if isinstance(item.message, kind) and self._mine(item.message):
                answers[item.route] = item.message
                waiting.pop(item.route, None)
        if gone is not None:
            raise self._gone(phase, gone)
        return answers

    def _gone(self, phase: str, member: Member) -> UpdateAbortedError:
        reason = member.reason or "its connection ended"
        cause = PeerLostError(f"{member.name} is gone: {reason}", peers=[member.name])
        return self.aborted(phase, {member.name: reason}, cause)

    def aborted(
        self, phase: str, failures: dict[str, str], cause: WeightTransferError
    ) -> UpdateAbortedError:
        """The error to raise where an update ends before its decision."""
        error = UpdateAbortedError(
            f"update to version {self.version} aborted in {phase}; every member keeps its old "
            f"version. {_listing(failures)}",
            failures=failures,
        )
        error.__cause__ = cause
        return error


def _truth(truths: Mapping[Needs, Truth], member: Member) -> Truth:
    assert member.needs is not None  # known since it joined
    return truths[member.needs]


def _listing(failures: dict[str, str]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in failures.items())
