"""Attached engines: asked before an update, committed after it, quarantined by name."""

from __future__ import annotations

import json
import threading
import time

import pytest

from parallelkit import hooks
from parallelkit.errors import (
    EngineError,
    PartialCommitError,
    PeerLostError,
    PluginContractError,
    QuarantinedError,
    StateError,
    UnsupportedFeatureError,
    UpdateAbortedError,
    UpdateTimeoutError,
)
from parallelkit.specs import EngineCommit
from parallelkit.testing.arrays import Arrays
from parallelkit.testing.brittle import BrittleArrays
from parallelkit.testing.engines import FakeEngine
from parallelkit.testing.meeting import meet, on_ranks
from parallelkit.testing.peer import fill, sample_model, values
from parallelkit.weights import engine_round, publish_weights
from parallelkit.weights.report import report_from_dict


@pytest.fixture(autouse=True)
def short_grace(monkeypatch):
    monkeypatch.setattr(engine_round, "GRACE_SECONDS", 0.5)


@pytest.fixture
def attached(bench):
    """A publisher with so many engines, at version 1."""

    def make(count=1, **options):
        publisher = bench.publish(**options)
        engines = [FakeEngine(f"engine-{i}") for i in range(count)]
        for engine in engines:
            bench.stack.callback(engine.end)
            assert publisher.attach(engine) is engine
        publisher.update()
        fill(bench.source, 2.0)
        for engine in engines:
            engine.said.clear()
        return publisher, engines

    return make


def failing(error):
    def upset():
        raise error

    return upset


def states(publisher):
    return [(e.state, e.version) for e in publisher.engines]


# --- what works --------------------------------------------------------------------------------


def test_an_engine_follows(bench):
    publisher = bench.publish()
    engine = FakeEngine("rollouts", workers=3)
    bench.stack.callback(engine.end)
    handle = publisher.attach(engine)
    plain = bench.follow()
    assert states(publisher) == [("attached", 0)]
    report = bench.update()
    assert handle.generate() == values(plain.model) == {1.0}
    assert engine.said == ["init", "begin 1", "commit 1"]
    (of_engine,) = report.engines
    assert (of_engine.name, of_engine.state, of_engine.version) == ("rollouts", "committed", 1)
    assert of_engine.cache == "reset"
    assert of_engine.weight_version == "1"
    assert 0 < of_engine.pause_seconds <= report.pause_seconds
    assert [m.state for m in report.members] == ["committed"] * 4
    assert {m.name.partition(" ")[0] for m in report.members[:3]} == {
        "rollouts.0",
        "rollouts.1",
        "rollouts.2",
    }
    assert "ask" in report.phases
    assert states(publisher) == [("attached", 1)]
    assert "rollouts: attached, version 1" in publisher.explain()


def test_a_report_shows_engines_everywhere(attached, bench):
    publisher, _ = attached(2)
    report = publisher.update()
    assert "engine-0: committed, version 2, pause" in str(report)
    assert report_from_dict(json.loads(report.to_json())) == report
    trace = json.loads(report.to_chrome_trace())["traceEvents"]
    assert {"pause engine-0", "pause engine-1"} <= {event["name"] for event in trace}
    assert len({e["tid"] for e in trace if e["name"].startswith("pause")}) == 6


def test_engines_commit_at_the_same_time(attached):
    publisher, engines = attached(3)
    together = threading.Barrier(3)
    for engine in engines:
        engine.upsets["commit"] = lambda: together.wait(10)
    publisher.update()
    assert [e.generate() for e in engines] == [{2.0}] * 3


def test_an_engine_goes_on_until_every_worker_has_the_bytes(attached, spy):
    publisher, (engine,) = attached()
    paused = []
    spy(publisher, "verify", lambda: paused.append((engine.paused, engine.generate())))
    publisher.update()
    assert paused == [(False, {1.0})]


