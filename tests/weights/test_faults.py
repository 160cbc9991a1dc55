"""Processes that are killed or stopped, at each phase, on either side.

Whatever happens, each side learns of it by name within the deadline, every follower is wholly at
the old version, wholly at the new one, or quarantined, and nothing remains in shared memory.
"""

from __future__ import annotations

import signal
import time

import pytest

from parallelkit.errors import (
    PartialCommitError,
    PeerLostError,
    QuarantinedError,
    UpdateAbortedError,
    UpdateTimeoutError,
)
from parallelkit.testing.peer import PUBLISHER_PHASES, SUBSCRIBER_PHASES, Peer, fill, values
from parallelkit.weights.segments import SHM_DIR, list_orphans, sweep_orphans

pytestmark = pytest.mark.ranks

#: Well under the deadline: a death is noticed, not waited for.
AT_ONCE = 4.0


@pytest.fixture(autouse=True)
def _nothing_remains():
    before = set(SHM_DIR.iterdir())
    yield
    assert {p for p in set(SHM_DIR.iterdir()) - before if p.name.startswith("parallelkit")} == set()


def join(publisher, peer):
    peer.send(publisher.new_ticket())
    return peer.event("joined")["name"]


@pytest.mark.parametrize("phase", SUBSCRIBER_PHASES)
def test_a_subscriber_is_killed(bench, phase):
    publisher = bench.publish(timeout=20.0)
    survivor = bench.follow()
    bench.update()
    fill(bench.source, 2.0)
    with Peer("subscribe", die_at=phase) as victim:
        name = join(publisher, victim)
        started = time.monotonic()
        decided = phase in ("prepared", "commit", "committed")
        with pytest.raises(PartialCommitError if decided else UpdateAbortedError) as caught:
            bench.update(survivor)
        assert time.monotonic() - started < AT_ONCE
        assert name in str(caught.value)
        if decided:
            assert publisher.version == 2
            assert caught.value.report.quarantined == (name,)
            assert values(survivor.model) == {2.0}
        else:
            assert isinstance(caught.value.__cause__, PeerLostError)
            assert caught.value.__cause__.peers == (name,)
            assert isinstance(survivor.error, UpdateAbortedError)
            assert publisher.version == 1
            assert values(survivor.model) == {1.0}
    report = bench.update(survivor)
    assert [m.name for m in report.members] == [survivor.subscriber.name]
    assert values(survivor.model) == {2.0}


def test_a_subscriber_is_killed_while_idle(bench):
    publisher = bench.publish(timeout=20.0)
    survivor = bench.follow()
    with Peer("subscribe") as victim:
        name = join(publisher, victim)
    deadline = time.monotonic() + AT_ONCE
    while publisher.members[1].state != "lost" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert f"{name}: lost" in publisher.explain()
    assert len(bench.update(survivor).members) == 1


@pytest.mark.parametrize("phase", PUBLISHER_PHASES)
def test_the_publisher_is_killed(bench, phase):
    with Peer("publish", die_at=phase, tickets=2, value=1.0, publish={"timeout": 20.0}) as victim:
        followers = [join_peer(bench, victim) for _ in range(2)]
        victim.event("ready")
        for follower in followers:
            follower.step()
        started = time.monotonic()
        victim.send("1.0")
        for follower in followers:
            error = follower.done()
            committed = follower.subscriber.version == 1
            assert values(follower.model) == ({1.0} if committed else {0.0})
            if committed:
                assert phase in ("verify", "committed")
                continue
            assert isinstance(error, PeerLostError)
            assert "publisher at tcp://" in str(error)
            assert follower.subscriber.state in ("waiting", "quarantined")
            if phase in ("begin", "stage"):
                assert follower.subscriber.state == "waiting"
            if follower.subscriber.state == "quarantined":
                assert "quarantined" in "".join(error.__notes__)
                with pytest.raises(QuarantinedError, match="before the decision"):
                    with follower.subscriber.use():
                        pass
        assert time.monotonic() - started < AT_ONCE
        for follower in followers:
            with pytest.raises(PeerLostError):
                follower.subscriber.step(5.0)


