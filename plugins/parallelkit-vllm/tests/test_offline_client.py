"""The client of an `LLM`, with one that is made up: its calls block, and never end once it died."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from parallelkit_vllm import commit as committing
from parallelkit_vllm.clients import offline
from parallelkit_vllm.clients.offline import OfflineEngine

from parallelkit.errors import (
    EngineCommitError,
    EngineError,
    PeerLostError,
    QuarantinedError,
    StateError,
    UnsupportedFeatureError,
    UpdateTimeoutError,
)
from parallelkit.protocols import EngineClient

SECONDS = 10.0
STEPS = (
    "pause_scheduler",
    "start_weight_update",
    "update_weights",
    "finish_weight_update",
    "reset_prefix_cache",
    "get_weight_version",
    "resume_scheduler",
)
SAID = {"pause_scheduler": "pause", "resume_scheduler": "resume"}


class FakeCore:
    """vLLM's client of an engine's process; `dies` and `hangs` name the call in which it does."""

    def __init__(self):
        self.resources = SimpleNamespace(engine_dead=False)
        self.utility_results = {}
        self.calls = []
        self.fails = {}
        self.dies = ""
        self.hangs = ""
        self.released = threading.Event()
        self.paused = self.open = False
        self.served = "default"
        self.weights = 0
        self._users = 0

    def do(self, name, *arguments):
        self._users += 1
        assert self._users == 1 or self.hangs, "this client is not thread safe"
        try:
            self._do(name, *arguments)
        finally:
            self._users -= 1

    def _do(self, name, *arguments):
        self.calls.append((name, *arguments))
        if name == self.dies:
            self.resources.engine_dead = True
        if self.resources.engine_dead:
            waits = self.utility_results[len(self.calls)] = Future()  # which vLLM never ends
            waits.result()
        if name == self.hangs:
            self.released.wait()
        if name in self.fails:
            raise self.fails.pop(name)
        if name in ("pause_scheduler", "resume_scheduler"):
            self.paused = name == "pause_scheduler"

    def is_sleeping(self):
        self.do("is_sleeping")
        return self.paused

    def call_utility(self, name, *arguments):
        self.do(name, *arguments)

    def reset_prefix_cache(self, reset_running_requests=False):
        self.do("reset_prefix_cache", reset_running_requests)
        return True

    def get_weight_version(self):
        self.do("get_weight_version")
        return self.served


class FakeLLM:
    def __init__(self, backend="parallelkit", replicas=1, workers=1):
        core = FakeCore()
        self.core = core
        parallel = SimpleNamespace(
            world_size=workers, data_parallel_size=replicas, world_size_across_dp=workers * replicas
        )
        config = SimpleNamespace(
            parallel_config=parallel,
            weight_transfer_config=SimpleNamespace(backend=backend) if backend else None,
        )
        self.llm_engine = SimpleNamespace(engine_core=core, vllm_config=config)
        self.generating = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()

    def init_weight_transfer_engine(self, request):
        self.core.do("init_weight_transfer_engine", request["init_info"])

    def start_weight_update(self):
        self.core.do("start_weight_update")

    def update_weights(self, request):
        self.core.do("update_weights", request["update_info"])
        self.core.weights = request["update_info"]["version"]

    def finish_weight_update(self, weight_version=None):
        self.core.do("finish_weight_update", weight_version)
        self.core.served = weight_version

    def generate(self, *prompts):
        assert not self.core.paused
        self.generating.set()
        assert self.go_on.wait(SECONDS)
        self.generating.clear()
        return [(prompt, self.core.weights) for prompt in prompts]

    chat = generate


class OldLLM(FakeLLM):
    """As vLLM 0.25, without weight versions."""

    def __init__(self):
        super().__init__()
        old = SimpleNamespace(
            **{
                name: getattr(self.core, name)
                for name in ("resources", "is_sleeping", "call_utility", "reset_prefix_cache")
            }
        )
        self.llm_engine.engine_core = old

    def finish_weight_update(self):
        self.core.do("finish_weight_update")


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(offline, "check_version", lambda: "0.32.0")
    monkeypatch.setattr(committing, "RECOVERY_SECONDS", 0.4)
    monkeypatch.setattr(offline, "_HALT_SECONDS", 0.4)


@pytest.fixture
def attached():
    made = []

    def make(llm=None, **options):
        llm = llm or FakeLLM()
        made.append(llm)
        client = OfflineEngine(llm, {"name": "rollouts", **options})
        client.init("pk1.ticket", timeout=SECONDS)
        llm.core.calls.clear()
        return client, llm.core, llm

    yield make
    for llm in made:
        llm.core.released.set()  # threads that a dead engine left behind


def update(client, version):
    client.begin(version, timeout=SECONDS)
    return client.commit(version, timeout=SECONDS)


def in_thread(call):
    """A thread that calls; its result or error is in `.said`."""
    thread = threading.Thread(target=lambda: thread.said.append(_said(call)))
    thread.said = []
    thread.start()
    return thread


def _said(call):
    try:
        return call()
    except Exception as error:
        return error


def test_a_commit_is_whole(attached):
    client, core, llm = attached(cache="keep", pause="abort")
    assert isinstance(client, EngineClient)
    client.begin(3, timeout=SECONDS)
    done = client.commit(3, timeout=SECONDS)
    assert [name for name, *_ in core.calls] == [
        "is_sleeping",
        "is_sleeping",
        *(s for s in STEPS if s != "reset_prefix_cache"),
    ]
    assert ("pause_scheduler", "abort", False) in core.calls
    assert ("finish_weight_update", "3") in core.calls
    assert (done.cache, done.weight_version) == ("kept", "3")
    assert (client.handle.version, client.handle.state) == (3, "serving")
    assert client.version(timeout=SECONDS) == 3
    assert client.handle.generate("a") == client.handle.chat("a") == [("a", 3)]
    assert client.handle.llm is llm


def test_the_ticket_is_delivered():
    llm = FakeLLM(workers=2)
    client = OfflineEngine(llm, {})
    assert client.members == 2
    assert "(LLM)" in client.name
    client.init("pk1.ticket", timeout=8.0)
    (_, info) = llm.core.calls[-1]
    assert info["ticket"] == "pk1.ticket"
    assert 4.0 < info["timeout"] < 8.0


def test_a_vllm_without_weight_versions(attached):
    client, core, _ = attached(OldLLM())
    done = update(client, 1)
    assert ("finish_weight_update",) in core.calls
    assert done.weight_version == ""
    assert "no weight version" in done.notes[0]
    assert client.version(timeout=SECONDS) == 1


@pytest.mark.parametrize("step", STEPS)
def test_a_step_that_fails_is_quarantine_and_the_engine_runs(attached, step):
    client, core, _ = attached()
    core.fails[step] = OSError("made to fail")
    with pytest.raises(EngineCommitError, match=f"rollouts: {SAID.get(step, step)} failed: made"):
        update(client, 1)
    assert client.handle.state == "quarantined"
    client.quarantine("made to fail")
    assert not core.paused
    with pytest.raises(QuarantinedError, match="rollouts is quarantined .*: made to fail"):
        client.handle.generate("a")
    update(client, 2)
    assert client.handle.generate("a") == [("a", 2)]


@pytest.mark.parametrize("step", STEPS)
def test_a_step_that_hangs_is_given_up_at_the_deadline(attached, step):
    client, core, _ = attached()
    core.hangs = step
    client.begin(1, timeout=SECONDS)
    began = time.monotonic()
    with pytest.raises(UpdateTimeoutError, match=f"{SAID.get(step, step)} did not end") as caught:
        client.commit(1, timeout=0.3)
    assert time.monotonic() - began < 5.0
    assert caught.value.missing == ("rollouts",)
    client.quarantine("too slow")
    assert time.monotonic() - began < 5.0
    with pytest.raises(StateError, match=f"{step} of an earlier call has not returned"):
        client.begin(2, timeout=SECONDS)
    core.hangs = ""
    core.released.set()
    deadline = time.monotonic() + SECONDS
    while client._engine.hanging:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    update(client, 2)
    assert client.handle.generate("a") == [("a", 2)]


@pytest.mark.parametrize("step", ["is_sleeping", *STEPS])
def test_t10_an_engine_that_dies_is_lost_at_once(attached, step):
    client, core, _ = attached()
    core.dies = step
    began = time.monotonic()
    with pytest.raises(PeerLostError, match="rollouts") as caught:
        update(client, 1)
    assert time.monotonic() - began < 3.0
    assert caught.value.peers == ("rollouts",)
    deadline = time.monotonic() + SECONDS  # and the thread that waited for it is let go
    while any(thread.name == f"parallelkit {step}" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    client.quarantine("dead")
    with pytest.raises(PeerLostError, match="rollouts is dead"):
        client.begin(2, timeout=SECONDS)


def test_an_engine_that_sleeps(attached):
    client, core, _ = attached()
    core.paused = True
    with pytest.raises(StateError, match="asleep or paused"):
        client.begin(1, timeout=SECONDS)
    core.paused = False
    assert client.handle.generate("a") == [("a", 0)], "it is given back"


def test_begin_waits_for_who_generates(attached):
    client, _, llm = attached()
    llm.go_on.clear()
    user = in_thread(lambda: client.handle.generate("a"))
    assert llm.generating.wait(SECONDS)
    with pytest.raises(UpdateTimeoutError, match="waited 0.2 s for generate to end"):
        client.begin(1, timeout=0.2)
    trainer = in_thread(lambda: update(client, 1))
    llm.go_on.set()
    for thread in (user, trainer):
        thread.join(SECONDS)
    assert user.said == [[("a", 0)]]
    assert trainer.said[0].weight_version == "1"


@pytest.mark.parametrize("end", ["commit", "abort", "quarantine"])
def test_who_generates_waits_for_the_end_of_an_update(attached, end):
    client, _, llm = attached()
    client.begin(1, timeout=SECONDS)
    user = in_thread(lambda: client.handle.generate("a"))
    assert not llm.generating.wait(0.1)
    if end == "commit":
        client.commit(1, timeout=SECONDS)
    elif end == "abort":
        client.abort(1, "another failed", timeout=SECONDS)
    else:
        client.quarantine("a worker lost the bytes")
    user.join(SECONDS)
    if end == "quarantine":
        assert isinstance(user.said[0], QuarantinedError)
    else:
        assert user.said == [[("a", int(end == "commit"))]]


def test_patience_ends(attached):
    client, _, _ = attached()
    client.handle.patience = 0.1
    client.begin(1, timeout=SECONDS)
    with pytest.raises(UpdateTimeoutError, match="generate waited 0.1 s for an update to end"):
        client.handle.generate("a")


def test_two_threads_generate_one_after_the_other(attached):
    client, _, llm = attached()
    llm.go_on.clear()
    users = [in_thread(lambda i=i: client.handle.generate(i)) for i in range(3)]
    assert llm.generating.wait(SECONDS)
    llm.go_on.set()
    for user in users:
        user.join(SECONDS)
    assert sorted(user.said[0] for user in users) == [[(i, 0)] for i in range(3)]


def test_a_commit_that_was_given_up_does_not_lift_a_quarantine(attached):
    client, core, _ = attached()
    core.hangs = "update_weights"
    client.begin(1, timeout=SECONDS)
    trainer = in_thread(lambda: client.commit(1, timeout=SECONDS))
    deadline = time.monotonic() + SECONDS
    while not any(name == "update_weights" for name, *_ in core.calls):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    client.handle.shut("given up")
    core.hangs = ""
    core.released.set()
    trainer.join(SECONDS)
    assert (client.handle.state, client.handle.reason) == ("quarantined", "given up")


def test_an_error_in_generate_gives_the_engine_back(attached):
    client, _, llm = attached()
    llm.generate = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        client.handle.generate()
    update(client, 1)


@pytest.mark.parametrize(
    ("llm", "text"),
    [
        (FakeLLM(backend=None), "was started with none for weight transfer"),
        (FakeLLM(backend="nccl"), "was started with backend 'nccl'"),
        (FakeLLM(replicas=2), "2 data-parallel replicas"),
        (SimpleNamespace(llm_engine=SimpleNamespace(engine_core=SimpleNamespace(engine_core=1))),
         "runs its engine in this process"),
    ],
)  # fmt: skip
def test_engines_that_cannot_be_attached(llm, text):
    with pytest.raises(EngineError, match=text):
        OfflineEngine(llm, {})


def test_options():
    with pytest.raises(UnsupportedFeatureError, match="no option 'loop'"):
        OfflineEngine(FakeLLM(), {"loop": None})