def test_a_slow_plain_member_holds_no_engine_up(attached, bench):
    _publisher, (engine,) = attached()
    slow = bench.follow(model=BrittleArrays(sample_model().arrays))
    waiting, seen = threading.Event(), []
    slow.model.begin = lambda: (waiting.wait(10), seen.append(engine.generate()))
    engine.upsets["commit"] = lambda: threading.Timer(0.3, waiting.set).start()
    bench.update(slow)
    assert seen == [{2.0}]


# --- before the decision -----------------------------------------------------------------------


def test_who_cannot_take_part_aborts_before_anything_is_sent(attached, bench):
    publisher, engines = attached(3)
    plain = bench.follow()
    engines[1].upsets["begin"] = failing(StateError("engine-1 is asleep: wake it up"))
    begun = []
    for engine in engines:
        for worker in engine.workers:
            worker._phase = begun.append
    with pytest.raises(UpdateAbortedError, match="engine-1 is asleep") as caught:
        publisher.update()
    assert list(caught.value.failures) == ["engine-1"]
    assert isinstance(caught.value.__cause__, StateError)
    assert begun == []
    assert [e.said for e in engines] == [
        ["begin 2", "abort 2"],
        ["begin 2"],
        ["begin 2", "abort 2"],
    ]
    assert [e.generate() for e in engines] == [{1.0}] * 3
    assert publisher.version == 1
    engines[1].upsets.clear()
    bench.update(plain)
    assert [e.generate() for e in engines] == [{2.0}] * 3


def test_an_error_of_another_kind_names_the_engine(attached):
    publisher, (engine,) = attached()
    engine.upsets["begin"] = failing(OSError("no route to host"))
    with pytest.raises(UpdateAbortedError, match="engine-0: OSError: no route") as caught:
        publisher.update()
    assert isinstance(caught.value.__cause__, EngineError)


def test_a_dead_engine_is_named_and_the_next_update_goes_on_without_it(attached):
    publisher, engines = attached(2)
    engines[0].upsets["begin"] = failing(PeerLostError("engine-0 is dead", peers=["engine-0"]))
    with pytest.raises(UpdateAbortedError, match="engine-0 is dead"):
        publisher.update()
    assert states(publisher) == [("lost", 1), ("attached", 1)]
    assert engines[0].said == ["begin 2", "close"]
    report = publisher.update()
    assert [e.name for e in report.engines] == ["engine-1"]
    assert len(report.members) == 2
    assert "engine-0: lost, engine-0 is dead" in str(report)
    assert "engine-0: lost" not in str(publisher.update()), "said once"


def test_an_engine_of_which_a_worker_is_gone_is_lost(attached):
    publisher, engines = attached(2)
    engines[0].workers[1].close()
    deadline = time.monotonic() + 5
    while all(m.present for m in publisher.members) and time.monotonic() < deadline:
        time.sleep(0.01)
    report = publisher.update()
    assert [e.name for e in report.engines] == ["engine-1"]
    assert "engine-0: lost" in str(report)
    assert engines[0].said == ["close"]
    assert engines[0].generate() == {1.0}, "it goes on with what it has"


def test_an_engine_that_does_not_answer_aborts_at_the_deadline(attached):
    publisher, (engine,) = attached(timeout=1.0)
    slow = threading.Event()
    engine.upsets["begin"] = lambda: slow.wait(30)
    began = time.monotonic()
    with pytest.raises(UpdateAbortedError, match="engine-0: within 1 s it did not end"):
        publisher.update()
    assert time.monotonic() - began < 5
    with pytest.raises(UpdateAbortedError, match="it is still in its begin of version 2") as caught:
        publisher.update()
    assert caught.value.__cause__.missing == ("engine-0",)
    slow.set()
    engine.upsets.clear()
    deadline = time.monotonic() + 5
    while engine.said != ["begin 2", "abort 2"] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert engine.said == ["begin 2", "abort 2"], "what began late is called off"
    assert publisher.update().version == 2
    assert engine.generate() == {2.0}


def test_an_update_that_fails_later_is_called_off_at_engines(attached):
    publisher, engines = attached(2)
    engines[0].workers[0]._placement.fetch = lambda *a, **k: 1 / 0
    with pytest.raises(UpdateAbortedError, match="ZeroDivisionError"):
        publisher.update()
    assert [e.said for e in engines] == [["begin 2", "abort 2"]] * 2
    assert [e.generate() for e in engines] == [{1.0}] * 2


