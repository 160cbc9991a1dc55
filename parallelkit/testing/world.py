"""A publisher and its followers in one process, and what holds of them whatever happens.

`World` makes them, runs updates, and after each checks both sides against what it knows: which
value belongs to which version. Tests add the mishaps. Nothing here uses a test library.
"""

from __future__ import annotations

import _thread
import contextlib
import faulthandler
import threading
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any, Final

import attrs

from parallelkit.errors import (
    ParallelKitError,
    PartialCommitError,
    PeerLostError,
    QuarantinedError,
)
from parallelkit.testing.brittle import BrittleArrays
from parallelkit.testing.peer import fill, sample_model, values
from parallelkit.weights import (
    WeightPublisher,
    WeightSubscriber,
    publish_weights,
    subscribe_weights,
)
from parallelkit.weights.report import TransferReport

#: Seconds: deadlines that only a hang would reach; one for updates in which somebody stays silent.
TIMEOUT: Final = 20.0
SHORT: Final = 0.4
HANG: Final = 70.0
ELEMENTS: Final = 1 << 12


@contextlib.contextmanager
def no_hang(seconds: float = HANG) -> Iterator[None]:
    """Say where every thread is, and interrupt the main one, if the block takes longer."""

    def hung() -> None:
        faulthandler.dump_traceback(all_threads=True)
        _thread.interrupt_main()

    timer = threading.Timer(seconds, hung)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def brittle_model() -> BrittleArrays:
    """A small model that can be made to fail."""
    return BrittleArrays(sample_model(0.0, ELEMENTS).arrays)


class Fellow:
    """A follower.

    Attributes:
        subscriber, model: its own; serving: whether a thread of it stages.
        version: the highest seen of it; error: of its last step.
    """

    def __init__(self, subscriber: WeightSubscriber, model: BrittleArrays, serving: bool) -> None:
        self.subscriber, self.model, self.serving = subscriber, model, serving
        self.version = 0
        self.error: BaseException | None = None
        if serving:
            subscriber.serve()

    def take(self) -> threading.Thread:
        """Step in a thread of its own, which is returned."""
        self.error = None

        def run() -> None:
            try:
                self.subscriber.step(TIMEOUT)
            except BaseException as error:
                self.error = error

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    def poll(self) -> BaseException | None:
        """Take what is there already (staged, or begun); returns the error."""
        try:
            self.subscriber.step(0)
        except BaseException as error:
            return error
        return None

    def upset(self, how: str, at: str) -> None:
        """Raise, be interrupted, or cut the connection, at a phase of the next update."""

        def phase(name: str) -> None:
            if name != at:
                return
            self.calm()
            if how == "cut":
                self.subscriber._client.close()
                raise PeerLostError("cut on purpose")
            raise KeyboardInterrupt if how == "interrupt" else OSError("made to fail")

        self.subscriber._phase = phase  # type: ignore[method-assign]

    def calm(self) -> None:
        """Nothing is to happen any more."""
        self.subscriber._phase = lambda name: None  # type: ignore[method-assign]

    def cut(self) -> None:
        """End the connection without a word, as a process that dies."""
        self.subscriber._closed = self.subscriber._client.stopped = True
        if self.subscriber._thread is not None:
            self.subscriber._thread.join()
        self.subscriber._client.close()
        self.subscriber._closed = False  # what it holds is freed by `close`, later

    @property
    def gone(self) -> bool:
        """Whether it has lost its connection."""
        return isinstance(self.error, PeerLostError) or self.subscriber._client._context.closed


