"""Rank 0 of a publisher: owns the control channel, the arena and the version counter."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Final

import attrs
import numpy as np

from parallelkit import hooks
from parallelkit.errors import (
    PartialCommitError,
    StateError,
    TransportError,
    UpdateTimeoutError,
    VersionError,
)
from parallelkit.protocols import PublisherTransport, ShardedSource, WeightSource
from parallelkit.specs import HostIdentity, TransportCandidate, TransportRequest, TransportSpec
from parallelkit.weights import messages as m
from parallelkit.weights.blocks import Digests, Workers, as_bytes, hash_arena, stage, wanted_blocks
from parallelkit.weights.control import ControlServer, Stop
from parallelkit.weights.identity import host_identity
from parallelkit.weights.members import Member, Members
from parallelkit.weights.parcels import split_bytes
from parallelkit.weights.plan import TransferPlan
from parallelkit.weights.report import MemberReport, TransferReport
from parallelkit.weights.ticket import TicketOffice
from parallelkit.weights.update import Update

#: After this many committed versions in a row without a changed byte, the report warns.
UNCHANGED_ALARM: Final = 3
TICKET_SECONDS: Final = 300.0
#: The wire carries versions below this.
MAX_VERSION: Final = 2**62

_VERIFIED: Final = {
    "digest": "verified: every byte, at the source and as received",
    "readback": "verified: every byte, at the source, as received and in live memory",
    "sample": "verified: a sixteenth of the bytes, chosen anew each version",
    "off": "not verified (verify='off')",
}


@attrs.frozen(kw_only=True)
class Settings:
    """How a publisher works; see `publish_weights` for the meaning of each field."""

    transport: str
    verify: str
    aliased: bool
    timeout: float
    endpoint: str | None
    options: dict[str, object]


class WeightsUnchangedWarning(UserWarning):
    """Several versions in a row were committed without one changed byte."""


class Coordinator:
    """Everything of a publisher that exists once. Not collective; rank 0 alone calls it."""

    def __init__(self, source: WeightSource, plan: TransferPlan, settings: Settings) -> None:
        """Choose and open the transport, bind the control channel.

        Raises:
            TransportError: no transport fits, or memory or address are not to be had.
        """
        self.version = 0
        self.plan = plan
        self.settings = settings
        self._source = source
        self._run_id = secrets.token_bytes(16)
        self._workers = Workers()
        self._gathered = split_bytes(plan.manifest)[1]
        self._unchanged = 0
        self._last: Digests | None = None
        self._phase_hook: Callable[[str], None] = lambda phase: None
        self._identity = host_identity()
        self.candidates = self._rank(None)
        self.choice = self._choose()
        self._transport = self._open()
        self._arena = as_bytes(self._transport.buffer)
        try:
            if settings.aliased:
                self._adopt()
            self.server = ControlServer(settings.endpoint, settings.timeout)
        except BaseException:
            self._release_arena()
            raise
        self.office = TicketOffice(self.server.endpoint, self.server.server_key)
        self.members = Members(
            plan=plan,
            office=self.office,
            run_id=self._run_id,
            verify=settings.verify,
            timeout=settings.timeout,
            transport=self.choice.name,
            offer=self._offer,
            version=lambda: self.version,
        )
        self.server.start(self.members)

    def update(self, version: int) -> TransferReport:
        """Bring every member of a complete group to `version`. Blocks, see `WeightPublisher`."""
        started, clock = time.time(), time.monotonic()
        self.server.check()
        self._dismiss_broken_groups()
        self._source.begin()
        if self.settings.aliased:
            self._check_adopted()
        update = Update(
            server=self.server,
            table=self.members,
            plan=self.plan,
            version=version,
            epoch=self._transport.bump(),
            members=self.members.ready_for_update(),
            timeout=self.settings.timeout,
        )
        update.phases["look"] = time.monotonic() - clock
        wanted = wanted_blocks(self.settings.verify, self.plan, self._run_id, version)
        try:
            digests = self._prepare(update, wanted)
        except BaseException as error:
            self.members.ignore()
            self._transport.bump()
            update.abort(str(error) or type(error).__name__)
            raise
        self.version = version  # decided: from here on the number is used, whatever happens
        members: list[MemberReport] | None = None
        try:
            members = update.commit(lambda message: self._check_readback(message, digests))
        finally:
            self.members.ignore()
            if members is None or any(r.state in ("quarantined", "lost") for r in members):
                self._transport.bump()  # whoever wakes late must not use this arena any more
        self._phase("committed")
        update.lap("commit")
        return self._report(update, started, members, digests)

    def new_ticket(self, members: int, expires: float | None, name: str | None) -> tuple[str, int]:
        """Issue a ticket; returns its string and number."""
        self.server.check()
        return self.office.issue(members, expires, name)

    def wait(self, members: int, timeout: float) -> None:
        """Wait until at least `members` member ranks of complete groups are present."""
        self.server.check()
        deadline = time.monotonic() + timeout
        with self.members.changed:
            while len(self.members.ready_for_update()) < members:
                left = deadline - time.monotonic()
                if left <= 0 or not self.members.changed.wait(left):
                    break
        present = self.members.ready_for_update()
        if len(present) < members:
            absent = "; ".join(self.members.absent())
            raise UpdateTimeoutError(
                f"{len(present)} of {members} members joined within {timeout:g} s: "
                f"{', '.join(x.name for x in present) or 'none'}"
                + (f" ({absent})" if absent else "")
                + "; a subscriber joins with pk.subscribe_weights(model, ticket)"
            )

    def stop(self) -> None:
        """Make an update that is waiting end, so that `close` can follow."""
        self.members.inbox.put(Stop())

    def close(self, reason: str) -> None:
        """Tell every member, close the channel, drop the arena; harmless when repeated."""
        for member in self.members.everyone():
            if member.present:
                self.server.send(member.route, m.Close(reason=reason))
        self.server.close()
        self._release_arena()

    def drop(self, member: Member, reason: str) -> None:
        """Let a member go: it is told, and takes part in nothing any more."""
        self.server.send(member.route, m.Close(reason=reason))
        self.members.mark(member, "lost", reason)

    def _prepare(self, update: Update, wanted: Sequence[bool]) -> Digests:
        """Everything before the decision; any error here leaves every member as it was."""
        aliased = self.settings.aliased
        digests: Digests = np.zeros(self.plan.blocks, np.uint64)
        update.begin()
        self._phase("begin")
        update.lap("begin")
        if isinstance(self._source, ShardedSource) and update.members:
            digests = self._gather(self._source, update, wanted)
        elif not aliased and update.members:
            fetch, arena = self._source.host_bytes, self._arena
            digests = stage(fetch, self.plan, arena, self._workers, wanted)
            self._phase("stage")
            update.lap("stage")
        update.wait_ready()
        update.lap("ready")
        update.transfer()
        self._phase("transfer")
        if aliased and update.members:  # while the members hash the same bytes
            digests = hash_arena(self._arena, self.plan, self._workers, wanted)
            update.lap("digest")
        update.wait_prepared()
        update.compare(digests, wanted)
        self._phase("verify")
        update.lap("verify")
        return digests

    def _gather(self, source: ShardedSource, update: Update, wanted: Sequence[bool]) -> Digests:
        """Let the ranks' parts come together in the arena; its digests are the source's."""
        source.gather(
            self._spans(),
            seconds=update.deadline - time.monotonic(),
            check=self.settings.verify in ("digest", "readback"),
        )
        self._phase("stage")
        update.lap("gather")
        digests = hash_arena(self._arena, self.plan, self._workers, wanted)
        update.lap("digest")
        return digests

    def _check_readback(self, message: m.Committed, digests: Digests) -> str:
        if self.settings.verify != "readback" or message.staged:
            return ""
        theirs = np.frombuffer(message.readback, "<u8") if len(message.readback) % 8 == 0 else None
        if theirs is None or len(theirs) != len(digests):
            return "its read-back digests are malformed"
        bad = np.flatnonzero(theirs != digests)
        names = sorted({n for block in bad[:8] for n in self.plan.names_in(int(block))})
        return f"live memory differs after placement, in {', '.join(names[:6])}" if len(bad) else ""

    def _report(
        self, update: Update, started: float, members: list[MemberReport], digests: Digests
    ) -> TransferReport:
        ratio, notes = self._changes(digests, bool(members)), []
        if not members:
            notes.append("no member of a complete group was there; nothing was sent")
        notes += self.members.absent(new=True)
        if self.unchanged_alarm():
            notes.append(self.unchanged_alarm())
        if any(report.state == "staged" for report in members):
            notes.append("staged members go live at their next step() or use()")
        report = TransferReport(
            version=update.version,
            nbytes=self.plan.manifest.nbytes,
            gathered_bytes=self._gathered if members else 0,
            tensors=len(self.plan.manifest.tensors),
            transport=self.choice.name,
            verify=self.settings.verify,
            verified=_VERIFIED[self.settings.verify] if members else "nothing was sent",
            phases=update.phases,
            started_at=started,
            members=tuple(members),
            changed_ratio=ratio,
            notes=tuple(notes),
        )
        if report.quarantined:
            details = "; ".join(
                f"{r.name}: {r.state}, {r.reason}" for r in members if r.name in report.quarantined
            )
            raise PartialCommitError(
                f"version {update.version} was committed, but not everywhere. {details}. Members "
                "not named are at the new version; quarantined ones serve nothing and come back "
                "by the next update",
                report=report,
            )
        return report

    def unchanged_alarm(self) -> str:
        """What to warn of when nothing changes for too long, or ""."""
        if self._unchanged < UNCHANGED_ALARM:
            return ""
        return (
            f"{self._unchanged} versions in a row have not one changed byte: is the model that is "
            "published the one that is trained?"
        )

    def _changes(self, digests: Digests, sent: bool) -> float | None:
        """Share of bytes in changed blocks; keeps this version's digests for the next."""
        if self.settings.verify not in ("digest", "readback") or not sent:
            return None
        last, self._last = self._last, digests
        if last is None:
            return None
        sizes = np.full(self.plan.blocks, self.plan.block_bytes, np.int64)
        sizes[-1] = self.plan.nbytes - int(sizes[:-1].sum())
        ratio = float(sizes[digests != last].sum() / self.plan.nbytes)
        self._unchanged = 0 if ratio else self._unchanged + 1
        return ratio

    def _dismiss_broken_groups(self) -> None:
        for member in self.members.everyone():
            if member.state in ("lost", "left"):
                for mate in self.members.groupmates(member):
                    self.drop(mate, f"{member.name}, of the same group, is gone")

    def _rank(self, peer: HostIdentity | None) -> list[TransportCandidate]:
        request = TransportRequest(
            publisher=self._identity,
            subscriber=peer,
            device=self._source.device.partition(":")[0],
            requested=self.settings.transport,
        )
        return sorted(hooks.transports(request), key=lambda c: (not c.reach, c.cost, c.name))

    def _choose(self) -> TransportCandidate:
        wanted = self.settings.transport
        known = ", ".join(f"{c.name} ({c.reason})" for c in self.candidates) or "none"
        for candidate in self.candidates:
            if candidate.name == wanted or (wanted == "auto" and candidate.reach):
                return candidate
        raise TransportError(f"transport {wanted!r} is not to be had here; there are: {known}")

    def _open(self) -> PublisherTransport:
        spec = TransportSpec(
            name=self.choice.name,
            manifest=self.plan.manifest,
            nbytes=self.plan.nbytes,
            run_id=self._run_id,
            options=self.settings.options,
        )
        transport = hooks.open_transport(spec)
        if transport is None:
            raise TransportError(f"transport {spec.name!r} is listed, but no plugin opens it")
        return transport

    def _offer(self, peer: HostIdentity) -> bytes:
        mine = [c for c in self._rank(peer) if c.name == self.choice.name]
        if not mine or not mine[0].reach:
            reason = mine[0].reason if mine else "it is not there any more"
            raise TransportError(f"{self.choice.name}: {reason}")
        return self._transport.offer()

    def _adopt(self) -> None:
        self._source.adopt(self._spans())

    def _spans(self) -> list[memoryview]:
        """The arena's memory of each unique tensor."""
        spans = zip(self.plan.offsets, self.plan.sizes, strict=True)
        buffer = self._transport.buffer
        return [buffer[offset : offset + size] for offset, size in spans]

    def _check_adopted(self) -> None:
        base = self._arena.ctypes.data
        for i, (offset, size) in enumerate(zip(self.plan.offsets, self.plan.sizes, strict=True)):
            if size and as_bytes(self._source.host_bytes(i)).ctypes.data != base + offset:
                raise StateError(
                    f"{self.plan.manifest.unique[i].name!r} does not live in the published segment "
                    "any more: something gave it new storage after publish_weights(aliased=True); "
                    "publish again, or without aliased"
                )

    def _release_arena(self) -> None:
        self._arena = np.empty(0, np.uint8)
        self._transport.close()
        self._workers.close()

    def _phase(self, name: str) -> None:
        self._phase_hook(name)


def next_version(current: int, asked: int | None) -> int:
    """The version an update will have.

    Raises:
        VersionError: `asked` is not an integer above `current`.
    """
    if asked is None and current + 1 < MAX_VERSION:
        return current + 1
    if isinstance(asked, bool) or not isinstance(asked, int) or not current < asked < MAX_VERSION:
        raise VersionError(
            f"version is {asked!r}; the last committed version is {current} and versions only move "
            "forward"
        )
    return asked
