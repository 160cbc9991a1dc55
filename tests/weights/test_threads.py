"""Calls from several threads: one thread follows the publisher, and the others are told so."""

from __future__ import annotations

import os
import threading
import time
import warnings
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


def in_a_thread(call: Callable[[], Any]) -> Any:
    """What a call gives or raises in another thread, which has to end."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(call())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, name="another", daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive(), "it hangs"
    return found[0]


def test_a_use_left_in_another_thread_is_an_error_there_and_stops_nobody(bench):
    bench.publish()
    follower = bench.follow()
    bench.update()
    subscriber = follower.subscriber
    block = subscriber.use()
    in_a_thread(lambda: block.__enter__())  # and that thread has ended
    with subscriber.use():
        assert values(follower.model) == {1.0}
    error = None
    try:
        block.__exit__(None, None, None)
    except StateError as raised:
        error = raised
    assert "entered in thread 'another' and left in 'MainThread'" in str(error)
    block = subscriber.use()
    block.__enter__()
    error = in_a_thread(lambda: block.__exit__(None, None, None))
    assert "entered in thread 'MainThread' and left in 'another'" in str(error)
    assert isinstance(error, StateError)
    fill(bench.source, 2.0)
    bench.update()
    assert subscriber.version == 2
    assert values(follower.model) == {2.0}


def test_a_use_keeps_an_update_and_other_uses_of_other_threads_waiting(bench):
    bench.publish()
    follower = bench.follow()
    bench.update()
    subscriber, order = follower.subscriber, []
    subscriber.serve()
    fill(bench.source, 2.0)
    with subscriber.use():
        bench.publisher.update()

        def other() -> None:
            with subscriber.use():
                order.append(values(follower.model))

        thread = threading.Thread(target=other, daemon=True)
        thread.start()
        with subscriber.use():
            time.sleep(0.2)
            assert (order, values(follower.model), subscriber.version) == ([], {1.0}, 1)
    thread.join(30)
    assert (order, subscriber.version) == ([{2.0}], 2)


def test_a_forked_child_does_not_wait_for_a_use_of_its_parent(bench):
    bench.publish()
    follower = bench.follow()
    bench.update()
    entered, leave = threading.Event(), threading.Event()

    def use() -> None:
        with follower.subscriber.use():
            entered.set()
            leave.wait(30)

    thread = threading.Thread(target=use, daemon=True)
    thread.start()
    assert entered.wait(30)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
        child = os.fork()
    if child == 0:
        code = 1
        try:
            follower.subscriber.use().__enter__()
        except StateError as error:
            code = 0 if "forked child" in str(error) else 2
        finally:
            os._exit(code)
    wait_until(lambda: os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    leave.set()
    thread.join(30)
