"""Inference engines that follow a publisher: how they are attached, and who is there.

The workers of an engine are members like any other; their threads stage what is decided. What an
engine does besides in an update is in `parallelkit.weights.engine_round`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import attrs

from parallelkit.errors import EngineError, PluginContractError, StateError, UpdateTimeoutError
from parallelkit.protocols import EngineClient, ThreadBoundClient
from parallelkit.weights.control import ControlServer
from parallelkit.weights.members import Member, Members, dismiss
from parallelkit.weights.ticket import TicketOffice

#: An engine's error may come before its worker's reason, which says more.
_HEARSAY_SECONDS: Final = 1.0


class Call:
    """One call to a client, in a thread of its own, since a call that hangs cannot be ended.

    `error` is what it raised, once it is `done`.
    """

    def __init__(self, what: str, work: Callable[[], Any]) -> None:
        self.what = what
        self.error: BaseException | None = None
        self._work = work
        self._done = threading.Event()
        threading.Thread(target=self._run, name=f"parallelkit {what}", daemon=True).start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self.error = error
        finally:
            self._done.set()

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return self._done.is_set()

    def wait(self, deadline: float) -> bool:
        """Wait for its end until `deadline`, in monotonic seconds; whether it came."""
        return self._done.wait(max(deadline - time.monotonic(), 0.0))


@attrs.define(eq=False)
class Engine:
    """One attached engine.

    Attributes:
        name: unique, for reports.
        members: how many workers follow for it.
        state: `attaching`, `attached`, `quarantined` (it refuses to generate until an update
            works), `lost` or `dropped`.
        version: the version it was brought to last; 0 before the first update.
        reason: why it is quarantined, lost or dropped.
        call: the last call to its client, which may be under way still.
    """

    name: str
    client: EngineClient = attrs.field(repr=False)
    target: Any = attrs.field(repr=False)
    ticket: int = attrs.field(repr=False)
    members: int
    state: str = "attaching"
    version: int = 0
    reason: str = ""
    call: Call | None = attrs.field(default=None, repr=False)

    @property
    def handle(self) -> Any:
        """What `attach` returned."""
        return self.client.handle

    @property
    def present(self) -> bool:
        """Whether it takes part in updates."""
        return self.state in ("attached", "quarantined")

    @property
    def busy(self) -> bool:
        """Whether a call to its client is under way, such as one that was given up."""
        return self.call is not None and not self.call.done


class Engines:
    """The table of one publisher. Called by the thread that attaches and updates."""

    def __init__(self, table: Members, office: TicketOffice, server: ControlServer) -> None:
        """
        Args:
            table: where workers are admitted; office: issues tickets; server: tells workers that
                they are let go.
        """
        self.table = table
        self._office = office
        self._server = server
        self._all: list[Engine] = []
        self._told: set[Engine] = set()

    def everyone(self) -> list[Engine]:
        """All engines that were ever attached, in that order."""
        return [e for e in self._all if e.state != "attaching"]

    @property
    def present(self) -> list[Engine]:
        """Those that take part in updates."""
        return [e for e in self._all if e.present]

    def refuse_twice(self, target: Any) -> None:
        """Raise `StateError` if `target` is attached already."""
        for engine in self.present:
            same = isinstance(target, str) and engine.target == target
            if same or engine.target is target:
                raise StateError(
                    f"{engine.name} is attached already; publisher.drop({engine.name!r}) lets it go"
                )

    def attach(self, target: Any, client: EngineClient, seconds: float, kept: int = 0) -> Engine:
        """Deliver a ticket, and wait until every worker has joined.

        Args:
            seconds: for all of it.
            kept: the version that is kept for members that join, 0 for none: also wait until
                every worker holds it.

        Returns:
            The engine, of no version yet.

        Raises:
            EngineError: a worker refused.
            UpdateTimeoutError: not every worker joined in time.
        """
        deadline = time.monotonic() + seconds
        if isinstance(client, ThreadBoundClient):
            client.check_thread()
        ticket, number = self._office.issue(client.members, seconds, client.name)
        label = self._office.label(number)
        engine = Engine(label, client, target, number, client.members)
        self._all.append(engine)
        try:
            try:
                client.init(ticket, timeout=seconds)
            except Exception as error:
                self._raise_refused(engine, error, _HEARSAY_SECONDS)
                raise
            self._wait_joined(engine, deadline, seconds, kept)
        except BaseException:
            self.abandon(engine)
            raise
        engine.state = "attached"
        return engine

    def abandon(self, engine: Engine) -> None:
        """It could not be attached: as if it had never been tried."""
        self.let_go(engine, "dropped", "attach failed")
        self._all.remove(engine)

    def drop(self, name: str) -> bool:
        """Let an engine go by its name; whether there is one."""
        for engine in self.present:
            if engine.name == name:
                self.let_go(engine, "dropped", "the publisher let it go")
                return True
        return False

    def refresh(self) -> None:
        """Let go of engines of which a worker is gone: they cannot follow any more."""
        for engine in self.present:
            workers = self.table.of_ticket(engine.ticket)
            if sum(w.present for w in workers) < engine.members:
                gone = [f"{w.name}: {w.reason or w.state}" for w in workers if not w.present]
                self.let_go(engine, "lost", "; ".join(gone))

    def absent(self) -> list[str]:
        """One line for each engine that was lost since the last call."""
        new = [e for e in self._all if e.state == "lost" and e not in self._told]
        self._told.update(new)
        return [f"{e.name}: lost, {next(iter(e.reason.splitlines()), '')[:200]}" for e in new]

    def let_go(self, engine: Engine, state: str, reason: str) -> None:
        """An engine follows no more: its workers are told, its client closed."""
        engine.state, engine.reason = state, reason
        self._office.revoke(engine.ticket)
        for worker in self.table.of_ticket(engine.ticket):
            if worker.present or worker.state == "opening":
                dismiss(self._server, self.table, worker, reason)
        with contextlib.suppress(Exception):  # it may be dead, which is no news
            engine.client.close()

    def close(self) -> None:
        """The publisher has closed; engines go on serving."""
        for engine in self.present:
            engine.state, engine.reason = "dropped", "the publisher closed"
            with contextlib.suppress(Exception):
                engine.client.close()

    def _wait_joined(self, engine: Engine, deadline: float, seconds: float, kept: int) -> None:
        while True:
            with self.table.changed:
                workers = self.table.of_ticket(engine.ticket)
                here = {w.member for w in workers if w.state == "joined" and w.version >= kept}
                if len(here) == engine.members:
                    return
                left = deadline - time.monotonic()
                if left > 0 and not any(w.state == "refused" for w in workers):
                    self.table.changed.wait(left)
                    continue
            self._raise_refused(engine, None)
            missing = [f"worker {r}" for r in range(engine.members) if r not in here]
            raise UpdateTimeoutError(
                f"{engine.name}: {', '.join(missing)} of {engine.members} did not join within "
                f"{seconds:g} s",
                missing=missing,
            )

    def _raise_refused(self, engine: Engine, error: Exception | None, seconds: float = 0.0) -> None:
        """Raise what a worker said when it did not join, which says more than its engine does.

        Args:
            seconds: to wait for what a worker says, which comes another way than its engine's.
        """

        def refused() -> Member | None:
            workers = self.table.of_ticket(engine.ticket)
            return next((w for w in workers if w.state == "refused"), None)

        with self.table.changed:
            worker = self.table.changed.wait_for(refused, seconds)
        if worker is not None:
            raise EngineError(
                f"{engine.name} cannot follow: {worker.name} says: {worker.reason}"
            ) from error


def checked_client(client: EngineClient) -> EngineClient:
    """A client that says who it is in a way that a ticket allows.

    Raises:
        PluginContractError: it does not.
    """
    name, members = client.name, client.members
    if not isinstance(name, str) or not 0 < len(name) <= 200 or not name.isprintable():
        raise PluginContractError(
            f"an engine client says its name is {name!r:.80}; it is a printable string of 200 "
            "characters at most"
        )
    if isinstance(members, bool) or not isinstance(members, int) or members < 1:
        raise PluginContractError(f"the client of {name} says it has {members!r} workers")
    return client
