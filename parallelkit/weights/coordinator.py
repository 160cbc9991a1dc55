"""Rank 0 of a publisher: owns the control channel and the version counter."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Final

import attrs

from parallelkit.errors import UpdateTimeoutError
from parallelkit.protocols import EngineClient, WeightSource
from parallelkit.weights import messages as m
from parallelkit.weights.collective import Crew, Message
from parallelkit.weights.control import ControlServer, Stop
from parallelkit.weights.endpoint import parse_endpoint
from parallelkit.weights.engine_round import EngineRound
from parallelkit.weights.engines import Engine, Engines
from parallelkit.weights.exporter import Exporter, Hashed
from parallelkit.weights.identity import host_identity
from parallelkit.weights.kept import Kept
from parallelkit.weights.manifest import Manifest
from parallelkit.weights.members import Members, dismiss
from parallelkit.weights.needs import Needs
from parallelkit.weights.orders import (
    Kinds,
    Opening,
    Staging,
    do_together,
    open_exporter,
    raise_failed,
    staged,
)
from parallelkit.weights.outcome import Changes, raise_unless_everywhere
from parallelkit.weights.report import (
    EngineReport,
    MemberReport,
    TransferReport,
    verified_by_all,
)
from parallelkit.weights.routes import Post, Routes, describe
from parallelkit.weights.ticket import TicketOffice
from parallelkit.weights.truth import Truth, hashed_from_plain
from parallelkit.weights.update import Update

TICKET_SECONDS: Final = 300.0


@attrs.frozen(kw_only=True)
class Settings:
    """How a publisher works; see `publish_weights` for the meaning of each field."""

    transport: str
    commit: str
    verify: str
    aliased: bool
    keep_last: bool
    check_finite: bool
    timeout: float
    endpoint: str | None
    options: dict[str, object]


class Coordinator:
    """Everything of a publisher that exists once. Rank 0 alone calls it.

    Where other ranks hand parts out too, opening and `update` are collective: `crew` carries what
    they are asked for (`parallelkit.weights.orders`).
    """

    def __init__(
        self, source: WeightSource, manifest: Manifest, settings: Settings, crew: Crew
    ) -> None:
        """Choose and open transports, on every rank that hands parts out; bind the control channel.

        Raises:
            TransportError: no transport fits, or memory or address are not to be had.
            PeerLostError, UpdateTimeoutError: another rank is gone or too slow.
        """
        self.epoch = 0
        self.manifest = manifest
        self.settings = settings
        self._source = source
        self._crew = crew
        self._run_id = secrets.token_bytes(16)
        self._kinds = Kinds()
        self.changes = Changes()
        self._kept: Kept | None = None
        self._phase_hook: Callable[[str], None] = lambda phase: None
        host, _ = parse_endpoint(settings.endpoint)
        device = source.device.partition(":")[0]
        self.routes = Routes(settings.transport, device, host_identity(), host)
        self._exporter: Exporter | None = None
        try:
            self._open(host)
            if settings.aliased:
                self.exporter.adopt()
            self.server = ControlServer(settings.endpoint, settings.timeout)
        except BaseException:
            self._release()
            raise
        self.office = TicketOffice(self.server.endpoint, self.server.server_key)
        self.members = Members(
            manifest=manifest,
            office=self.office,
            run_id=self._run_id,
            verify=settings.verify,
            commit=settings.commit,
            slots=self._slots,
            timeout=settings.timeout,
            sources=self.routes.sources,
        )
        self.engines = Engines(self.members, self.office, self.server)
        self.server.start(self.members)

    @property
    def version(self) -> int:
        """The last committed version; 0 before the first."""
        return self.members.version

    @property
    def _slots(self) -> int:
        return 2 if self.settings.keep_last else 1

    @property
    def exporter(self) -> Exporter:
        """Rank 0's own parts."""
        assert self._exporter is not None
        return self._exporter

    def update(self, version: int) -> TransferReport:
        """Bring every member of a complete group to `version`. Blocks, see `WeightPublisher`."""
        started, clock = time.time(), time.monotonic()
        self.server.check()
        self._dismiss_broken_groups()
        self.engines.refresh()
        self._source.begin()
        if self.settings.aliased:
            self.exporter.check_adopted()
        # Not before the model was found good: rounds with members that join late would be dropped,
        # and begun again at the same epoch.
        self.members.begin_update(self.settings.timeout)
        update = Update(
            server=self.server,
            table=self.members,
            version=version,
            epoch=self._bump(),
            slot=1 - self._kept.slot if self._kept is not None else 0,
            members=self.members.ready_for_update(),
            timeout=self.settings.timeout,
            in_place=self.settings.commit == "in_place",
        )
        update.phases["look"] = time.monotonic() - clock
        engines = EngineRound(self.engines, version)
        try:
            self._ask(engines, update)
            truths = self._prepare(update)
        except BaseException as error:
            self._bump()
            self.members.ignore()
            update.abort(str(error) or type(error).__name__)
            engines.abort(str(error) or type(error).__name__)
            raise
        self.members.version = version  # decided: from here on the number is used, whatever happens
        self.exporter.committed()
        self._keep(update, truths)
        members: list[MemberReport] | None = None
        try:
            engines.decided(time.monotonic() + self.settings.timeout)
            readback = self.settings.verify == "readback"
            members = update.commit(truths, readback=readback, settled=engines.settled)
            of_engines, members = engines.finish(members)
        finally:
            # Before anything that may be waited for, and interrupted: whoever wakes late must not
            # use this arena any more.
            if members is None or any(r.state in ("quarantined", "lost") for r in members):
                self._bump()
            self.members.ignore()
            if members is None:
                engines.abort("the publisher was interrupted")
        self._phase("committed")
        update.lap("commit")
        return self._report(update, started, members, of_engines, truths)

    def offer_kept(self) -> None:
        """Let members that join from now on have the last committed version at once.

        After an update, however it ended, once every rank of the publisher is at its epoch.
        """
        if self._kept is not None:
            self._kept = attrs.evolve(self._kept, epoch=self.epoch)
            for route, message in self.members.keep(self._kept):
                self.server.send(route, message)

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

    def attach(self, target: object, client: EngineClient) -> Engine:
        """Let an engine follow; of a version that is kept, at once."""
        self.server.check()
        seconds = self.settings.timeout
        deadline = time.monotonic() + seconds
        kept = self._kept.version if self._kept is not None else 0
        engine = self.engines.attach(target, client, seconds, kept)
        if kept:
            try:
                EngineRound(self.engines, kept).bring(engine, deadline)
            except BaseException:
                self.engines.abandon(engine)
                raise
        return engine

    def stop(self) -> None:
        """Make an update that is waiting end, so that `close` can follow."""
        self.members.inbox.put(Stop())

    def close(self, reason: str) -> None:
        """Tell every member, close the channel, drop the arena; harmless when repeated."""
        for member in self.members.everyone():
            if member.present:
                self.server.send(member.route, m.Close(reason=reason))
        self.server.close()
        self.engines.close()
        self._release()

    def _open(self, host: str) -> None:
        """Open the arena of every rank that hands parts out."""
        opening = Opening(
            names=self.routes.names(),
            run_id=self._run_id,
            secret=self.routes.secret,
            host=host,
            slots=self._slots,
            seconds=self.settings.timeout,
            check_finite=self.settings.check_finite,
        )
        if self._crew.several:
            self._crew.tell({"open": opening.to_plain()})

        def mine() -> Message:
            self._exporter, post = open_exporter(
                self._source, self.manifest, 0, opening, self.settings.options
            )
            return post.to_plain()

        answers, problem = do_together(self._crew, mine, opening.seconds)
        raise_failed(answers, problem)
        self.routes.posts = {rank: Post.from_plain(said) for rank, said in answers.items()}

    def _keep(self, update: Update, truths: dict[Needs, Truth]) -> None:
        """Remember what was decided, for members that join later."""
        if self.settings.keep_last:
            self._kept = Kept(
                version=update.version,
                epoch=update.epoch,
                slot=update.slot,
                truths=truths,
                in_place=update.in_place,
                readback=self.settings.verify == "readback",
                timeout=self.settings.timeout,
            )

    def _bump(self) -> int:
        self.epoch = self.exporter.bump()
        return self.epoch

    def _ask(self, engines: EngineRound, update: Update) -> None:
        """Ask attached engines whether they can take part; nothing was sent yet."""
        if not self.engines.present:
            return
        failures = engines.begin(update.members, update.deadline)
        update.lap("ask")
        if failures:
            texts = {name: str(error) for name, error in failures.items()}
            raise update.aborted("begin", texts, next(iter(failures.values())))

    def _prepare(self, update: Update) -> dict[Needs, Truth]:
        """Everything before the decision; any error here leaves every member as it was."""
        aliased = self.settings.aliased
        kinds = list(dict.fromkeys(x.needs for x in update.members if x.needs is not None))
        if self.settings.keep_last:
            kinds = self.members.kinds() or [Needs.whole(self.manifest)]
        truths: dict[Needs, Truth] = {}
        if self.settings.check_finite:  # nobody hears of a version that is refused
            if aliased:
                self.exporter.check_arena()
            else:
                truths = self._stage(update, kinds)
        update.begin()
        self._phase("begin")
        update.lap("begin")
        if not aliased and kinds and not self.settings.check_finite:
            truths = self._stage(update, kinds)
        update.wait_ready()
        update.lap("ready")
        update.transfer()
        self._phase("transfer")
        if aliased and kinds:  # while the members hash the same bytes
            hashed = self.exporter.hash_arena(kinds, self.settings.verify, update.version)
            truths = self._joined(kinds, {0: hashed}, update.version)
            update.lap("digest")
        update.wait_prepared()
        update.compare(truths)
        self._phase("verify")
        update.lap("verify")
        return truths

    def _stage(self, update: Update, kinds: list[Needs]) -> dict[Needs, Truth]:
        """Let every rank stage its parts; what their digests are together."""
        numbers, new = self._kinds.number(kinds) if self._crew.several else ([], [])
        staging = Staging(
            version=update.version,
            epoch=update.epoch,
            slot=update.slot,
            verify=self.settings.verify,
            needs=numbers,
            new=new,
            seconds=max(update.deadline - time.monotonic(), 0.0),
        )
        if self._crew.several:
            self._crew.tell({"orders": staging.to_plain()})
            self._kinds.told(numbers)
        own: list[Hashed] = []

        def mine() -> Message:
            own.extend(self.exporter.stage(kinds, update.slot, staging.verify, update.version))
            update.lap("stage")
            return staged(own) if self._crew.several else {}

        answers, problem = do_together(self._crew, mine, staging.seconds)
        raise_failed(answers, problem)
        if self._crew.several:
            update.lap("meet")
        self._phase("stage")
        said = {0: own} | {
            rank: hashed_from_plain(answer["hashed"], len(kinds))
            for rank, answer in answers.items()
            if rank
        }
        return self._joined(kinds, said, update.version)

    def _joined(
        self, kinds: list[Needs], said: dict[int, list[Hashed]], version: int
    ) -> dict[Needs, Truth]:
        """For each kind of members, what all ranks said of it."""
        return {
            kind: Truth.of(
                self.manifest,
                kind,
                {rank: hashed[i] for rank, hashed in said.items()},
                self.settings.verify,
                self._run_id,
                version,
            )
            for i, kind in enumerate(kinds)
        }

    def _report(
        self,
        update: Update,
        started: float,
        members: list[MemberReport],
        engines: list[EngineReport],
        truths: dict[Needs, Truth],
    ) -> TransferReport:
        ratio, notes = self.changes.count(truths.values()), []
        if not members:
            notes.append("no member of a complete group was there; nothing was sent")
        if self._kept is not None and not members:
            notes.append("the version is kept for members that join")
        notes += self.members.absent(new=True) + self.engines.absent()
        if self.changes.alarm:
            notes.append(self.changes.alarm)
        if any(report.state == "staged" for report in members):
            notes.append("staged members go live at their next step() or use()")
        report = TransferReport(
            version=update.version,
            nbytes=self.manifest.nbytes,
            tensors=len(self.manifest.tensors),
            transport=describe(r.transport for r in members) or self.routes.choice.name,
            verify=self.settings.verify,
            verified=verified_by_all(self.settings.verify, self.settings.commit, members),
            phases=update.phases,
            started_at=started,
            members=tuple(
                attrs.evolve(r, encrypted=self.routes.encrypted(r.transport)) for r in members
            ),
            engines=tuple(engines),
            changed_ratio=ratio,
            notes=tuple(notes),
        )
        raise_unless_everywhere(report)
        return report

    def _dismiss_broken_groups(self) -> None:
        for member in self.members.everyone():
            if member.state in ("lost", "left"):
                for mate in self.members.groupmates(member):
                    dismiss(
                        self.server,
                        self.members,
                        mate,
                        f"{member.name}, of the same group, is gone",
                    )

    def _release(self) -> None:
        if self._exporter is not None:
            self._exporter.close()

    def _phase(self, name: str) -> None:
        self._phase_hook(name)