def test_an_abort_that_hangs_or_fails_is_not_waited_for(attached, bench):
    publisher, engines = attached(2)
    ended = threading.Event()
    bench.stack.callback(ended.set)
    engines[0].upsets["abort"] = lambda: ended.wait(30)
    engines[1].upsets["abort"] = failing(OSError("gone"))
    engines[0].workers[0]._placement.fetch = lambda *a, **k: 1 / 0
    began = time.monotonic()
    with pytest.raises(UpdateAbortedError, match="ZeroDivisionError"):
        publisher.update()
    assert time.monotonic() - began < 5


# --- after the decision ------------------------------------------------------------------------


def test_one_of_three_fails_to_commit_and_comes_back(attached, bench):
    publisher, engines = attached(3)
    engines[1].upsets["commit"] = failing(OSError("disk on fire"))
    with pytest.raises(PartialCommitError, match="engine-1: quarantined, OSError: disk") as caught:
        publisher.update()
    report = caught.value.report
    assert [e.state for e in report.engines] == ["committed", "quarantined", "committed"]
    assert [e.version for e in report.engines] == [2, 1, 2]
    assert report.quarantined[0] == "engine-1"
    assert len(report.quarantined) == 3, "and its two workers"
    assert str(caught.value).count("engine-1") == 1, "said once"
    assert {m.reason for m in report.members if m.state == "quarantined"} == {
        "with its engine, engine-1"
    }
    with pytest.raises(QuarantinedError, match="disk on fire"):
        engines[1].generate()
    assert [engines[i].generate() for i in (0, 2)] == [{2.0}] * 2
    assert states(publisher) == [("attached", 2), ("quarantined", 1), ("attached", 2)]
    assert publisher.version == 2
    engines[1].upsets.clear()
    fill(bench.source, 3.0)
    publisher.update()
    assert [e.generate() for e in engines] == [{3.0}] * 3
    assert states(publisher) == [("attached", 3)] * 3
    assert [m.state for m in publisher.members] == ["joined"] * 6


def test_a_worker_that_fails_to_place_quarantines_its_engine(attached):
    publisher, engines = attached(2)
    engines[0].models[1].fault = "finish"
    with pytest.raises(PartialCommitError, match="engine-0: quarantined, QuarantinedError"):
        publisher.update()
    assert engines[1].generate() == {2.0}
    assert not engines[0].paused
    engines[0].models[1].fault = None
    publisher.update()
    assert [e.generate() for e in engines] == [{2.0}] * 2


def test_a_worker_that_loses_the_bytes_keeps_its_engine_from_committing(attached):
    publisher, (engine,) = attached()

    def phase(name):
        if name == "commit":
            raise OSError("made to fail")

    engine.workers[1]._phase = phase
    with pytest.raises(PartialCommitError, match="not every worker has the new version") as caught:
        publisher.update()
    assert engine.said == ["begin 2", "quarantine"], "nothing was put in place"
    assert caught.value.report.engines[0].version == 1
    engine.workers[1]._phase = lambda name: None
    publisher.update()
    assert engine.generate() == {2.0}


def test_an_engine_that_dies_in_its_commit_is_lost(attached):
    publisher, engines = attached(2)
    engines[0].upsets["commit"] = failing(PeerLostError("engine-0 died", peers=["engine-0"]))
    with pytest.raises(PartialCommitError, match="engine-0: lost, PeerLostError") as caught:
        publisher.update()
    assert [e.state for e in caught.value.report.engines] == ["lost", "committed"]
    assert states(publisher) == [("lost", 1), ("attached", 2)]
    assert engines[0].said == ["begin 2", "commit 2", "quarantine", "close"]
    with pytest.raises(QuarantinedError):
        engines[0].generate()
    assert [e.name for e in publisher.update().engines] == ["engine-1"]


