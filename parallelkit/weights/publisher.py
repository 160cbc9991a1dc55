"""The trainer's side, once it is published: `WeightPublisher`."""

from __future__ import annotations

import contextlib
import os
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

from parallelkit import hooks
from parallelkit.errors import (
    ParallelKitError,
    RankMismatchError,
    StateError,
    UnsupportedFeatureError,
    WeightTransferError,
)
from parallelkit.protocols import EngineClient, ProcessGroup, ShardedSource, WeightSource
from parallelkit.weights.collective import Crew, Message, pack_error, unpack_error
from parallelkit.weights.coordinator import (
    TICKET_SECONDS,
    Coordinator,
    Settings,
)
from parallelkit.weights.endpoint import check_timeout
from parallelkit.weights.engines import Engine, checked_client
from parallelkit.weights.exports import explain_exports, exporting_ranks
from parallelkit.weights.members import Member, dismiss
from parallelkit.weights.outcome import WeightsUnchangedWarning
from parallelkit.weights.plan import TransferPlan, plan_transfer
from parallelkit.weights.report import TransferReport, report_from_dict
from parallelkit.weights.versions import next_version
from parallelkit.weights.worker import Worker

#: What the other ranks wait for rank 0 beyond the deadline of its work, in seconds.
_GRACE_SECONDS: Final = 10.0

T = TypeVar("T")


