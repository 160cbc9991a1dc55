"""The trainer's side: `publish_weights` and `WeightPublisher`."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable
from typing import Any, Final, TypeVar

from parallelkit import groups, hooks
from parallelkit.errors import (
    CollectiveError,
    GroupError,
    NoBackendError,
    NotInitializedError,
    PeerLostError,
    RankMismatchError,
    StateError,
    UnsupportedFeatureError,
    WeightTransferError,
)
from parallelkit.protocols import ProcessGroup, ShardedSource, WeightSource
from parallelkit.weights.collective import agree, pack_error, unpack_error
from parallelkit.weights.coordinator import (
    TICKET_SECONDS,
    Coordinator,
    Settings,
    WeightsUnchangedWarning,
    next_version,
)
from parallelkit.weights.endpoint import check_timeout
from parallelkit.weights.members import Member
from parallelkit.weights.parcels import explain_parts
from parallelkit.weights.plan import TransferPlan, plan_transfer
from parallelkit.weights.report import TransferReport, report_from_dict

VERIFY: Final = ("digest", "readback", "sample", "off")
COMMIT: Final = ("auto", "staged")
#: What the other ranks wait for rank 0 beyond the deadline of its work, in seconds.
_GRACE_SECONDS: Final = 10.0

T = TypeVar("T")


def publish_weights(
    model: Any,
    *,
    transport: str = "auto",
    commit: str = "auto",
    verify: str = "digest",
    endpoint: str | None = None,
    timeout: float = 60.0,
    aliased: bool = False,
    group: ProcessGroup | None = None,
    **options: Any,
) -> WeightPublisher:
    """Publish a model's weights, to be followed by subscribers in other processes.

    Collective over `group`: every rank calls it with the same arguments, and its part of the same
    model. With replicas (DDP) rank 0 serves, and the others learn each outcome. Of a model that is
    spread over ranks (FSDP2, tensor parallel, pipelines) every rank describes and serves what it
    holds. It blocks until all ranks agree on the manifest, not for subscribers.

    Args:
        model: an `nn.Module` (wrapped or compiled: plain names are published), whatever a plugin
            knows, or a `WeightSource`.
        transport: `"auto"`, or a name from `parallelkit doctor`, such as `"shm"`.
        commit: `"auto"` or `"staged"`: bytes are complete and verified before the first live
            byte is written.
        verify: `"digest"` hashes every block at the source and as received; `"readback"` hashes
            live memory too, after placement; `"sample"` a sixteenth of the blocks; `"off"`.
        endpoint: address of the control channel, `"address:port"`; port 0 takes a free one. Default
            loopback. Addresses that mean all interfaces are refused.
        timeout: seconds for each half of an update (until the decision, and after it), for joining,
            and for noticing a silent peer.
        aliased: let the model's tensors live in the transport's memory, which saves the copy into
            it. Their storage is replaced once, now; identity, values and ties stay. Do not give
            them new storage later, and do not change them while `update` runs. Not for a model
            that is spread over ranks.
        group: the trainer's ranks; default the current group, or none.
        options: for the transport; `named=True` makes `shm` use a named segment.

    Raises:
        NoBackendError: no plugin knows the model's type.
        ManifestError: the model has nothing to publish, or something that cannot be.
        NotInitializedError: a launcher started several ranks, and no process group is open.
        RankMismatchError: the ranks' models differ.
        UnsupportedFeatureError: a tensor is spread in a way that cannot be published, by name.
        TransportError: no transport, no memory, or the endpoint cannot be used.
        WeightTransferError: an argument is not one of those allowed.

    Example:
        >>> publisher = pk.publish_weights(model)                # doctest: +SKIP
        >>> send_privately(publisher.ticket)                     # doctest: +SKIP
        >>> report = publisher.update()                          # doctest: +SKIP
    """
    group = _current_group() if group is None else group
    if group is not None and not isinstance(group, ProcessGroup):
        raise GroupError(f"group is a {type(group).__qualname__}; it is a process group, or None")
    settings = Settings(
        transport=transport,
        verify=verify,
        aliased=aliased,
        timeout=timeout,
        endpoint=endpoint,
        options=options,
    )
    source: WeightSource | None = None
    plan: TransferPlan | None = None
    problem: Exception | None = None
    try:
        _check_choice("verify", verify, VERIFY)
        _check_choice("commit", commit, COMMIT)
        check_timeout(timeout)
        source = _source_of(model)
        plan = None if isinstance(source, ShardedSource) else plan_transfer(source.manifest())
        what = "a model in parts" if plan is None else f"model {plan.digest.hex()[:12]}"
        mine = f"{what}, {transport}, verify {verify}, {timeout:g} s"
    except Exception as error:
        problem, mine = error, f"failed: {type(error).__name__}: {str(error)[:500]}"
    if group is not None and group.world_size > 1:
        agree(group, mine, problem)
    if source is None or problem is not None:
        raise problem or WeightTransferError("nothing to publish")
    if isinstance(source, ShardedSource):
        source.join(group)
        plan = plan_transfer(source.manifest())
    assert plan is not None
    return WeightPublisher(source, plan, settings, group)


class WeightPublisher:
    """A published model. A context manager; closes at its end.

    Not safe to call from several threads: one thread publishes and updates.
    """

    def __init__(
        self,
        source: WeightSource,
        plan: TransferPlan,
        settings: Settings,
        group: ProcessGroup | None,
    ) -> None:
        self._group = group if group is not None and group.world_size > 1 else None
        self._rank = group.rank if group is not None else 0
        self._settings = settings
        self._sharded = source if isinstance(source, ShardedSource) else None
        self._plan = plan
        self._version = 0
        self._closed = False
        self._busy = False
        self._pid = os.getpid()
        self._tickets: list[tuple[str, int]] = []
        self._coordinator: Coordinator | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None
        self._collectively(lambda: self._open(source, plan), settings.timeout)

    @property
    def version(self) -> int:
        """The last committed version; 0 before the first."""
        return self._version

    @property
    def plan(self) -> TransferPlan:
        """The layout that every member computed too."""
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
        """Everyone who joined, present or not, with state and version. Rank 0 only."""
        return self._here("members").members.everyone()

    def wait(self, members: int = 1, timeout: float | None = None) -> None:
        """Block until `members` member ranks of complete groups have joined.

        Collective over the trainer's ranks.

        Raises:
            UpdateTimeoutError: after `timeout` seconds (default: the publisher's), on every rank;
                the message names who is there.
            PeerLostError: (ranks other than 0) rank 0 is gone.
        """
        self._check_open("wait")
        seconds = self._settings.timeout if timeout is None else timeout
        self._collectively(lambda: self._here("wait").wait(members, seconds), seconds)

    def update(self, version: int | None = None) -> TransferReport:
        """Bring every member to the weights as they are now.

        Collective over the trainer's ranks; blocks until every member has a copy of its own in
        place (or staged, for `serve()`), for at most twice the timeout. Afterwards the model may be
        changed freely. With no member there, only the version moves.

        Args:
            version: the new version's number, above the last; default one more. The number of a
                failed update can be used again.

        Raises:
            UpdateAbortedError: nothing changed anywhere; `failures` and `__cause__` say why: a
                member failed (`WeightTransferError`), is gone (`PeerLostError`), was too slow
                (`UpdateTimeoutError`), or bytes arrived changed (`CorruptionError`).
            PartialCommitError: committed, but the members named in `report.quarantined` could not
                put it in place and serve nothing.
            VersionError: the version does not move forward.
            StateError: after close, or inside another update.
            ManifestError: the model is not what its manifest says any more.
            PeerLostError, UpdateTimeoutError: rank 0 is gone; or, of a model that is spread over
                ranks, one that holds a part of it is gone or was too slow: every member keeps
                its old version, and the trainer's group is broken.
        """
        self._check_open("update")
        if self._busy:
            raise StateError("update() inside update(): one update at a time")
        self._busy = True
        try:
            if self._group is not None:
                self._group.barrier(timeout=self._settings.timeout)
            if self._sharded is not None:
                self._sharded.look()
            limit = 2 * self._settings.timeout
            report = self._collectively(lambda: self._update(version), limit, self._sharded)
        finally:
            self._busy = False
            if self._closed:
                self._release("the publisher closed")
        if version is not None and version != report.version:
            raise RankMismatchError(
                f"rank {self._rank} asked for version {version}, rank 0 for {report.version}, "
                "which was committed: give the same version on every rank"
            )
        if self._coordinator is not None and self._coordinator.unchanged_alarm():
            warnings.warn(
                self._coordinator.unchanged_alarm(), WeightsUnchangedWarning, stacklevel=2
            )
        return report

    def attach(self, engine: Any, **options: Any) -> None:
        """Let an inference engine follow: an `LLM`, an `AsyncLLM` or a base URL.

        Raises:
            UnsupportedFeatureError: no installed plugin controls such an engine.
        """
        self._check_open("attach")
        raise UnsupportedFeatureError(
            f"no installed plugin controls an engine like {type(engine).__name__}; a plain module "
            "follows with pk.subscribe_weights(module, publisher.ticket) in its own process"
        )

    def drop(self, name: str) -> None:
        """Let a member go by its name, so that later updates do not wait for it. Rank 0 only.

        Raises:
            StateError: there is no such member.
        """
        coordinator = self._here("drop")
        for member in coordinator.members.everyone():
            if member.name == name and member.present:
                coordinator.drop(member, "the publisher let it go")
                return
        names = [x.name for x in coordinator.members.everyone() if x.present]
        raise StateError(f"no member {name!r} is here; there are: {', '.join(names) or 'none'}")

    def explain(self) -> str:
        """Say which transport was chosen and why, the layout, and who follows."""
        manifest = self._plan.manifest
        lines = [
            f"{len(manifest.tensors)} tensors, {manifest.nbytes / 1e6:.1f} MB in "
            f"{self._plan.blocks} blocks; version {self._version}; verify {self._settings.verify}"
        ]
        lines += explain_parts(manifest)
        if self._coordinator is None:
            return "\n".join([*lines, f"rank {self._rank}: rank 0 serves"])
        chosen = self._coordinator.choice
        lines.append(f"transport {chosen.name}: {chosen.reason}")
        lines += [
            f"  not {c.name}: {c.reason}" for c in self._coordinator.candidates if c is not chosen
        ]
        lines.append(f"control channel at {self._coordinator.server.endpoint}")
        lines += [
            f"  {x.name}: {x.state}, version {x.version}" + (f" ({x.reason})" if x.reason else "")
            for x in self._coordinator.members.everyone()
        ]
        return "\n".join(lines)

    def close(self) -> None:
        """Tell every member and free everything. Not collective; harmless when repeated.

        From a signal handler or another thread during `update()`, that call ends first. A
        publisher that is dropped, or open at exit, closes by itself.
        """
        if self._closed:
            return
        self._closed = True
        if self._coordinator is None or self._pid != os.getpid():
            return
        if self._busy:  # in a signal handler or another thread: that update ends, and releases
            self._coordinator.stop()
        else:
            self._release("the publisher closed")

    def _release(self, reason: str) -> None:
        if self._finalizer is not None:
            self._finalizer.detach()
        if self._coordinator is not None:
            self._coordinator.close(reason)

    def __enter__(self) -> WeightPublisher:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _open(self, source: WeightSource, plan: TransferPlan) -> None:
        self._coordinator = Coordinator(source, plan, self._settings)
        self._finalizer = weakref.finalize(self, _abandon, self._coordinator, self._pid)

    def _update(self, asked: int | None) -> TransferReport:
        assert self._coordinator is not None
        try:
            return self._coordinator.update(next_version(self._version, asked))
        finally:
            self._version = self._coordinator.version

    def _collectively(
        self, work: Callable[[], T], seconds: float, sharded: ShardedSource | None = None
    ) -> T:
        """Do `work` on rank 0 and give its outcome, report or error, to every rank.

        The others wait `seconds`, what the work may take, and some grace; where rank 0 needs
        their parts of the model, they hand them out meanwhile.
        """
        if self._group is None:
            return work()
        if self._rank == 0:
            whole = True
            try:
                try:
                    result = work()
                finally:
                    whole = sharded is None or sharded.dismiss()
            except Exception as error:
                if whole:  # else the others know, and there is nothing to tell them by
                    self._group.broadcast_object(pack_error(error) | {"version": self._version})
                raise
            packed = result.to_dict() if isinstance(result, TransferReport) else None
            self._group.broadcast_object({"report": packed, "version": self._version})
            return result
        limit = seconds + _GRACE_SECONDS
        if sharded is not None:
            sharded.serve(limit)
        try:
            outcome = self._group.broadcast_object(None, timeout=limit)
        except CollectiveError as error:
            raise PeerLostError(f"publisher rank 0 is gone: {error}", peers=["rank 0"]) from error
        if not isinstance(outcome, dict) or "version" not in outcome:
            raise RankMismatchError(
                "the ranks are out of step: rank 0 is in another call than this rank. Every rank "
                "makes the same calls of publish_weights, wait and update, in the same order"
            )
        version = outcome["version"]
        self._version = version if isinstance(version, int) else self._version
        if "error" in outcome:
            raise unpack_error(outcome)
        told = outcome["report"]
        if not isinstance(told, dict):
            return None  # type: ignore[return-value]
        return report_from_dict(told)  # type: ignore[return-value]

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


def _source_of(model: Any) -> WeightSource:
    source = model if isinstance(model, WeightSource) else hooks.weight_source(model)
    if source is None:
        raise NoBackendError(
            f"no installed plugin reads weights from a {type(model).__module__}."
            f"{type(model).__qualname__}; for an nn.Module: pip install parallelkit-torch"
        )
    return source


def _current_group() -> ProcessGroup | None:
    try:
        return groups.current_group()
    except NotInitializedError:
        launch = groups.read_launch()
        if launch.world_size > 1:
            raise NotInitializedError(
                f"{launch.launcher} started {launch.world_size} ranks and no process group is "
                "open: each rank would publish on its own. Call pk.init_process_group() first; it "
                "adopts a group of torch.distributed, as DDP, Accelerate and Fabric make it"
            ) from None
        return None


def _abandon(coordinator: Coordinator, pid: int) -> None:
    if pid == os.getpid():
        coordinator.close("the publisher was dropped, or its process ended")


def _check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise WeightTransferError(f"{name} is {value!r}; allowed are {', '.join(allowed)}")