def test_the_publisher_is_killed_while_idle(bench):
    with Peer("publish", publish={"timeout": 20.0}) as victim:
        follower = join_peer(bench, victim)
        follower.step(timeout=20.0)
        started = time.monotonic()
        victim.signal(signal.SIGKILL)
        assert isinstance(follower.done(), PeerLostError)
        assert time.monotonic() - started < AT_ONCE


def join_peer(bench, victim):
    """A follower in this process of a publisher in another."""
    from parallelkit.testing.peer import sample_model
    from parallelkit.weights import subscribe_weights

    model = sample_model()
    subscriber = subscribe_weights(model, victim.event("ticket")["ticket"], timeout=10.0)
    bench.stack.enter_context(subscriber)
    return bench.wrap(subscriber, model)


@pytest.mark.parametrize("phase", ["begin", "transfer", "prepared", "commit"])
def test_a_stopped_subscriber_is_named_and_changes_nothing_when_it_wakes(bench, phase):
    publisher = bench.publish(timeout=1.0)
    survivor = bench.follow()
    bench.update()
    fill(bench.source, 2.0)
    with Peer("subscribe", die_at=phase, signal="SIGSTOP", timeout=20.0) as sleeper:
        name = join(publisher, sleeper)
        decided = phase in ("prepared", "commit")
        started = time.monotonic()
        with pytest.raises(PartialCommitError if decided else UpdateAbortedError) as caught:
            bench.update(survivor)
        assert 0.5 < time.monotonic() - started < AT_ONCE
        assert name in str(caught.value)
        if not decided:
            assert isinstance(caught.value.__cause__, UpdateTimeoutError)
        assert values(survivor.model) == ({2.0} if decided else {1.0})
        fill(bench.source, 3.0)
        sleeper.signal(signal.SIGCONT)
        woken = sleeper.event("step")
        assert woken["version"] == 0
        assert woken["values"] == [0.0], "it came too late and wrote nothing"
        assert woken["state"] == ("quarantined" if decided else "waiting")


def test_a_stopped_publisher_leaves_the_followers_at_the_old_version_or_quarantined(bench):
    settings = {"die_at": "stage", "signal": "SIGSTOP", "publish": {"timeout": 1.0}}
    with Peer("publish", **settings) as sleeper:
        follower = join_peer(bench, sleeper)
        sleeper.event("ready")
        follower.step(timeout=2.0)  # it may be stopped before its first message has left
        started = time.monotonic()
        sleeper.send("1.0")
        error = follower.done()
        assert isinstance(error, UpdateTimeoutError | PeerLostError)
        assert "publisher at tcp://" in str(error)
        assert time.monotonic() - started < AT_ONCE
        assert follower.subscriber.version == 0
        assert values(follower.model) == {0.0}


def test_a_lost_subscriber_is_replaced_without_a_new_publisher(bench):
    publisher = bench.publish(timeout=20.0)
    for version in (1, 2, 3):
        fill(bench.source, float(version))
        with Peer("subscribe") as peer:
            name = join(publisher, peer)
            report = publisher.update()
            assert [m.name for m in report.members] == [name]
            assert peer.event("step")["values"] == [float(version)]
        deadline = time.monotonic() + AT_ONCE
        while publisher.members[-1].state == "joined" and time.monotonic() < deadline:
            time.sleep(0.01)


def test_a_killed_publisher_with_a_named_segment_is_swept_at_the_next_start(bench):
    with Peer("publish", publish={"named": True}) as victim:
        victim.event("ticket")
        assert not list_orphans(), "it lives"
    orphans = list_orphans()
    assert len(orphans) == 1
    assert "is gone" in orphans[0].reason
    bench.publish()
    assert not list_orphans()
    assert sweep_orphans() == []


def test_memory_of_a_killed_pair_is_given_back():
    with (
        Peer("publish", elements=1 << 20, value=1.0) as publisher,
        Peer("subscribe", elements=1 << 20) as subscriber,
    ):
        subscriber.send(publisher.event("ticket")["ticket"])
        publisher.event("ready")
        publisher.send("1.0")
        assert subscriber.event("step")["values"] == [1.0]
        publisher.signal(signal.SIGKILL)
        assert subscriber.event("step")["error"] == "PeerLostError"
