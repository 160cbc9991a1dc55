from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from parallelkit.testing.arrays import Arrays
from parallelkit.testing.peer import sample_model
from parallelkit.weights import (
    WeightPublisher,
    WeightSubscriber,
    publish_weights,
    subscribe_weights,
)


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
