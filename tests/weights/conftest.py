from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from parallelkit.testing.arrays import Arrays
from parallelkit.testing.meeting import meet, on_ranks
from parallelkit.testing.parts import PartsSink, PartsSource
from parallelkit.testing.peer import sample_model
from parallelkit.testing.shards import random_values, slices
from parallelkit.weights import (
    WeightPublisher,
    WeightSubscriber,
    publish_weights,
    subscribe_weights,
)
from parallelkit.weights.layout import Mesh, ShardLayout
from parallelkit.weights.manifest import Manifest, TensorSpec

SECONDS = 10.0


class Follower:
    """A subscriber that steps in a thread of this process, one step for each `step()`."""

    def __init__(self, subscriber: WeightSubscriber, model: Arrays) -> None:
        self.subscriber = subscriber
        self.model = model
        self.error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def step(self, timeout: float = 10.0) -> None:
        """Start one step."""

        def run() -> None:
            try:
                self.subscriber.step(timeout)
            except BaseException as error:
                self.error = error

        self.error = None
        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def done(self, timeout: float = 15.0) -> BaseException | None:
        """Wait for the step's end; returns its error."""
        assert self._thread is not None
        self._thread.join(timeout)
        assert not self._thread.is_alive(), "a step is still running"
        return self.error


class Bench:
    """A publisher and followers, all closed at the end."""

    def __init__(self) -> None:
        self.stack = contextlib.ExitStack()
        self.source = sample_model(1.0)
        self.publisher: WeightPublisher | None = None
        self.followers: list[Follower] = []

    def publish(self, **options: Any) -> WeightPublisher:
        options = {"timeout": 5.0} | options
        self.publisher = self.stack.enter_context(publish_weights(self.source, **options))
        return self.publisher

    def follow(self, ticket: str | None = None, model: Arrays | None = None, **kw: Any) -> Follower:
        assert self.publisher is not None
        model = sample_model() if model is None else model
        ticket = self.publisher.new_ticket() if ticket is None else ticket
        subscriber = self.stack.enter_context(subscribe_weights(model, ticket, timeout=5.0, **kw))
        follower = Follower(subscriber, model)
        self.followers.append(follower)
        return follower

    def wrap(self, subscriber: WeightSubscriber, model: Arrays) -> Follower:
        return Follower(subscriber, model)

    def update(self, *followers: Follower, version: int | None = None) -> Any:
        """One update in which the followers (default: all) step."""
        assert self.publisher is not None
        chosen = followers or tuple(self.followers)
        for follower in chosen:
            follower.step()
        try:
            return self.publisher.update(version)
        finally:
            for follower in chosen:
                follower.done()


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    with bench.stack:
        yield bench


@pytest.fixture
def spy() -> Callable[[Any, str, Callable[[], None]], None]:
    """Call something once when a publisher passes a phase."""

    def install(publisher: Any, at: str, call: Callable[[], None]) -> None:
        def hook(phase: str) -> None:
            if phase == at:
                publisher._coordinator._phase_hook = lambda phase: None
                call()

        publisher._coordinator._phase_hook = hook

    return install


class Job:
    """A publisher whose ranks are threads, and its members, each stepping in a thread."""

    def __init__(self, manifest, *, seed=0, **options):
        self.manifest = manifest
        self.values = random_values(manifest, seed)
        world = manifest.mesh.size if manifest.mesh is not None else 1
        self.groups = meet(world, timeout=SECONDS)
        self.sources = [PartsSource(manifest, self.values, rank) for rank in range(world)]
        self.options = {"timeout": SECONDS} | options
        self.publishers = self.each(self._publish)
        self.members = []

    def _publish(self, group):
        return publish_weights(self.sources[group.rank], group=group, **self.options)

    @property
    def lead(self):
        return self.publishers[0]

    def each(self, work):
        """Results of all ranks; raises the first error."""
        results = self.all(work)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    def all(self, work):
        return on_ranks(self.groups, work)

    def join(self, needs, indirect=frozenset()):
        sink = PartsSink(self.manifest, needs, frozenset(indirect))
        ticket = self.lead.new_ticket()
        member = subscribe_weights(sink, ticket, timeout=SECONDS, partial=True)
        self.members.append((member, sink, needs))
        return member, sink

    def change(self, seed):
        """Give every tensor other bytes."""
        for mine, new in zip(self.values, random_values(self.manifest, seed), strict=True):
            mine[...] = new

    def update(self, version=None):
        """One update in which all members step: each rank's report or error, members' errors."""
        errors = {}

        def step(number, member):
            try:
                member.step(SECONDS)
            except Exception as error:
                errors[number] = error

        threads = [
            threading.Thread(target=step, args=(i, member), daemon=True)
            for i, (member, *_) in enumerate(self.members)
        ]
        for thread in threads:
            thread.start()
        results = self.all(lambda group: self.publishers[group.rank].update(version))
        for thread in threads:
            thread.join(2 * SECONDS)
        return results, errors

    def check(self):
        """Every member holds what it keeps of the present values, bit for bit."""
        for _, sink, needs in self.members:
            for i, (value, kept) in enumerate(zip(self.values, sink.kept, strict=True)):
                box = needs[i]
                expected = b"" if box is None else value[slices(box)].tobytes()
                assert kept.tobytes() == expected, self.manifest.unique[i]

    def close(self):
        for member, *_ in self.members:
            member.close()
        for publisher in self.publishers:
            publisher.close()


@pytest.fixture
def job():
    with contextlib.ExitStack() as stack:

        def make(*args, **options):
            return stack.enter_context(contextlib.closing(Job(*args, **options)))

        yield make


def _spread(rows=8, columns=6, degree=2):
    """`w` by rows, `c` by columns, `norm` everywhere, over `degree` ranks."""
    return Manifest(
        [
            TensorSpec(
                name="w", dtype="float32", shape=(rows, columns), layout=ShardLayout([("x", 0)])
            ),
            TensorSpec(
                name="c", dtype="int16", shape=(rows, columns), layout=ShardLayout([("x", 1)])
            ),
            TensorSpec(name="norm", dtype="float64", shape=(columns,)),
        ],
        Mesh(("x",), (degree,)),
    )


@pytest.fixture
def spread():
    return _spread
