"""Several member groups follow one publisher, and one member fails in some phase.

Before the decision all groups stay old; after it the failing member is quarantined, and named.
"""

from __future__ import annotations

import threading
import time

import pytest

from parallelkit.errors import (
    PartialCommitError,
    PeerLostError,
    QuarantinedError,
    UpdateAbortedError,
)
from parallelkit.testing.peer import Peer, fill, values

#: Members of each group, in the order of joining.
GROUPS = {"alpha": 2, "beta": 1, "gamma": 2}


@pytest.fixture
def fleet(bench):
    """All groups at version 1, every element 1.0; the followers by their place."""
    publisher = bench.publish(timeout=10.0)
    followers = {}
    for name, members in GROUPS.items():
        ticket = publisher.new_ticket(members=members, name=name)
        for member in range(members):
            followers[name, member] = bench.follow(ticket, member=member)
    assert len(bench.update().members) == len(followers)
    return followers


def fail_at(bench, follower, phase):
    """Let a follower raise when it passes a phase; of `prepared`, once all have been compared."""
    compared = threading.Event()
    publisher = bench.publisher
    publisher._coordinator._phase_hook = lambda name: name == "verify" and compared.set()

    def hook(name):
        if name == phase:
            follower.subscriber._phase = lambda name: None
            assert phase != "prepared" or compared.wait(10.0)
            raise RuntimeError(f"it fails at {phase}")

    follower.subscriber._phase = hook


def states(bench):
    return {m.name.partition(" ")[0]: (m.state, m.version) for m in bench.publisher.members}


@pytest.mark.parametrize("place", [("alpha", 0), ("alpha", 1), ("beta", 0), ("gamma", 1)])
@pytest.mark.parametrize("phase", ["begin", "transfer"])
def test_before_the_decision_all_groups_stay_old(bench, fleet, place, phase):
    failing = fleet[place]
    fail_at(bench, failing, phase)
    fill(bench.source, 2.0)
    with pytest.raises(UpdateAbortedError) as caught:
        bench.update()
    assert set(caught.value.failures) == {failing.subscriber.name}
    assert f"it fails at {phase}" in str(caught.value)
    assert bench.publisher.version == 1
    assert set(states(bench).values()) == {("joined", 1)}
    for follower in fleet.values():
        assert (follower.subscriber.state, follower.subscriber.version) == ("current", 1)
        assert values(follower.model) == {1.0}
        told = RuntimeError if follower is failing else UpdateAbortedError
        assert isinstance(follower.error, told)
    assert_the_next_update_brings_all(bench, fleet, version=2)


@pytest.mark.parametrize("place", [("alpha", 0), ("alpha", 1), ("beta", 0), ("gamma", 1)])
@pytest.mark.parametrize("phase", ["prepared", "commit"])
def test_after_the_decision_the_failing_member_alone_is_quarantined(bench, fleet, place, phase):
    failing = fleet[place]
    fail_at(bench, failing, phase)
    fill(bench.source, 2.0)
    with pytest.raises(PartialCommitError) as caught:
        bench.update()
    report = caught.value.report
    assert report.quarantined == (failing.subscriber.name,)
    assert f"it fails at {phase}" in str(caught.value)
    assert bench.publisher.version == 2
    label = f"{place[0]}.{place[1]}"
    assert {n for n, state in states(bench).items() if state != ("joined", 2)} == {label}
    assert states(bench)[label] == ("quarantined", 1)
    for follower in fleet.values():
        if follower is failing:
            assert follower.subscriber.state == "quarantined"
            with pytest.raises(QuarantinedError, match=f"it fails at {phase}"):
                with follower.subscriber.use():
                    pass
        else:
            assert (follower.subscriber.state, follower.subscriber.version) == ("current", 2)
            assert values(follower.model) == {2.0}
            assert follower.error is None
    assert_the_next_update_brings_all(bench, fleet, version=3)


def test_two_groups_fail_in_one_update_and_both_are_named(bench, fleet):
    failing = [fleet["alpha", 1], fleet["beta", 0]]
    for follower in failing:
        fail_at(bench, follower, "commit")
    with pytest.raises(PartialCommitError) as caught:
        bench.update()
    assert set(caught.value.report.quarantined) == {f.subscriber.name for f in failing}
    assert_the_next_update_brings_all(bench, fleet, version=3)


def test_one_group_aborts_while_another_is_quarantined(bench, fleet):
    """A member that is out since the last update is no better and no worse for an abort."""
    fail_at(bench, fleet["beta", 0], "commit")
    with pytest.raises(PartialCommitError):
        bench.update()
    fail_at(bench, fleet["gamma", 0], "transfer")
    with pytest.raises(UpdateAbortedError):
        bench.update()
    assert fleet["beta", 0].subscriber.state == "quarantined"
    assert fleet["gamma", 0].subscriber.state == "current"
    assert_the_next_update_brings_all(bench, fleet, version=3)


@pytest.mark.ranks
@pytest.mark.parametrize("phase", ["begin", "commit"])
def test_a_killed_member_takes_its_group_along_and_a_new_one_replaces_it(bench, fleet, phase):
    publisher = bench.publisher
    ticket = publisher.new_ticket(members=2, name="delta")
    mate = bench.follow(ticket, member=0)
    with Peer("subscribe", die_at=phase, member=1) as victim:
        victim.send(ticket)
        name = victim.event("joined")["name"]
        fill(bench.source, 2.0)
        decided = phase == "commit"
        with pytest.raises(PartialCommitError if decided else UpdateAbortedError) as caught:
            bench.update()
    assert name in str(caught.value)
    live = {2.0} if decided else {1.0}
    assert all(values(follower.model) == live for follower in fleet.values())
    fill(bench.source, 3.0)
    report = bench.update()
    assert isinstance(mate.error, PeerLostError)
    assert "of the same group" in str(mate.error)
    assert len(report.members) == len(fleet)
    bench.followers.remove(mate)
    ticket = publisher.new_ticket(members=2, name="epsilon")
    fleet |= {("epsilon", member): bench.follow(ticket, member=member) for member in range(2)}
    assert_the_next_update_brings_all(bench, fleet, version=publisher.version + 1)


def assert_the_next_update_brings_all(bench, fleet, version):
    fill(bench.source, 9.0)
    report = bench.update()
    assert report.version == bench.publisher.version == version
    assert len(report.members) == len(fleet)
    for follower in fleet.values():
        assert (follower.subscriber.state, follower.subscriber.version) == ("current", version)
        assert values(follower.model) == {9.0}


def test_who_is_still_fetching_when_others_abort_is_told_why(bench, fleet):
    slow, failing = fleet["gamma", 1].subscriber, fleet["alpha", 0]
    fail_at(bench, failing, "transfer")
    fetch, arena = slow._placement.fetch, bench.publisher._coordinator.exporter.arena
    epoch = arena.epoch

    def after_the_abort(*given, **options):
        deadline = time.monotonic() + 10.0
        while arena.epoch <= epoch + 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        return fetch(*given, **options)

    slow._placement.fetch = after_the_abort
    with pytest.raises(UpdateAbortedError):
        bench.update()
    slow._placement.fetch = fetch
    error = fleet["gamma", 1].error
    assert isinstance(error, UpdateAbortedError)
    assert failing.subscriber.name in str(error)
    assert "it fails at transfer" in str(error)
    assert_the_next_update_brings_all(bench, fleet, version=2)