class World:
    """See the module.

    Attributes:
        publisher, source: the publisher and its model; fellows: who follows.
        committed: the value that every element has, by version.
        value: the last one that was tried; float16 holds it exactly up to 2,048.
    """

    def __init__(self, *, verify: str, aliased: bool) -> None:
        self.verify, self.aliased = verify, aliased
        self.source = brittle_model()
        self.publisher: WeightPublisher = publish_weights(
            self.source, verify=verify, aliased=aliased, timeout=TIMEOUT
        )
        self.fellows: list[Fellow] = []
        self.value = 0.0
        self.committed = {0: 0.0}

    @property
    def coordinator(self) -> Any:
        """The publisher's inside."""
        return self.publisher._coordinator

    @property
    def closed(self) -> bool:
        return self.publisher._closed

    def join(self, ticket: str, *, serving: bool, member: int = 0) -> Fellow:
        """A follower more."""
        model = brittle_model()
        with no_hang():
            subscriber = subscribe_weights(model, ticket, member=member, timeout=TIMEOUT)
        self.fellows.append(Fellow(subscriber, model, serving))
        return self.fellows[-1]

    def update(
        self,
        *,
        at: str = "",
        call: Callable[[], None] | None = None,
        idle: Collection[Fellow] = (),
        short: bool = False,
        version: int | None = None,
    ) -> BaseException | None:
        """One update with new values; checks what holds however it ends, and returns its error.

        Args:
            at, call: a phase of the publisher, and what happens there, once.
            idle: who does not step.
            short: whether the deadline is a short one.
        """
        before = {f: (f.subscriber.version, values(f.model)) for f in self.fellows}
        old, report, outcome = self.publisher.version, None, None
        self.value += 1.0
        fill(self.source, self.value)
        with no_hang(), self._arranged(at, call, short):
            steps = [f.take() for f in self.fellows if not f.serving and f not in idle]
            try:
                report = self.publisher.update(version)
            except BaseException as error:
                report, outcome = getattr(error, "report", None), error
            for thread in steps:
                thread.join(TIMEOUT + 10.0)
                assert not thread.is_alive(), "a step hangs"
        for fellow in self.fellows:
            fellow.calm()
        for fellow in idle:
            while not fellow.gone and fellow.poll() is not None:
                continue  # it finds what it slept through, and that it was called off
        if self.publisher.version > old:
            self.committed[self.publisher.version] = self.value
        self._judge(before, old, report, outcome)
        self._clear_away()
        return outcome

    def remove(self, fellow: Fellow) -> None:
        """Close it; wait until the publisher knows. The rest of its group goes with it."""
        if fellow not in self.fellows:
            return
        self.fellows.remove(fellow)
        name = fellow.subscriber.name
        fellow.subscriber.close()
        if self.closed:
            return
        everyone = self.coordinator.members.everyone()
        (member,) = [x for x in everyone if x.name == name]
        wait_for(lambda: not member.present)
        mates = {x.name for x in everyone if x.ticket is member.ticket}
        for mate in [f for f in self.fellows if f.subscriber.name in mates]:
            self.remove(mate)

    def wait_for_strangers(self) -> None:
        """Until the publisher knows that whoever is not one of the fellows has gone."""
        names = {f.subscriber.name for f in self.fellows}
        members = self.coordinator.members
        wait_for(lambda: all(x.name in names for x in members.everyone() if x.present))

    def close(self) -> None:
        """The publisher first; everyone who follows has to hear of it."""
        with no_hang():
            self.publisher.close()
            for fellow in self.fellows:
                deadline = time.monotonic() + TIMEOUT
                while not isinstance(error := fellow.poll(), PeerLostError):
                    assert time.monotonic() < deadline, f"it was never told: {error!r}"
                    time.sleep(0.005)
                self.check_live(fellow)
                fellow.subscriber.close()
        self.fellows = []

    def abandon(self) -> None:
        """Close everything, in whatever state."""
        with no_hang():
            for fellow in self.fellows:
                fellow.subscriber.close()
            self.publisher.close()

    # --- what holds ----------------------------------------------------------------------------

    def check(self) -> None:
        """Between updates: each follower on its own, and both sides' tables."""
        assert self.publisher.version == max(self.committed)
        table = {x.name: x for x in self.publisher.members}
        for fellow in self.fellows:
            self.check_live(fellow)
            member, version = table[fellow.subscriber.name], fellow.subscriber.version
            if member.state == "joined":
                assert member.version >= version
                assert fellow.serving or member.version == version, "the two sides disagree"

    def check_live(self, fellow: Fellow) -> None:
        """Its live weights are of one version, the one it reports; or it serves nothing."""
        subscriber = fellow.subscriber
        version = subscriber.version
        assert version >= fellow.version, "a version went back"
        fellow.version = version
        if subscriber.state == "quarantined":
            if not fellow.serving:  # entering would put in place what was staged, and so heal it
                refused = False
                try:
                    with subscriber.use():
                        pass
                except QuarantinedError:
                    refused = True
                assert refused, "it is quarantined, and was used"
            return
        assert values(fellow.model) == {self.committed[version]}, f"not those of {version}"
        assert subscriber.state == ("current" if version else "waiting")

    def _judge(
        self,
        before: dict[Fellow, tuple[int, set[float]]],
        old: int,
        report: TransferReport | None,
        outcome: BaseException | None,
    ) -> None:
        new = self.publisher.version
        assert new >= old, "the publisher's version went back"
        assert (new > old) == (report is not None), f"version {old} to {new}, and: {outcome!r}"
        told = {r.name: r for r in report.members} if report is not None else {}
        for fellow, (version, live) in before.items():
            now, said = fellow.subscriber.version, told.get(fellow.subscriber.name)
            if report is None:
                assert now == version, "an update that was called off moved a version"
                assert values(fellow.model) == live, "an update that was called off wrote"
            elif said is not None and said.state == "committed":
                assert now == new == said.version, "reported as committed, and is not there"
            elif said is not None and said.state != "staged" and now == version:
                wait_for(lambda f=fellow: _serves_nothing_old(f, new))  # type: ignore[misc]
        if outcome is not None:
            expected = (ParallelKitError, OSError, MemoryError)
            assert isinstance(outcome, expected), f"no error for a user: {outcome!r}"
        if report is not None:
            assert isinstance(outcome, PartialCommitError) == bool(report.quarantined)

    def _clear_away(self) -> None:
        """Remove who has lost its connection."""
        lost: set[str] = set()
        if not self.closed:
            lost = {x.name for x in self.publisher.members if x.state in ("lost", "left")}
        for fellow in [f for f in self.fellows if f.gone or f.subscriber.name in lost]:
            self.remove(fellow)

    @contextlib.contextmanager
    def _arranged(self, at: str, call: Callable[[], None] | None, short: bool) -> Iterator[None]:
        coordinator = self.coordinator
        settings = coordinator.settings

        def hook(phase: str) -> None:
            if phase == at and call is not None:
                coordinator._phase_hook = lambda phase: None
                call()

        coordinator._phase_hook = hook
        if short:
            coordinator.settings = attrs.evolve(settings, timeout=SHORT)
        try:
            yield
        finally:
            coordinator.settings = settings
            coordinator._phase_hook = lambda phase: None


def _serves_nothing_old(fellow: Fellow, new: int) -> bool:
    """Of one reported as lost or quarantined; its own thread may be a moment behind.

    Where an acknowledgement was lost, it is at the new version, and the publisher cannot know.
    """
    there = fellow.serving and fellow.subscriber._placement.staged_version == new
    return there or fellow.gone or fellow.subscriber.state == "quarantined"


def wait_for(look: Callable[[], bool]) -> None:
    """Until it is true."""
    deadline = time.monotonic() + TIMEOUT
    while not look():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.002)