class WeightPublisher:
    """A published model. A context manager; closes at its end.

    Not safe to call from several threads: one thread publishes and updates.
    """

    def __init__(
        self,
        source: WeightSource,
        settings: Settings,
        group: ProcessGroup | None,
    ) -> None:
        self._settings = settings
        self._sharded = source if isinstance(source, ShardedSource) else None
        self._plan = plan_transfer(source.manifest())
        self._crew = Crew(group, self._exporters(group))
        self._rank = self._crew.rank
        self._version = 0
        self._closed = False
        self._busy = False
        self._pid = os.getpid()
        self._tickets: list[tuple[str, int]] = []
        self._coordinator: Coordinator | None = None
        self._worker: Worker | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None
        if self._rank:
            self._worker = Worker(source, self._crew, settings.options)
            self._finalizer = weakref.finalize(self, _drop, self._worker, self._pid)
        self._collectively(lambda: self._open(source), settings.timeout)

    @property
    def version(self) -> int:
        """The last committed version; 0 before the first."""
        return self._version

    @property
    def plan(self) -> TransferPlan:
        """What moves to a member that keeps everything."""
        return self._plan

    @property
    def ticket(self) -> str:
        """A ticket for one plain subscriber, valid for 300 s; a new one once it is used or expired.

        A secret: it lets its holder read the weights. Rank 0 only.

        Raises:
            StateError: on another rank, or after close.
        """
        coordinator = self._here("ticket")
        coordinator.server.check()
        if not self._tickets or not coordinator.office.usable(self._tickets[-1][1]):
            self._tickets.append(coordinator.new_ticket(1, TICKET_SECONDS, None))
        return self._tickets[-1][0]

    def new_ticket(
        self, members: int = 1, expires: float | None = TICKET_SECONDS, name: str | None = None
    ) -> str:
        """Make a ticket for a group of `members` member ranks, valid for `expires` seconds.

        Each member rank joins with `subscribe_weights(target, ticket, member=rank)`; the group
        takes part in updates once it is complete. `name` stands in reports and errors. Rank 0 only.

        Raises:
            TicketError: a bad number of members, or of seconds.
            StateError: on another rank, or after close.
        """
        return self._here("new_ticket").new_ticket(members, expires, name)[0]

    @property
    def members(self) -> list[Member]:
        """Everyone who is here, and the latest 256 who are gone, with state and version.

        Rank 0 only.
        """
        return self._here("members").members.everyone()

    def wait(self, members: int = 1, timeout: float | None = None) -> None:
        """Block until `members` member ranks of complete groups have joined.

        Collective over the trainer's ranks.

        Raises:
            UpdateTimeoutError: after `timeout` seconds (default: the publisher's), on every rank;
                the message names who is there.
            PeerLostError: (ranks other than 0) rank 0 is gone.
            WeightTransferError: an argument is no such number; at most a week.
        """
        self._check_open("wait")
        if isinstance(members, bool) or not isinstance(members, int) or members < 0:
            raise WeightTransferError(
                f"members is {members!r:.80}; it is how many member ranks to wait for, from 0"
            )
        seconds = self._settings.timeout if timeout is None else timeout
        check_timeout(seconds, zero=True)
        self._collectively(lambda: self._here("wait").wait(members, seconds), seconds)

    def update(self, version: int | None = None) -> TransferReport:
        """Bring every member to the weights as they are now.

        Collective over the trainer's ranks; blocks until every member has a copy of its own in
        place (or staged, for `serve()`), for at most twice the timeout. Afterwards the model may be
        changed freely. With no member there, only the version moves.

        Args:
            version: the new version's number, above the last; default one more. The number of a
                failed update can be used again.

        Returns:
            What was done, the same on every rank. A report without `members`: nobody followed.

        Raises:
            UpdateAbortedError: nothing changed anywhere; `failures` and `__cause__` say why: a
                member failed (`WeightTransferError`), is gone (`PeerLostError`), was too slow
                (`UpdateTimeoutError`), or bytes arrived changed (`CorruptionError`).
            PartialCommitError: committed, but the members named in `report.quarantined` could not
                put it in place and serve nothing.
            VersionError: the version does not move forward.
            StateError: after close, or inside another update.
            ManifestError: the model is not what its manifest says any more.
            NonFiniteError: with `check_finite`, it holds NaN or infinity; nothing was sent.
            PeerLostError, UpdateTimeoutError: rank 0 is gone; or, of a model that is spread over
                ranks, one that holds a part of it is gone or was too slow: every member keeps
                its old version, and the trainer's group is broken.
        """
        self._check_open("update")
        if self._busy:
            raise StateError("update() inside update(): one update at a time")
        self._busy = True
        try:
            if self._crew.group is not None:
                self._crew.group.barrier(timeout=self._settings.timeout)
            if self._sharded is not None:
                self._sharded.look()
            limit = 2 * self._settings.timeout
            try:
                report = self._collectively(lambda: self._update(version), limit)
            except Exception as error:
                with _noted_on(error, "besides"):
                    self._offer_kept()
                raise
            self._offer_kept()
        finally:
            self._busy = False
            if self._closed:
                self._release("the publisher closed")
        if version is not None and version != report.version:
            raise RankMismatchError(
                f"rank {self._rank} asked for version {version}, rank 0 for {report.version}, "
                "which was committed: give the same version on every rank"
            )
        if self._coordinator is not None and self._coordinator.changes.alarm:
            warnings.warn(self._coordinator.changes.alarm, WeightsUnchangedWarning, stacklevel=2)
        return report

    def attach(self, engine: Any, **options: Any) -> Any:
        """Let an inference engine follow: an `LLM`, an `AsyncLLM` or a base URL. Rank 0 only.

        Its workers join as members. From then on each update brings the engine along: it goes on
        generating while its workers get the bytes, and is paused for putting them in place. It has
        its own weights until the next update; with `keep_last=True` it gets the last version now.
        Blocks until every worker has joined, for the publisher's timeout at most.

        Args:
            engine: what an installed plugin controls, or an `EngineClient`.
            options: for the plugin's client: `name`, `cache` (`"reset"`, `"keep"`), `pause`
                (`"keep"`, `"wait"`, `"abort"`), and what its documentation says.

        Returns:
            A handle to generate with, which refuses while the engine is quarantined.

        Raises:
            UnsupportedFeatureError: no installed plugin controls such an engine, or an option is
                unknown.
            EngineError: the engine, or one of its workers, cannot follow; the message says why.
            PeerLostError, UpdateTimeoutError: it is dead, or does not answer.
            StateError: it is attached already, on another rank, after close, or inside `update`.
        """
        self._check_open("attach")
        if isinstance(engine, EngineClient) and not options:
            client: EngineClient | None = engine
        else:
            client = hooks.engine_client(engine, options)
        if client is None:
            raise UnsupportedFeatureError(
                f"no installed plugin controls an engine like {engine!r:.200}; "
                "a plain module follows with pk.subscribe_weights(module, publisher.ticket) in its "
                "own process"
            )
        coordinator = self._here("attach")
        if self._busy:
            raise StateError("attach() inside update(): one at a time")
        coordinator.engines.refuse_twice(engine)
        return coordinator.attach(engine, checked_client(client)).handle

    @property
    def engines(self) -> list[Engine]:
        """Every engine that was attached, present or not, with state and version. Rank 0 only."""
        return self._here("engines").engines.everyone()

    def drop(self, name: str) -> None:
        """Let a member or an engine go by its name, so that later updates do not wait for it.

        An engine goes on serving what it has. Rank 0 only.

        Args:
            name: all of it, as in `members`, reports and `UpdateAbortedError.failures`.

        Raises:
            StateError: there is no such member or engine, or it has gone already.
        """
        coordinator = self._here("drop")
        if coordinator.engines.drop(name):
            return
        for member in coordinator.members.everyone():
            if member.name == name and member.present:
                dismiss(coordinator.server, coordinator.members, member, "the publisher let it go")
                return
        names = [e.name for e in coordinator.engines.present]
        names += [x.name for x in coordinator.members.everyone() if x.present]
        raise StateError(
            f"no member {name!r} is here, nor an engine; there are: {', '.join(names) or 'none'}"
        )

    def explain(self) -> str:
        """Say which transport was chosen and why, the layout, and who follows."""
        manifest = self._plan.manifest
        lines = [
            f"{len(manifest.tensors)} tensors, {manifest.nbytes / 1e6:.1f} MB; version "
            f"{self._version}; commit {self._settings.commit}; verify {self._settings.verify}"
        ]
        lines += explain_exports(manifest)
        if self._coordinator is None:
            return "\n".join([*lines, f"this is rank {self._rank}; rank 0 coordinates"])
        lines += self._coordinator.routes.explain()
        lines.append(f"control channel at {self._coordinator.server.endpoint}")
        everyone: list[Engine | Member] = [*self._coordinator.engines.everyone()]
        everyone += self._coordinator.members.everyone()
        for one in everyone:
            why = f" ({one.reason})" if one.reason else ""
            lines.append(f"  {one.name}: {one.state}, version {one.version}{why}")
        return "\n".join(lines)

    def close(self) -> None:
        """Tell every member and free everything. Not collective; harmless when repeated.

        From a signal handler or another thread during `update()`, that call ends first. A
        publisher that is dropped, or open at exit, closes by itself.
        """
        if self._closed:
            return
        self._closed = True
        if self._pid != os.getpid():
            return
        if self._busy:  # in a signal handler or another thread: that update ends, and releases
            if self._coordinator is not None:
                self._coordinator.stop()
        else:
            self._release("the publisher closed")

    def _release(self, reason: str) -> None:
        if self._finalizer is not None:
            self._finalizer.detach()
        if self._coordinator is not None:
            self._coordinator.close(reason)
        if self._worker is not None:
            self._worker.close()

    def __enter__(self) -> WeightPublisher:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _exporters(self, group: ProcessGroup | None) -> list[int]:
        """The ranks that hand parts out.

        Raises:
            RankMismatchError: the model is spread over more ranks than there are.
        """
        manifest = self._plan.manifest
        world = group.world_size if group is not None else 1
        if manifest.mesh is not None and manifest.mesh.size > world:
            raise RankMismatchError(
                f"the model is spread over {manifest.mesh.size} ranks "
                f"({manifest.mesh.describe()}), and the publisher has {world}: every rank that "
                "holds a part calls publish_weights, with the group of them all"
            )
        return exporting_ranks(manifest)

    def _open(self, source: WeightSource) -> None:
        self._coordinator = Coordinator(source, self._plan.manifest, self._settings, self._crew)
        self._finalizer = weakref.finalize(self, _abandon, self._coordinator, self._pid)

    def _update(self, asked: int | None) -> TransferReport:
        assert self._coordinator is not None
        try:
            return self._coordinator.update(next_version(self._version, asked))
        finally:
            self._version = self._coordinator.version

    def _offer_kept(self) -> None:
        """Let late members have the last version, now that every rank is at the same epoch."""
        if not self._settings.keep_last or self._crew.broken or self._closed:
            return
        if self._crew.several:
            try:
                self._crew.exchange({}, time.monotonic() + self._settings.timeout)
            except ParallelKitError as error:
                error.add_note(
                    f"version {self._version} is the last that was committed; it is not kept for "
                    "members that join"
                )
                raise
        if self._coordinator is not None:
            self._coordinator.offer_kept()

    def _collectively(self, work: Callable[[], T], seconds: float) -> T:
        """Do `work` on rank 0 and give its outcome, report or error, to every rank.

        The others wait `seconds`, what the work may take, and some grace; meanwhile they do what
        rank 0 asks of those that hand parts out.
        """
        if self._crew.group is None:
            return work()
        if self._rank == 0:
            return self._lead(work)
        assert self._worker is not None
        outcome, problem = self._worker.follow(seconds + _GRACE_SECONDS)
        version = outcome["version"]
        self._version = version if isinstance(version, int) else self._version
        if "error" in outcome:
            raise problem or unpack_error(outcome)
        told = outcome["report"]
        if not isinstance(told, dict):
            return None  # type: ignore[return-value]
        return report_from_dict(told)  # type: ignore[return-value]

    def _lead(self, work: Callable[[], T]) -> T:
        try:
            result = work()
        except Exception as error:
            if not self._crew.broken:  # else the others know, and there is nothing to tell them by
                with _noted_on(error, "the other ranks could not be told"):
                    self._crew.tell(pack_error(error) | self._standing())
            raise
        packed = result.to_dict() if isinstance(result, TransferReport) else None
        try:
            self._crew.tell({"report": packed} | self._standing())
        except ParallelKitError as error:
            if packed is not None:
                error.add_note(f"version {self._version} was committed all the same")
            raise
        return result

    def _standing(self) -> Message:
        """Where rank 0 is, for the others to be there too."""
        epoch = self._coordinator.epoch if self._coordinator is not None else 0
        return {"version": self._version, "epoch": epoch}

    def _here(self, what: str) -> Coordinator:
        self._check_open(what)
        if self._coordinator is None:
            raise StateError(f"{what} is rank 0's; this is rank {self._rank}")
        return self._coordinator

    def _check_open(self, what: str) -> None:
        if self._closed:
            raise StateError(f"{what} after close(): publish again with pk.publish_weights")
        if self._pid != os.getpid():
            raise StateError(f"{what} in a forked child: a publisher belongs to one process")


@contextlib.contextmanager
def _noted_on(error: Exception, what: str) -> Iterator[None]:
    """What fails in here is a note on an error that is raised already."""
    try:
        yield
    except ParallelKitError as lost:
        error.add_note(f"{what}: {lost}")


def _abandon(coordinator: Coordinator, pid: int) -> None:
    if pid == os.getpid():
        coordinator.close("the publisher was dropped, or its process ended")


def _drop(worker: Worker, pid: int) -> None:
    if pid == os.getpid():
        worker.close()
