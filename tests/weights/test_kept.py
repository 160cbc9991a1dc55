"""`keep_last=True`: who joins late has the last committed version without the trainer's thread."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from parallelkit.errors import (
    ManifestError,
    PartialCommitError,
    PeerLostError,
    QuarantinedError,
    StateError,
    UpdateAbortedError,
    WeightTransferError,
)
from parallelkit.testing.arrays import Arrays
from parallelkit.testing.peer import Peer, fill, sample_model, values
from parallelkit.weights import publish_weights
from parallelkit.weights.layout import Region
from parallelkit.weights.needs import Needs

SECONDS = 5.0


def until(true, seconds=SECONDS):
    deadline = time.monotonic() + seconds
    while not true() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert true()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("commit", ["staged", "in_place"])
@pytest.mark.parametrize("verify", ["digest", "readback", "sample", "off"])
def test_a_late_joiner_has_the_last_version_at_once(bench, transport, commit, verify):
    publisher = bench.publish(keep_last=True, transport=transport, commit=commit, verify=verify)
    early = bench.follow()
    for value in (1.0, 2.0, 3.0):
        fill(bench.source, value)
        bench.update(early)
        fill(bench.source, -1.0)  # the trainer goes on
        late = bench.follow()
        assert late.subscriber.step(SECONDS) == publisher.version == value
        assert values(late.model) == {value}
        member = publisher.members[-1]
        until(lambda member=member: member.version == publisher.version)
        assert member.state == "joined"
        late.subscriber.close()
        bench.followers.pop()
        until(lambda member=member: member.state == "left")


def test_one_that_serves_stages_the_last_version(bench):
    publisher = bench.publish(keep_last=True)
    publisher.update()
    follower = bench.follow()
    follower.subscriber.serve()
    assert follower.subscriber.step(SECONDS) == 1
    fill(bench.source, 2.0)
    report = publisher.update()
    assert [m.state for m in report.members] == ["staged"]
    assert follower.subscriber.step(SECONDS) == 2
    assert values(follower.model) == {2.0}


def test_before_the_first_update_there_is_nothing_to_have(bench):
    bench.publish(keep_last=True)
    follower = bench.follow()
    assert follower.subscriber.step(0) == 0
    with pytest.raises(StateError, match="no version has arrived"):
        with follower.subscriber.use():
            pass
    bench.update()
    assert values(follower.model) == {1.0}


def test_without_it_a_late_joiner_waits(bench):
    publisher = bench.publish()
    publisher.update()
    follower = bench.follow()
    assert follower.subscriber.step(0) == 0


def test_a_version_that_nobody_was_there_for_is_kept(bench):
    publisher = bench.publish(keep_last=True)
    report = publisher.update()
    assert "kept for members that join" in str(report)
    follower = bench.follow()
    assert follower.subscriber.step(SECONDS) == 1
    assert values(follower.model) == {1.0}


def test_an_aborted_update_leaves_the_version_before_for_late_joiners(bench, spy):
    publisher = bench.publish(keep_last=True)
    early = bench.follow()
    bench.update()
    fill(bench.source, 2.0)

    def corrupt():
        publisher._coordinator.exporter.arena.slot(1)[12] ^= 1

    spy(publisher, "stage", corrupt)
    with pytest.raises(UpdateAbortedError, match="arrived changed"):
        bench.update()
    late = bench.follow()
    assert late.subscriber.step(SECONDS) == 1
    assert values(late.model) == {1.0}
    assert bench.update(early, late).version == 2
    assert values(late.model) == values(early.model) == {2.0}


def test_a_kept_version_that_was_damaged_is_not_taken(bench):
    publisher = bench.publish(keep_last=True)
    publisher.update()
    publisher._coordinator.exporter.arena.slot(0)[12] ^= 1
    late = bench.follow()
    with pytest.raises(UpdateAbortedError, match="buckets arrived changed, in body"):
        late.subscriber.step(SECONDS)
    assert late.subscriber.version == 0
    assert values(late.model) == {0.0}
    assert bench.update().version == 2
    assert values(late.model) == {1.0}


class Fragile(Arrays):
    """Fails while live memory is being written, when told to."""

    broken = True

    def finish(self) -> None:
        if self.broken:
            raise OSError("disk on fire")


def test_one_that_cannot_place_it_is_quarantined_until_the_next_update(bench):
    publisher = bench.publish(keep_last=True)
    publisher.update()
    late = bench.follow(model=Fragile(sample_model().arrays))
    with pytest.raises(QuarantinedError, match="disk on fire"):
        late.subscriber.step(SECONDS)
    until(lambda: publisher.members[0].state == "quarantined")
    assert "disk on fire" in publisher.explain()
    late.model.broken = False
    assert bench.update().quarantined == ()
    assert values(late.model) == {1.0}
    assert publisher.members[0].state == "joined"


def test_what_live_memory_lost_is_found_by_readback(bench):
    publisher = bench.publish(keep_last=True, verify="readback")
    publisher.update()

    class Careless(Arrays):
        def finish(self):
            self.arrays["body"][3] += 1

    late = bench.follow(model=Careless(sample_model().arrays))
    with pytest.raises(QuarantinedError, match="live memory differs after placement, in body"):
        late.subscriber.step(SECONDS)
    until(lambda: publisher.members[0].state == "quarantined")
    assert "live memory differs after placement, in body" in publisher.members[0].reason


@pytest.mark.parametrize("phase", ["begin", "commit"])
def test_one_that_is_let_go_meanwhile_is_not_called_back_nor_waited_for(bench, phase):
    publisher = bench.publish(keep_last=True, timeout=30.0)
    publisher.update()
    late = bench.follow()

    def here(name):
        if name == phase:
            publisher.drop(late.subscriber.name)

    late.subscriber._phase = here
    late.step()
    error = late.done()
    if phase == "begin":
        assert isinstance(error, PeerLostError)
    started = time.monotonic()
    publisher.update()
    assert time.monotonic() - started < 20.0, "it waited for who is gone"
    assert publisher.members[0].state == "lost"


@pytest.mark.parametrize("phase", ["begin", "transfer", "prepared"])
def test_an_update_that_begins_meanwhile_comes_first(bench, phase):
    """The late joiner is held in its own round until an update has begun, and follows that."""
    publisher = bench.publish(keep_last=True)
    publisher.update()
    fill(bench.source, 2.0)
    late = bench.follow()
    hold = publisher._coordinator.members._catching

    def here(name):
        if name == phase:
            late.subscriber._phase = lambda name: None
            until(lambda: publisher._coordinator.members._kept is None)
            time.sleep(0.05)

    late.subscriber._phase = here
    if phase == "prepared":  # the decision must not come before the update does
        publisher._coordinator.members._catching = lambda member, kept, message: (
            hold(member, kept, message) if type(message).__name__ != "Prepared" else []
        )
    late.step()
    if phase == "prepared":
        until(lambda: late.subscriber._phase.__name__ == "here")
        time.sleep(0.1)
    report = publisher.update()
    assert late.done() is None
    assert [m.state for m in report.members] == ["committed"]
    assert late.subscriber.version == 2
    assert values(late.model) == {2.0}


@pytest.mark.parametrize("phase", ["begin", "transfer", "prepared"])
def test_an_update_that_finds_a_changed_model_leaves_a_late_joiner_alone(bench, phase, monkeypatch):
    """The update fails before it begins, while the joiner is in its round: that goes on."""
    publisher = bench.publish(keep_last=True)
    publisher.update()
    late = bench.follow()
    inside, over = threading.Event(), threading.Event()

    def here(name):
        if name == phase:
            inside.set()
            assert over.wait(SECONDS)

    late.subscriber._phase = here
    late.step()
    assert inside.wait(SECONDS)

    def changed():
        raise ManifestError("tensor 'body' has another shape")

    with monkeypatch.context() as other:
        other.setattr(bench.source, "begin", changed)
        with pytest.raises(ManifestError, match="another shape"):
            publisher.update()
    over.set()
    assert late.done() is None
    assert (late.subscriber.version, values(late.model)) == (1, {1.0})
    until(lambda: publisher.members[0].version == 1)
    assert [m.state for m in bench.update(late).members] == ["committed"]


def test_an_update_waits_for_one_that_may_be_placing_it(bench):
    publisher = bench.publish(keep_last=True)
    publisher.update()
    fill(bench.source, 2.0)
    late = bench.follow()

    def slowly(name):
        if name == "commit":
            late.subscriber._phase = lambda name: None
            time.sleep(0.3)

    late.subscriber._phase = slowly
    late.step()
    until(lambda: publisher.members[0].decided)
    follower_again = bench.wrap(late.subscriber, late.model)

    def again():
        late.done()
        follower_again.step()

    thread = threading.Thread(target=again)
    thread.start()
    report = publisher.update()
    thread.join()
    assert late.error is None
    assert follower_again.done() is None
    assert [m.state for m in report.members] == ["committed"]
    assert values(late.model) == {2.0}


def test_one_that_never_says_it_has_it_is_quarantined_when_the_next_update_begins(bench):
    publisher = bench.publish(keep_last=True, timeout=1.0)
    publisher.update()
    with Peer("subscribe", die_at="commit", signal="SIGSTOP", timeout=20.0) as sleeper:
        sleeper.send(publisher.new_ticket())
        sleeper.event("joined")
        sleeper.event("phase")
        until(lambda: publisher.members[0].decided)
        with pytest.raises((UpdateAbortedError, PartialCommitError)):
            publisher.update()
        assert publisher.members[0].state in ("quarantined", "lost")
        assert publisher.members[0].version == 0


def test_a_member_that_is_killed_and_replaced_is_current_at_once(bench):
    publisher = bench.publish(keep_last=True)
    publisher.update()
    for _ in range(2):
        with Peer("subscribe") as peer:
            peer.send(publisher.new_ticket())
            step = peer.event("step")
            assert step["error"] is None
            assert step["values"] == [1.0]
            assert step["version"] == 1
        until(lambda: publisher.members[-1].state == "lost")


def test_parts_of_several_ranks_are_kept_too(job, spread):
    run = job(spread(), keep_last=True)
    half = Needs.of(run.manifest, [Region((3, 0), (2, 6)), Region((0, 1), (8, 4)), None])
    run.join(half)
    run.update()
    run.members.pop()[0].close()
    kept = [value.copy() for value in run.values]
    run.change(2)
    for _ in range(2):
        run.members.clear()
        member, _ = run.join(half)
        assert member.step(SECONDS) == run.lead.version
        run.values[:], newer = kept, list(run.values)
        run.check()
        run.values[:] = newer
        member.close()
    run.members.clear()
    run.change(3)
    results, _ = run.update()
    assert results[1].version == 2
    other, _ = run.join(Needs.of(run.manifest, [None, None, Region((0,), (1,))]))
    assert other.step(0) == 0, "nobody kept that when the version was staged"
    results, errors = run.update()
    assert not errors
    run.check()


def test_after_an_update_that_failed_on_one_rank_late_joiners_have_the_version_before(job, spread):
    run = job(spread(), keep_last=True)
    run.join(Needs.whole(run.manifest))
    run.update()
    kept = [value.copy() for value in run.values]
    run.change(2)
    run.sources[1].problem = OSError("gone")
    results, _ = run.update()
    assert all(isinstance(r, Exception) for r in results)
    run.members.pop()[0].close()
    member, sink = run.join(Needs.whole(run.manifest))
    assert member.step(SECONDS) == 1
    assert [k.tobytes() for k in sink.kept] == [v.tobytes() for v in kept]


def test_it_needs_a_copy_of_its_own():
    with pytest.raises(WeightTransferError, match="keep_last=True with aliased=True"):
        publish_weights(sample_model(), keep_last=True, aliased=True)


def test_the_arena_is_double(bench):
    single = bench.publish()._coordinator.exporter.arena.bytes
    double = bench.publish(keep_last=True)._coordinator.exporter.arena.bytes
    assert len(double) == 2 * len(single)
    bench.follow(bench.publisher.new_ticket())
    for slot in (0, 1, 0, 1):
        fill(bench.source, slot + 1.0)
        bench.update()
        body = bench.publisher._coordinator.exporter.arena.slot(slot)[:4]
        assert np.frombuffer(body, np.float32)[0] == slot + 1.0