def test_an_engine_slower_than_the_deadline_is_quarantined_and_stays_so(attached, bench):
    publisher, engines = attached(2, timeout=1.0)
    slow = threading.Event()
    bench.stack.callback(slow.set)
    engines[0].upsets["commit"] = lambda: slow.wait(30)
    began = time.monotonic()
    with pytest.raises(PartialCommitError, match="its commit of version 2 has not ended"):
        publisher.update()
    assert time.monotonic() - began < 5
    assert engines[1].generate() == {2.0}
    with pytest.raises(UpdateAbortedError, match="still in its commit of version 2"):
        publisher.update()
    slow.set()
    engines[0].upsets.clear()
    while publisher.engines[0].busy and time.monotonic() - began < 10:
        time.sleep(0.01)
    assert states(publisher)[0] == ("quarantined", 1)
    with pytest.raises(QuarantinedError):
        engines[0].generate()  # the late commit did not lift it
    publisher.update()
    assert [e.generate() for e in engines] == [{2.0}] * 2


def test_what_hangs_in_quarantine_is_not_waited_for(attached, bench):
    publisher, engines = attached(2, timeout=1.0)
    slow = threading.Event()
    bench.stack.callback(slow.set)
    engines[0].upsets["commit"] = failing(OSError("no"))
    engines[0].upsets["quarantine"] = lambda: slow.wait(30)
    began = time.monotonic()
    with pytest.raises(PartialCommitError, match="OSError: no"):
        publisher.update()
    assert time.monotonic() - began < 5


def test_an_answer_that_is_no_commit_is_the_clients_fault(attached):
    publisher, (engine,) = attached()
    engine.commit = lambda version, timeout: None
    with pytest.raises(PartialCommitError, match="answered commit with a NoneType"):
        publisher.update()


def test_a_trainer_interrupted_after_the_decision_leaves_engines_whole(
    attached, bench, monkeypatch
):
    publisher, engines = attached(2)
    inbox = publisher._coordinator.members.inbox
    real = inbox.get

    def interrupted(deadline):
        if publisher._coordinator.version == 2:
            monkeypatch.undo()
            raise KeyboardInterrupt
        return real(deadline)

    monkeypatch.setattr(inbox, "get", interrupted)
    with pytest.raises(KeyboardInterrupt):
        publisher.update()
    assert publisher.version == 2
    assert [e.said for e in engines] == [["begin 2", "abort 2"]] * 2
    assert [e.generate() for e in engines] == [{1.0}] * 2
    fill(bench.source, 3.0)
    assert publisher.update().version == 3
    assert [e.generate() for e in engines] == [{3.0}] * 2


def test_a_trainer_interrupted_while_engines_commit_lets_them_end_it(attached, monkeypatch):
    publisher, engines = attached(2)

    def interrupt(self, members):
        raise KeyboardInterrupt

    monkeypatch.setattr(engine_round.EngineRound, "finish", interrupt)
    with pytest.raises(KeyboardInterrupt):
        publisher.update()
    deadline = time.monotonic() + 5
    while any(e.busy for e in publisher.engines) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [e.said for e in engines] == [["begin 2", "commit 2"]] * 2
    assert states(publisher) == [("attached", 2)] * 2
    monkeypatch.undo()
    publisher.update()
    assert [e.generate() for e in engines] == [{2.0}] * 2


