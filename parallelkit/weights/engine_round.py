"""The part of attached engines in one update: asked before anything is sent, committed at the end.

Once all workers of an engine hold the version that was decided, its client pauses it and lets them
put that in place. All engines do so at once, with one deadline; who does not answer is given up
for this update, by name. Each engine that took part in `begin` then gets `commit` or `abort`, once.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Final, Literal

import attrs

from parallelkit.errors import (
    EngineError,
    ParallelKitError,
    PeerLostError,
    PluginContractError,
    StateError,
    UpdateTimeoutError,
    WeightTransferError,
)
from parallelkit.protocols import ThreadBoundClient
from parallelkit.specs import EngineCommit
from parallelkit.weights.engines import Call, Engine, Engines
from parallelkit.weights.members import Member
from parallelkit.weights.report import EngineReport, MemberReport

#: Of the time for a commit, what the engine keeps for resuming and for saying so, at most.
RESUME_SECONDS: Final = 2.0
#: How long after its deadline a commit is still waited for, and how long an abort may take.
GRACE_SECONDS: Final = 5.0


@attrs.define(eq=False)
class Part:
    """What one engine does.

    Attributes:
        begun: whether it said that it can take part; off: why the update was called off, if it was.
        staged: what its workers reported, by route.
        call: its commit; telling: that it is quarantined; report: how it ended.
    """

    engine: Engine
    begun: bool = False
    off: str | None = None
    staged: dict[bytes, MemberReport] = attrs.field(factory=dict)
    call: Call | None = None
    telling: Call | None = None
    report: EngineReport | None = None


class EngineRound:
    """One update, as far as engines are concerned. Called by the thread that updates."""

    def __init__(self, engines: Engines, version: int) -> None:
        self._engines = engines
        self._version = version
        self._parts: dict[int, Part] = {}  # by ticket
        self._deadline = 0.0
        self._lock = threading.Lock()  # a commit ends in a thread of its own

    def begin(self, members: Iterable[Member], deadline: float) -> dict[str, WeightTransferError]:
        """Ask every engine whether it can take part; nothing was sent yet.

        Args:
            members: who takes part.
            deadline: monotonic seconds.

        Returns:
            By name, why engines cannot. If there are any, the update must not go on.
        """
        here = {m.ticket.number for m in members}
        failures: dict[str, WeightTransferError] = {}
        asked: list[tuple[Engine, Call]] = []
        seconds = max(deadline - time.monotonic(), 0.01)
        for engine in self._engines.present:
            if engine.ticket not in here:
                failures[engine.name] = _gone(engine, "it has lost a worker")
            elif engine.busy:
                failures[engine.name] = _silent(engine, "it is still in its")
            elif (problem := _wrong_thread(engine)) is not None:
                failures[engine.name] = problem
            else:
                asked.append((engine, self._ask(engine, seconds)))
        for engine, call in asked:
            if not call.wait(deadline):
                failures[engine.name] = _silent(engine, _slow(seconds))
            elif call.error is not None:
                failures[engine.name] = _as_ours(engine, call.error)
        for engine, _ in asked:
            if isinstance(failures.get(engine.name), PeerLostError):
                self._engines.let_go(engine, "lost", str(failures[engine.name]))
        return failures

    def abort(self, reason: str) -> None:
        """Called off, or left before engines heard of the decision: they go on as they were."""
        calls = []
        for part in self._parts.values():
            with self._lock:
                part.off = reason
                if not part.begun or part.call is not None or part.report is not None:
                    continue  # it did not begin (or ends that itself), or commits
            part.engine.call = Call(f"abort of version {self._version}", partial(self._abort, part))
            calls.append(part.engine.call)
        deadline = time.monotonic() + GRACE_SECONDS
        for call in calls:
            call.wait(deadline)

    def decided(self, deadline: float) -> None:
        """The version is decided; engines have until `deadline`, in monotonic seconds."""
        self._deadline = deadline

    def settled(self, member: Member, report: MemberReport) -> None:
        """A member answered; once all of its engine hold the version, the engine commits."""
        part = self._parts.get(member.ticket.number)
        if part is None or not part.engine.present:
            return
        part.staged[member.route] = report
        if len(part.staged) < part.engine.members:
            return
        bad = [r for r in part.staged.values() if r.state not in ("staged", "committed")]
        if bad:
            text = "; ".join(f"{r.name}: {r.state}, {r.reason}" for r in bad)
            with self._lock:
                self._fail(part, "quarantined", f"not every worker has the new version: {text}")
            self._tell(part)
        else:
            self.commit(part)

    def finish(
        self, members: Sequence[MemberReport]
    ) -> tuple[list[EngineReport], list[MemberReport]]:
        """Wait for every engine; what became of them, and of the members as part of them."""
        for part in self._parts.values():
            if part.call is not None and not part.call.wait(self._deadline + GRACE_SECONDS):
                with self._lock:
                    late = part.report is None
                    if late:
                        self._fail(part, "quarantined", f"its {part.call.what} has not ended")
                if late:
                    self._tell(part)
        last = time.monotonic() + GRACE_SECONDS
        said: dict[str, MemberReport] = {}
        for part in self._parts.values():
            if part.telling is not None:
                part.telling.wait(last)
            if part.report is None:  # dropped meanwhile
                self._fail(part, "lost", part.engine.reason)
            for worker in self._engines.table.of_ticket(part.engine.ticket):
                if worker.route in part.staged:
                    report = self._together(part, worker, part.staged[worker.route])
                    said[report.name] = report
            assert part.report is not None
            if part.report.state == "lost" and part.engine.present:
                self._engines.let_go(part.engine, "lost", part.report.reason)
        reports = [part.report for part in self._parts.values() if part.report is not None]
        return reports, [said.get(m.name, m) for m in members]

    def bring(self, engine: Engine, deadline: float) -> None:
        """Bring one engine, whose workers hold the version, to it by itself.

        Raises:
            EngineError: it failed, and is quarantined.
        """
        self.decided(deadline)
        seconds = max(deadline - time.monotonic(), 0.01)
        try:
            call = self._ask(engine, seconds)
            if not call.wait(deadline):
                raise _silent(engine, _slow(seconds))
            if call.error is not None:
                raise _as_ours(engine, call.error)
        except BaseException:
            self.abort("it could not be brought along")
            raise
        self.commit(self._parts[engine.ticket])
        ((report,), _) = self.finish(())
        if report.state != "committed":
            raise EngineError(
                f"{engine.name} joined, but could not be brought to version {self._version}: "
                f"{report.reason}"
            )

    def commit(self, part: Part) -> None:
        """Let an engine put in place what its workers hold; does not wait."""
        what = f"commit of version {self._version}"
        part.call = part.engine.call = Call(what, lambda: self._commit(part))

    def _ask(self, engine: Engine, seconds: float) -> Call:
        part = self._parts[engine.ticket] = Part(engine)

        def work() -> None:
            engine.client.begin(self._version, timeout=seconds)
            with self._lock:
                part.begun = True
                off = part.off is not None
            if off:
                self._abort(part)

        engine.call = Call(f"begin of version {self._version}", work)
        return engine.call

    def _abort(self, part: Part) -> None:
        part.engine.client.abort(self._version, part.off or "", timeout=GRACE_SECONDS)

    def _commit(self, part: Part) -> None:
        """In a thread of its own."""
        engine = part.engine
        left = max(self._deadline - time.monotonic(), 0.01)
        try:
            seconds = left - min(RESUME_SECONDS, left / 4)
            made = _report(
                engine, self._version, engine.client.commit(self._version, timeout=seconds)
            )
        except BaseException as error:
            with self._lock:
                if part.report is None:
                    lost = isinstance(error, PeerLostError)
                    text = f"{type(error).__name__}: {error}"
                    self._fail(part, "lost" if lost else "quarantined", text)
            with contextlib.suppress(Exception):
                engine.client.quarantine(engine.reason)
            return
        with self._lock:
            if part.report is None:  # else it was given up, and stays quarantined
                part.report = made
                if engine.present:
                    engine.state, engine.version, engine.reason = "attached", self._version, ""

    def _fail(self, part: Part, state: Literal["quarantined", "lost"], reason: str) -> None:
        engine = part.engine
        if engine.present:
            engine.state, engine.reason = "quarantined", reason
        part.report = EngineReport(
            name=engine.name, state=state, version=engine.version, reason=reason
        )

    def _tell(self, part: Part) -> None:
        """Let an engine refuse to generate; does not wait."""
        engine = part.engine
        part.telling = Call("quarantine", lambda: engine.client.quarantine(engine.reason))

    def _together(self, part: Part, worker: Member, staged: MemberReport) -> MemberReport:
        """A worker's report, now that it is known what became of its engine."""
        whole = part.report
        assert whole is not None
        if whole.state == "committed":
            return attrs.evolve(staged, state="committed")
        if staged.state not in ("staged", "committed"):
            return staged
        reason = f"with its engine, {whole.name}"
        self._engines.table.settle(worker, "quarantined", reason, whole.version)
        return attrs.evolve(staged, state=whole.state, version=whole.version, reason=reason)


