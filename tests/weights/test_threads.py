"""Calls from several threads: one thread follows the publisher, and the others are told so."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from parallelkit.errors import StateError
from parallelkit.testing.peer import fill, values


def wait_until(true: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("call", ["step", "serve"])
def test_one_thread_at_a_time_hears_the_publisher(bench, call):
    publisher = bench.publish()
    follower = bench.follow()
    follower.step(30)
    subscriber = follower.subscriber
    wait_until(lambda: subscriber._stepping)
    with pytest.raises(StateError, match=rf"{call}\(\) while step\(\) waits in another thread"):
        getattr(subscriber, call)()
    # It took nothing from the one that waits.
    publisher.update()
    assert follower.done() is None
    assert (subscriber.version, values(follower.model)) == (1, {1.0})
    fill(bench.source, 2.5)
    if call == "serve":
        subscriber.serve()
        publisher.update()
        assert subscriber.step() == 2
    else:
        bench.update()
    assert (subscriber.version, values(follower.model)) == (2, {2.5})
