"""One thread, one job after the other, and nobody waits longer than asked."""

from __future__ import annotations

import threading
import time

import pytest
from parallelkit_hccl.errors import HcclStateError, HcclTimeoutError
from parallelkit_hccl.worker import Worker


def soon(seconds: float = 60.0) -> float:
    return time.monotonic() + seconds


def test_work_is_done_in_one_other_thread():
    worker = Worker("w")
    names = [worker.run("x", lambda: threading.current_thread(), soon()) for _ in range(3)]
    assert len(set(names)) == 1
    assert names[0] is not threading.current_thread()
    assert (names[0].name, names[0].daemon) == ("w", True)
    worker.stop()
    assert not names[0].is_alive()


def test_errors_belong_to_who_waits():
    worker = Worker("w")
    with pytest.raises(ZeroDivisionError):
        worker.run("dividing", lambda: 1 / 0, soon())
    assert worker.run("adding", lambda: 1 + 1, soon()) == 2
    worker.stop()


def test_a_job_that_does_not_end_is_given_up():
    worker, gate = Worker("w"), threading.Event()
    with pytest.raises(HcclTimeoutError, match="waiting for Godot did not end"):
        worker.run("waiting for Godot", gate.wait, soon(0.05))
    assert worker.stuck == "waiting for Godot"
    with pytest.raises(HcclStateError, match="more is impossible: .* still in waiting for Godot"):
        worker.run("more", lambda: None, soon())
    worker.stop()
    gate.set()  # the thread ends; the fixture of all tests looks


def test_a_deadline_in_the_past():
    worker, gate = Worker("w"), threading.Event()
    with pytest.raises(HcclTimeoutError):
        worker.run("too late", gate.wait, soon(-1))
    gate.set()
    worker.stop()


def test_nothing_after_the_end():
    worker = Worker("w")
    worker.stop()
    with pytest.raises(HcclStateError, match="was stopped"):
        worker.run("more", lambda: None, soon())
    worker.stop()


def test_callers_in_several_threads_wait_for_each_other():
    worker, gate, began = Worker("w"), threading.Event(), threading.Event()

    def first() -> None:
        began.set()
        gate.wait(60)

    caller = threading.Thread(target=lambda: worker.run("the first", first, soon()))
    caller.start()
    assert began.wait(60)
    with pytest.raises(HcclTimeoutError, match="the second did not begin .* after the first"):
        worker.run("the second", lambda: 2, soon(0.05))
    gate.set()
    assert worker.run("the third", lambda: 3, soon()) == 3
    caller.join(60)
    worker.stop()