def test_a_trainer_interrupted_while_it_asks(attached, monkeypatch):
    publisher, engines = attached(2)

    def interrupt(self, deadline):
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr("parallelkit.weights.engines.Call.wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        publisher.update()
    assert publisher.version == 1
    deadline = time.monotonic() + 5
    while any(len(e.said) < 2 for e in engines) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [e.said for e in engines] == [["begin 2", "abort 2"]] * 2
    publisher.update()
    assert [e.generate() for e in engines] == [{2.0}] * 2


# --- coming and going --------------------------------------------------------------------------


def test_an_engine_is_dropped_by_name(attached):
    publisher, engines = attached(2)
    publisher.drop("engine-0")
    report = publisher.update()
    assert [e.name for e in report.engines] == ["engine-1"]
    assert engines[0].said == ["close"]
    assert engines[0].generate() == {1.0}
    assert states(publisher) == [("dropped", 1), ("attached", 2)]
    with pytest.raises(StateError, match="no member 'engine-0' is here, nor an engine"):
        publisher.drop("engine-0")


def test_a_dropped_engine_can_be_attached_again(attached, bench):
    publisher, (engine,) = attached()
    publisher.drop("engine-0")
    engine.end()
    again = FakeEngine("engine-0")
    bench.stack.callback(again.end)
    publisher.attach(again)
    (report,) = publisher.update().engines
    assert report.name.startswith("engine-0#"), "names in reports are unique"
    assert again.generate() == {2.0}


def test_dropping_a_worker_lets_its_engine_go(attached):
    publisher, _engines = attached(2)
    publisher.drop(publisher.members[0].name)
    report = publisher.update()
    assert [e.name for e in report.engines] == ["engine-1"]
    assert states(publisher)[0][0] == "lost"


def test_close_lets_every_engine_go_on(attached):
    publisher, engines = attached(2)
    engines[0].upsets["close"] = failing(OSError("gone"))
    publisher.close()
    assert [e.said for e in engines] == [["close"]] * 2
    assert [e.generate() for e in engines] == [{1.0}] * 2
    with pytest.raises(StateError):
        publisher.attach(FakeEngine())


def test_an_engine_is_attached_once(attached):
    publisher, (engine,) = attached()
    with pytest.raises(StateError, match="engine-0 is attached already"):
        publisher.attach(engine)
    assert engine.said == []
    assert publisher.update().version == 2


def test_attach_inside_an_update(attached, spy):
    publisher, _ = attached()
    said = []

    def attach():
        with pytest.raises(StateError, match="inside update"):
            publisher.attach(FakeEngine("other"))
        said.append(True)

    spy(publisher, "stage", attach)
    publisher.update()
    assert said == [True]


def test_attach_is_rank_zeros():
    groups = meet(2, timeout=10.0)
    model = sample_model(1.0)

    def run(group):
        with publish_weights(model, group=group, timeout=10.0) as publisher:
            engine = FakeEngine()
            if group.rank:
                with pytest.raises(StateError, match="rank 0's; this is rank 1"):
                    publisher.attach(engine)
                assert engine.said == []
            else:
                publisher.attach(engine)
            report = publisher.update()
            engine.end()
            return [e.state for e in report.engines]

    assert on_ranks(groups, run) == [["committed"]] * 2


def test_nobody_controls_such_an_engine(bench):
    publisher = bench.publish()
    for target in ("ftp://127.0.0.1", object()):
        with pytest.raises(UnsupportedFeatureError, match="no installed plugin controls"):
            publisher.attach(target)
    with pytest.raises(UnsupportedFeatureError, match="no installed plugin controls"):
        publisher.attach(FakeEngine(), cache="keep")  # a client of one's own has no options


def test_a_plugins_client_gets_the_options(bench, monkeypatch):
    publisher = bench.publish()
    engine = FakeEngine("from-a-plugin")
    bench.stack.callback(engine.end)
    asked = []

    def client(target, options):
        asked.append((target, options))
        return engine

    monkeypatch.setattr(hooks, "engine_client", client)
    assert publisher.attach("http://127.0.0.1:8000", cache="keep") is engine
    assert asked == [("http://127.0.0.1:8000", {"cache": "keep"})]
    with pytest.raises(StateError, match="attached already"):
        publisher.attach("http://127.0.0.1:8000")


@pytest.mark.parametrize(
    ("name", "workers"), [("", 1), ("a\nb", 1), ("x" * 201, 1), (7, 1), ("a", 0), ("a", True)]
)
def test_a_client_that_cannot_be_told_apart_is_refused(bench, name, workers):
    engine = FakeEngine(name, workers)
    with pytest.raises(PluginContractError):
        bench.publish().attach(engine)
    assert engine.said == []


def test_a_worker_that_refuses_says_why(bench):
    publisher = bench.publish()
    other = {"body": sample_model().arrays["body"]}
    engine = FakeEngine("small", workers=1, model=lambda: Arrays(other))
    with pytest.raises(EngineError, match=r"(?s)small cannot follow: small\.0 .* says: .*'half'"):
        publisher.attach(engine)
    assert engine.said == ["init", "close"]
    assert publisher.engines == []
    bench.follow()
    assert bench.update().engines == ()


def test_workers_that_do_not_join_are_named(bench):
    publisher = bench.publish(timeout=1.0)
    engine = FakeEngine("half", workers=3, absent=[0, 2])
    bench.stack.callback(engine.end)
    with pytest.raises(UpdateTimeoutError, match="half: worker 0, worker 2 of 3") as caught:
        publisher.attach(engine)
    assert caught.value.missing == ("worker 0", "worker 2")
    assert not any(m.present for m in publisher.members), "who had joined is let go"
    assert publisher.update().members == ()


def test_an_engine_that_cannot_be_attached_leaves_nothing(bench):
    publisher = bench.publish()
    engine = FakeEngine("dead")
    engine.upsets["init"] = failing(PeerLostError("dead is not there", peers=["dead"]))
    with pytest.raises(PeerLostError):
        publisher.attach(engine)
    assert engine.said == ["init", "close"]
    assert publisher.engines == []
    engine.upsets.clear()
    bench.stack.callback(engine.end)
    publisher.attach(engine)
    publisher.update()
    assert engine.generate() == {1.0}


# --- keep_last ---------------------------------------------------------------------------------


def test_an_engine_gets_the_kept_version_when_it_is_attached(bench):
    publisher = bench.publish(keep_last=True)
    bench.follow()
    bench.update()
    fill(bench.source, 2.0)  # the trainer goes on
    engine = FakeEngine("late")
    bench.stack.callback(engine.end)
    publisher.attach(engine)
    assert engine.generate() == {1.0}
    assert engine.said == ["init", "begin 1", "commit 1"]
    assert states(publisher) == [("attached", 1)]
    bench.update()
    assert engine.generate() == {2.0}


@pytest.mark.parametrize("call", ["begin", "commit"])
def test_an_engine_that_cannot_take_the_kept_version_is_not_attached(bench, call):
    publisher = bench.publish(keep_last=True)
    bench.follow()
    bench.update()
    engine = FakeEngine("late")
    bench.stack.callback(engine.end)
    engine.upsets[call] = failing(OSError("no"))
    with pytest.raises(EngineError, match="OSError: no"):
        publisher.attach(engine)
    assert publisher.engines == []
    assert engine.said[-1] == "close"
    assert len(bench.update().members) == 1


def test_notes_of_an_engine_are_shown(attached):
    publisher, (engine,) = attached()
    engine.commit = lambda version, timeout: EngineCommit(
        pause_seconds=0.25, cache="kept", notes=("keeps what it had",)
    )
    report = publisher.update()
    assert report.pause_seconds == 0.25
    line = "engine-0: committed, version 2, pause 250.0 ms, cache kept (keeps what it had)"
    assert line in str(report)


# --- engines that a thread of this process serves ----------------------------------------------


class LoopEngine(FakeEngine):
    """Served by one thread."""

    thread: int | None = None

    def check_thread(self) -> None:
        if threading.get_ident() == self.thread:
            raise StateError(f"{self.name} is served by this thread: write to_thread(...)")


def test_the_thread_that_serves_an_engine_must_not_wait_for_it(bench):
    publisher = bench.publish()
    engine = LoopEngine("served")
    bench.stack.callback(engine.end)
    engine.thread = threading.get_ident()
    with pytest.raises(StateError, match="to_thread"):
        publisher.attach(engine)
    assert engine.said == []
    engine.thread = None
    publisher.attach(engine)
    publisher.update()
    engine.thread = threading.get_ident()
    with pytest.raises(UpdateAbortedError, match="to_thread"):
        publisher.update()
    assert engine.said == ["init", "begin 1", "commit 1"]
    engine.thread = None
    publisher.update()
    assert publisher.version == 2
