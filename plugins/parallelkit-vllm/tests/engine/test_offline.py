"""An `LLM` whose engine runs in processes of its own, attached to a publisher in this one."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import tiny_qwen as tiny
from parallelkit_vllm.clients import offline

import parallelkit as pk
from parallelkit.errors import (
    EngineError,
    NonFiniteError,
    PartialCommitError,
    QuarantinedError,
    StateError,
    UpdateAbortedError,
)

SECONDS = 60.0
NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def llm(warm, make_engine, checkpoint):
    """In processes of its own, with a worker that can be made to fail."""
    from vllm import envs

    envs.disable_envs_cache()  # an engine that was started before keeps what variables were then
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
        made = make_engine(
            checkpoint(0),
            weight_transfer_config={"backend": "parallelkit"},
            worker_extension_cls="upset.Upset",
        )
    yield made
    made.llm_engine.engine_core.shutdown()


@pytest.fixture
def source():
    return tiny.Source(tiny.tensors(0))


@pytest.fixture
def publisher(source):
    with pk.publish_weights(source, timeout=SECONDS) as publisher:
        yield publisher


def ids(handle, asked=None):
    return tiny.greedy(handle_as_engine(handle), asked=asked)


def handle_as_engine(handle):
    class Guarded:
        llm_engine = handle.llm.llm_engine
        generate = staticmethod(handle.generate)

    return Guarded


def update(publisher, source, seed):
    given = tiny.tensors(seed)
    source.put(given)
    return publisher.update(), given


def test_it_follows_and_forgets_cached_prefixes(llm, publisher, source, fresh):
    handle = publisher.attach(llm, name="rollouts")
    assert (handle.version, handle.state, handle.llm) == (0, "serving", llm)
    before = ids(handle)
    assert before == fresh(tensors=tiny.tensors(0))
    for seed in (1, 2):
        report, given = update(publisher, source, seed)
        (engine,) = report.engines
        assert (engine.name, engine.state, engine.cache) == ("rollouts", "committed", "reset")
        assert engine.weight_version == str(report.version) == str(handle.version)
        assert 0 < engine.pause_seconds <= report.seconds
        assert [m.state for m in report.members] == ["committed"]
        now = ids(handle)  # the long prompt was in the cache, of the old weights
        assert now == fresh(tensors=given)
        assert now != before
        before = now
    assert publisher._coordinator.engines.present[0].client.version(timeout=SECONDS) == 2


def test_values_that_are_not_finite_are_refused_before_it_is_paused(
    llm, source, fresh, monkeypatch
):
    with pk.publish_weights(source, timeout=SECONDS, check_finite=True) as careful:
        handle = careful.attach(llm)
        _, given = update(careful, source, 1)
        bad = given[NORM].values.copy()
        bad[7] = np.nan
        source.put(given | {NORM: tiny.raw(bad)})
        with monkeypatch.context() as patched:
            patched.setattr(offline, "commit", None)  # which pauses; it is asked alone
            with pytest.raises(NonFiniteError, match="'model.norm.weight' .1 of them.*was sent"):
                careful.update()
        assert (handle.version, handle.state) == (1, "serving")
        assert ids(handle) == fresh(tensors=given)
        report, given = update(careful, source, 2)
        assert report.engines[0].state == "committed"
        assert ids(handle) == fresh(tensors=given)


def test_a_load_that_fails_is_quarantine_and_the_next_update_brings_it_back(
    llm, publisher, source, fresh
):
    handle = publisher.attach(llm)
    update(publisher, source, 1)
    llm.collective_rpc("upset_next_load", args=("raise",))
    with pytest.raises(PartialCommitError, match="made to fail half way") as caught:
        update(publisher, source, 2)
    (engine,) = caught.value.report.engines
    assert (engine.state, engine.version) == ("quarantined", 1)
    assert (handle.state, handle.version) == ("quarantined", 1)
    with pytest.raises(QuarantinedError, match="made to fail half way"):
        ids(handle)
    assert not llm.llm_engine.engine_core.is_sleeping(), "it was resumed all the same"
    report, given = update(publisher, source, 3)
    assert report.engines[0].state == "committed"
    assert (handle.state, handle.version) == ("serving", 3)
    assert ids(handle) == fresh(tensors=given)


def test_a_load_that_hangs_is_given_up_at_the_deadline(llm, publisher, source, fresh):
    publisher.close()
    with pk.publish_weights(source, timeout=6.0) as impatient:
        handle = impatient.attach(llm)
        llm.collective_rpc("upset_next_load", args=("hang", 15.0))
        began = time.monotonic()
        with pytest.raises(PartialCommitError, match="update_weights did not end"):
            update(impatient, source, 1)
        assert time.monotonic() - began < 15.0
        with pytest.raises(QuarantinedError):
            ids(handle)
        with pytest.raises(UpdateAbortedError, match="of an earlier call has not returned"):
            update(impatient, source, 2)
        time.sleep(max(0.0, 16.0 - (time.monotonic() - began)))
        _, given = update(impatient, source, 2)
        assert handle.state == "serving"
        assert ids(handle) == fresh(tensors=given)


def test_an_engine_that_sleeps_takes_no_update(llm, publisher, source):
    handle = publisher.attach(llm)
    update(publisher, source, 1)
    before = ids(handle)
    llm.sleep(level=0, mode="keep")
    with pytest.raises(UpdateAbortedError, match="asleep or paused") as caught:
        update(publisher, source, 2)
    assert isinstance(caught.value.__cause__, StateError)
    llm.wake_up(["scheduling"])
    assert ids(handle) == before
    assert update(publisher, source, 2)[0].engines[0].version == 2


def test_who_generates_is_waited_for(llm, publisher, source, fresh):
    handle = publisher.attach(llm)
    update(publisher, source, 1)
    seen = []
    stop = threading.Event()

    def generate():
        while not stop.is_set():
            version = handle.version
            now = ids(handle)
            if handle.version == version:
                seen.append((version, now))

    thread = threading.Thread(target=generate)
    thread.start()
    try:
        given = {1: tiny.tensors(1)}
        for seed in (2, 3, 4):
            deadline = time.monotonic() + SECONDS
            while not any(v == seed - 1 for v, _ in seen) and time.monotonic() < deadline:
                time.sleep(0.01)
            report, given[seed] = update(publisher, source, seed)
            assert report.version == seed
    finally:
        stop.set()
        thread.join(SECONDS)
    assert {version for version, _ in seen} >= {1, 2, 3}
    for version, tokens in seen:
        assert tokens == fresh(tensors=given[version])


def test_it_goes_on_when_it_is_dropped_and_can_be_attached_anew(llm, publisher, source, fresh):
    handle = publisher.attach(llm, name="first")
    _, given = update(publisher, source, 1)
    with pytest.raises(StateError, match="attached already"):
        publisher.attach(llm)
    publisher.drop("first")
    assert ids(handle) == fresh(tensors=given)
    again = publisher.attach(llm, name="second")
    _, given = update(publisher, source, 2)
    assert ids(again) == fresh(tensors=given)


def test_another_model_is_refused_with_the_differences(llm, publisher):
    given = tiny.tensors(0)
    given.pop("model.norm.weight")
    with pk.publish_weights(tiny.Source(given), timeout=SECONDS) as other:
        with pytest.raises(EngineError, match=r"(?s)cannot follow: .*model\.norm\.weight"):
            other.attach(llm)
    handle = publisher.attach(llm)
    assert publisher.update().engines[0].state == "committed"
    assert handle.version == 1


def test_an_engine_in_this_process_is_refused(make_engine, checkpoint, publisher):
    """Trap 13: it has changed this process for itself."""
    here = make_engine(checkpoint(0), weight_transfer_config={"backend": "parallelkit"})
    with pytest.raises(EngineError, match="runs its engine in this process"):
        publisher.attach(here)
    assert publisher.members == []


def test_t10_a_worker_that_is_killed_is_named_within_the_deadline(llm, publisher, source):
    """The last test of this module: the engine is dead afterwards."""
    handle = publisher.attach(llm, name="doomed")
    update(publisher, source, 1)
    llm.collective_rpc("upset_next_load", args=("die",))
    began = time.monotonic()
    with pytest.raises(PartialCommitError, match="doomed: lost, PeerLostError: doomed") as caught:
        update(publisher, source, 2)
    assert time.monotonic() - began < SECONDS
    assert handle.state == "quarantined"
    assert "doomed: lost, PeerLostError" in str(caught.value.report)
    report, _ = update(publisher, source, 3)
    assert (report.engines, report.members) == ((), ())
