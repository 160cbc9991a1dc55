"""The client of an `AsyncLLM`, with an engine that is made up, on a loop in another thread."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fake_engine import STEPS, FakeEngine
from parallelkit_vllm import commit as committing
from parallelkit_vllm import door
from parallelkit_vllm.clients import asynchronous
from parallelkit_vllm.clients.asynchronous import AsyncEngine

sys.path.pop(0)

from parallelkit.errors import (
    EngineCommitError,
    EngineError,
    PeerLostError,
    QuarantinedError,
    StateError,
    UnsupportedFeatureError,
    UpdateTimeoutError,
)
from parallelkit.protocols import EngineClient, ThreadBoundClient

SECONDS = 10.0


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(asynchronous, "check_version", lambda: "0.32.0")
    for module in (committing, asynchronous):
        monkeypatch.setattr(module, "RECOVERY_SECONDS", 0.4)
    monkeypatch.setattr("parallelkit_vllm.service.RECOVERY_SECONDS", 0.4)
    monkeypatch.setattr(asynchronous, "_LOOP_SECONDS", 0.3)
    monkeypatch.setattr(asynchronous, "_QUARANTINE_SECONDS", 0.5)
    monkeypatch.setattr(door, "_LEAVING_SECONDS", 0.3)


@pytest.fixture
def loop():
    made = asyncio.new_event_loop()
    thread = threading.Thread(target=made.run_forever)
    thread.start()
    yield made
    if not made.is_closed():
        asyncio.run_coroutine_threadsafe(_end(), made).result(SECONDS)
        made.call_soon_threadsafe(made.stop)
        thread.join(SECONDS)
        made.close()


def said(step):
    """What errors call a step."""
    return step.removesuffix("_generation")


async def _end():
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def fake(members=1, backend="parallelkit"):
    engine = FakeEngine(members)
    chosen = SimpleNamespace(backend=backend) if backend else None
    engine.vllm_config.weight_transfer_config = chosen
    return engine


@pytest.fixture
def attached(loop):
    """A client that is attached, and its engine."""

    def make(members=1, **options):
        engine = fake(members)
        client = AsyncEngine(engine, {"loop": loop, "name": "rollouts", **options})
        client.init("pk1.ticket", timeout=SECONDS)
        engine.calls.clear()
        return client, engine

    return make


class Stream:
    """A request that collects (token, weights)."""

    def __init__(self, client, loop, count):
        self.got = []
        self._client = client
        self._count = count
        self._future = asyncio.run_coroutine_threadsafe(self._run(), loop)

    async def _run(self):
        async for item in self._client.handle.generate(self._count):
            self.got.append(item)

    def wait_for(self, count):
        deadline = time.monotonic() + SECONDS
        while len(self.got) < count:
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def end(self):
        self._future.result(SECONDS)
        return self.got


def test_it_is_a_client_that_is_bound_to_a_thread(attached):
    client, _ = attached(4)
    assert isinstance(client, EngineClient)
    assert isinstance(client, ThreadBoundClient)
    assert (client.name, client.members) == ("rollouts", 4)
    assert (client.handle.version, client.handle.state) == (0, "serving")


def test_a_commit_is_whole(attached):
    client, engine = attached(cache="keep", pause="wait")
    client.begin(1, timeout=SECONDS)
    done = client.commit(1, timeout=SECONDS)
    assert engine.calls == [s for s in STEPS if s != "reset_prefix_cache"]
    assert engine.arguments["pause_generation"] == {"mode": "wait", "clear_cache": False}
    assert engine.arguments["update_weights"]["version"] == 1
    assert engine.arguments["init_weight_transfer_engine"]["ticket"] == "pk1.ticket"
    assert (done.cache, done.weight_version) == ("kept", "1")
    assert client.handle.version == client.version(timeout=SECONDS) == 1


def test_requests_go_on_with_the_new_weights(attached, loop):
    client, _ = attached()
    streams = [Stream(client, loop, 60) for _ in range(5)]
    for stream in streams:
        stream.wait_for(10)
    client.begin(7, timeout=SECONDS)
    client.commit(7, timeout=SECONDS)
    for stream in streams:
        got = stream.end()
        assert [token for token, _ in got] == list(range(60))
        weights = [weights for _, weights in got]
        assert weights == sorted(weights)
        assert set(weights) == {0, 7}


@pytest.mark.parametrize("step", STEPS)
def test_a_step_that_fails_is_quarantine_and_the_engine_runs(attached, loop, step):
    client, engine = attached()
    stream = Stream(client, loop, 100_000)
    stream.wait_for(3)
    client.begin(1, timeout=SECONDS)
    engine.fail[step] = RuntimeError("made to fail")
    with pytest.raises(EngineCommitError, match=f"rollouts: {said(step)} failed: made to fail"):
        client.commit(1, timeout=SECONDS)
    client.quarantine("made to fail")
    with contextlib.suppress(QuarantinedError):  # by the door; else vLLM's own abort ended it
        assert stream.end()[-1] == ("abort", None)
    assert not engine.paused
    assert not engine.errored
    assert client.handle.state == "quarantined"
    with pytest.raises(QuarantinedError, match="made to fail"):
        Stream(client, loop, 3).end()
    client.begin(2, timeout=SECONDS)
    client.commit(2, timeout=SECONDS)
    assert (client.handle.state, client.handle.version) == ("serving", 2)
    assert Stream(client, loop, 2).end() == [(0, 2), (1, 2)]


@pytest.mark.parametrize("step", STEPS)
def test_a_step_that_hangs_is_given_up_at_the_deadline(attached, loop, step):
    client, engine = attached()
    client.begin(1, timeout=SECONDS)
    released = asyncio.Event()
    engine.hang[step] = released
    began = time.monotonic()
    with pytest.raises(UpdateTimeoutError, match=f"rollouts: {said(step)} did not end") as caught:
        client.commit(1, timeout=0.3)
    assert time.monotonic() - began < 5.0
    assert caught.value.missing == ("rollouts",)
    client.quarantine("too slow")
    with pytest.raises(StateError, match="has not returned yet|is under way"):
        client.begin(2, timeout=0.5)
    loop.call_soon_threadsafe(released.set)
    deadline = time.monotonic() + SECONDS
    while True:  # what was left behind works itself off
        try:
            client.begin(2, timeout=SECONDS)
            break
        except StateError:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    if engine.open:  # as the worker of a real engine: the update that hung is closed
        engine.open = False
    client.commit(2, timeout=SECONDS)
    assert client.handle.state == "serving"
    assert not engine.paused


def test_a_dead_engine_is_lost(attached):
    client, engine = attached()
    engine.errored = True
    for call in (
        lambda: client.begin(1, timeout=SECONDS),
        lambda: client.commit(1, timeout=SECONDS),
    ):
        with pytest.raises(PeerLostError, match="rollouts is dead: the engine core died"):
            call()
    client.quarantine("dead")  # raises nothing
    assert client.handle.state == "quarantined"


def test_an_engine_that_dies_in_a_step_is_lost(attached):
    client, engine = attached()
    client.begin(1, timeout=SECONDS)

    class Dies(RuntimeError):
        def __str__(self):
            engine.errored = True  # known a moment after the call has failed
            return "cancelled"

    engine.fail["update_weights"] = Dies()
    with pytest.raises(PeerLostError, match="rollouts died"):
        client.commit(1, timeout=SECONDS)


def test_asleep(attached):
    client, engine = attached()
    engine.sleeping = True
    with pytest.raises(StateError, match="rollouts is asleep or paused"):
        client.begin(1, timeout=SECONDS)


def test_an_abort_leaves_everything_as_it_was(attached, loop):
    client, engine = attached()
    client.begin(1, timeout=SECONDS)
    client.abort(1, "another engine failed", timeout=SECONDS)
    assert engine.calls == []
    assert Stream(client, loop, 1).end() == [(0, 0)]


def test_the_loops_own_thread_is_told_what_to_write(attached, loop):
    client, _ = attached()
    client.check_thread()

    async def wrong():
        client.check_thread()

    with pytest.raises(StateError, match="await asyncio.to_thread"):
        asyncio.run_coroutine_threadsafe(wrong(), loop).result(SECONDS)


def test_a_loop_that_stands_still_is_named(attached, loop):
    client, _ = attached()
    go_on = threading.Event()
    loop.call_soon_threadsafe(go_on.wait)
    try:
        with pytest.raises(UpdateTimeoutError, match="something in it blocks"):
            client.begin(1, timeout=0.2)
        client.quarantine("gone")
        assert client.handle.state == "quarantined"
        assert "could not be ended" in client.handle.reason
    finally:
        go_on.set()


def test_a_loop_that_has_ended(attached, loop):
    client, _ = attached()
    asyncio.run_coroutine_threadsafe(_end(), loop).result(SECONDS)
    loop.call_soon_threadsafe(loop.stop)
    deadline = time.monotonic() + SECONDS
    while loop.is_running():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    loop.close()
    with pytest.raises(PeerLostError, match="its event loop has ended"):
        client.begin(1, timeout=1.0)
    client.close()


def test_a_commit_that_was_given_up_does_not_lift_a_quarantine(attached, loop):
    client, engine = attached()
    client.begin(1, timeout=SECONDS)
    released = asyncio.Event()
    engine.hang["update_weights"] = released
    commit = threading.Thread(target=lambda: client.commit(1, timeout=SECONDS))
    commit.start()
    deadline = time.monotonic() + SECONDS
    while "update_weights" not in engine.calls:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    client.quarantine("given up")
    loop.call_soon_threadsafe(released.set)
    commit.join(SECONDS)
    assert client.handle.state == "quarantined"
    with pytest.raises(QuarantinedError, match="given up"):
        Stream(client, loop, 1).end()


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"caches": "reset"}, UnsupportedFeatureError, "did you mean 'cache'"),
        ({"cache": "clear"}, EngineError, "'reset', 'keep'"),
        ({"pause": True}, EngineError, "'keep', 'wait', 'abort'"),
        ({"name": "a\nb"}, EngineError, "printable"),
        ({"loop": 3}, EngineError, "it is an asyncio event loop"),
        ({"loop": None}, EngineError, "loop=asyncio.get_running_loop"),
        ({"token": "x"}, UnsupportedFeatureError, "no option 'token'"),
    ],
)
def test_options(loop, options, error, text):
    engine = fake()
    with pytest.raises(error, match=text):
        AsyncEngine(engine, {"loop": loop} | options)
    assert engine.calls == []


@pytest.mark.parametrize("backend", [None, "nccl"])
def test_an_engine_of_another_backend(loop, backend):
    with pytest.raises(EngineError, match='start it with weight_transfer_config={"backend"'):
        AsyncEngine(fake(backend=backend), {"loop": loop})


def test_the_loop_is_known_once_there_was_a_request(loop):
    engine = fake()
    engine.output_handler = asyncio.run_coroutine_threadsafe(_task(), loop).result(SECONDS)
    AsyncEngine(engine, {}).init("ticket", timeout=SECONDS)
    assert engine.calls == ["init_weight_transfer_engine"]


async def _task():
    return asyncio.ensure_future(asyncio.sleep(60))