def _report(engine: Engine, version: int, done: EngineCommit) -> EngineReport:
    if not isinstance(done, EngineCommit):
        raise PluginContractError(
            f"the client of {engine.name} answered commit with a {type(done).__qualname__}; it "
            "answers with an EngineCommit"
        )
    return EngineReport(
        name=engine.name,
        state="committed",
        version=version,
        pause_seconds=done.pause_seconds,
        cache=done.cache,
        weight_version=done.weight_version,
        notes=tuple(done.notes),
    )


def _slow(seconds: float) -> str:
    return f"within {seconds:.3g} s it did not end its"


def _silent(engine: Engine, how: str) -> UpdateTimeoutError:
    what = engine.call.what if engine.call is not None else "call"
    return UpdateTimeoutError(
        f"{engine.name}: {how} {what}; wait for it, or let it go with "
        f"publisher.drop({engine.name!r})",
        missing=[engine.name],
    )


def _wrong_thread(engine: Engine) -> StateError | None:
    if isinstance(engine.client, ThreadBoundClient):
        try:
            engine.client.check_thread()
        except StateError as error:
            return error
    return None


def _gone(engine: Engine, why: str) -> PeerLostError:
    return PeerLostError(f"{engine.name}: {why}", peers=[engine.name])


def _as_ours(engine: Engine, error: BaseException) -> WeightTransferError:
    """The error itself if it is one of ours, else one that names its engine."""
    if isinstance(error, WeightTransferError):
        return error
    text = str(error) if isinstance(error, ParallelKitError) else f"{type(error).__name__}: {error}"
    found = EngineError(f"{engine.name}: {text}")
    found.__cause__ = error
    return found
