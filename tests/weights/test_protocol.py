"""The protocol from both ends, in one process: followers step in threads."""

from __future__ import annotations

import time
import warnings
from pathlib import Path

import numpy as np
import pytest

from parallelkit.errors import (
    CorruptionError,
    ManifestMismatchError,
    NoBackendError,
    PartialCommitError,
    PeerLostError,
    QuarantinedError,
    StateError,
    TicketError,
    UnsupportedFeatureError,
    UpdateAbortedError,
    UpdateTimeoutError,
    VersionError,
    WeightTransferError,
)
from parallelkit.testing.arrays import Arrays
from parallelkit.testing.peer import fill, sample_model, values
from parallelkit.weights import WeightsUnchangedWarning, publish_weights, subscribe_weights
from parallelkit.weights.update import Update


def await_left(publisher, member=0):
    deadline = time.monotonic() + 5
    while publisher.members[member].state != "left" and time.monotonic() < deadline:
        time.sleep(0.01)


def test_one_to_four_followers_get_every_version(bench):
    bench.publish()
    followers = [bench.follow() for _ in range(4)]
    for version in (1, 2, 3):
        fill(bench.source, version + 0.5)
        report = bench.update()
        assert report.version == bench.publisher.version == version
        assert {m.state for m in report.members} == {"committed"}
        assert len({m.name for m in report.members}) == 4
        for follower in followers:
            assert follower.subscriber.version == version
            assert follower.subscriber.state == "current"
            assert values(follower.model) == {version + 0.5}


def test_ties_stay_tied_and_are_sent_once(bench):
    bench.publish()
    follower = bench.follow()
    report = bench.update()
    assert report.tensors == 6
    assert report.nbytes == sum(
        a.nbytes for name, a in bench.source.arrays.items() if name != "tail"
    )
    assert follower.model.arrays["head"] is follower.model.arrays["tail"]
    assert values(follower.model) == {1.0}


def test_a_follower_may_order_and_own_its_ties_differently(bench):
    bench.publish()
    tied = np.zeros((3, 5), np.float32)
    plain = sample_model().arrays
    model = Arrays(
        {"tail": tied, "head": tied} | {k: plain[k] for k in ("scalar", "empty", "half", "body")}
    )
    follower = bench.follow(model=model)
    bench.update()
    assert follower.done() is None
    assert values(model) == {1.0}


def test_strided_scalar_and_empty_targets(bench):
    rng = np.random.default_rng(0)
    wide = rng.standard_normal((6, 8)).astype(np.float32)
    bench.source = Arrays(
        {"t": wide.T, "s": wide[::2, 1:5], "n": wide[:, :0], "x": wide[0, 0:1].reshape(())}
    )
    bench.publish()
    target = np.zeros((8, 12), np.float32)
    model = Arrays(
        {
            "t": target[:, ::2],
            "s": np.zeros((4, 3), np.float32).T,
            "n": np.zeros((6, 0), np.float32),
            "x": np.zeros((), np.float32),
        }
    )
    follower = bench.follow(model=model)
    bench.update()
    assert follower.done() is None
    for name, array in bench.source.arrays.items():
        np.testing.assert_array_equal(model.arrays[name], array)
    assert not target[:, 1::2].any(), "bytes between the strides were written"


@pytest.mark.parametrize("verify", ["digest", "readback", "sample", "off"])
@pytest.mark.parametrize("aliased", [False, True])
def test_every_way_to_verify_gives_the_same_bytes(bench, verify, aliased):
    rng = np.random.default_rng(7)
    bench.source = Arrays(
        {
            "big": rng.integers(0, 255, 9 << 20, np.uint8),
            "odd": rng.integers(0, 255, 12345, np.uint8),
            "f": rng.standard_normal((100, 33)),
        }
    )
    bench.publish(verify=verify, aliased=aliased)
    zeros = {k: np.zeros_like(a) for k, a in bench.source.arrays.items()}
    follower = bench.follow(model=Arrays(zeros))
    for _ in range(2):
        bench.source.arrays["f"] += 1
        report = bench.update()
        for name, array in bench.source.arrays.items():
            np.testing.assert_array_equal(follower.model.arrays[name], array)
    assert report.verify == verify
    assert ("not verified" in report.verified) == (verify == "off")
    assert (report.changed_ratio is None) == (verify in ("sample", "off"))


def test_aliased_source_keeps_values_ties_and_notices_new_storage(bench):
    bench.publish(aliased=True)
    follower = bench.follow()
    assert values(bench.source) == {1.0}
    assert bench.source.arrays["head"] is bench.source.arrays["tail"]
    bench.update()
    fill(bench.source, 2.0)
    bench.update()
    assert values(follower.model) == {2.0}
    bench.source.arrays["body"] = bench.source.arrays["body"].copy()
    with pytest.raises(StateError, match="'body' does not live"):
        bench.publisher.update()
    assert bench.publisher.version == 2


def test_a_target_that_needs_something_else_is_told_before_anything_is_touched(bench):
    bench.publish()
    wrong = sample_model().arrays
    wrong["bodie"] = wrong.pop("body")
    wrong["half"] = np.zeros(8, np.float16)
    wrong["tail"] = wrong["tail"].copy()
    model = Arrays(wrong)
    with pytest.raises(ManifestMismatchError) as caught:
        subscribe_weights(model, bench.publisher.new_ticket(), timeout=5.0)
    text = "\n".join(caught.value.differences)
    assert "'bodie'" in text
    assert "did you mean 'body'" in text
    assert "shape of 'half'" in text
    assert "ties ['head', 'tail']" in text
    assert values(model) == {0.0}
    good = bench.follow()
    bench.update(good)
    assert values(good.model) == {1.0}


def test_tickets_are_used_once_expire_and_cannot_be_altered(bench):
    publisher = bench.publish()
    ticket = publisher.ticket
    assert publisher.ticket == ticket, "unused: the same one"
    bench.follow(ticket)
    assert publisher.ticket != ticket, "used: a new one"
    with pytest.raises(TicketError, match="joined already"):
        subscribe_weights(sample_model(), ticket, timeout=5.0)
    short = publisher.new_ticket(expires=0.05)
    time.sleep(0.1)
    with pytest.raises(TicketError, match="expired"):
        subscribe_weights(sample_model(), short, timeout=5.0)
    with pytest.raises(TicketError, match="altered"):
        subscribe_weights(sample_model(), ticket[:-2] + "AA", timeout=5.0)
    with pytest.raises(TicketError, match="ranks 0 to 0"):
        subscribe_weights(sample_model(), publisher.new_ticket(), member=3, timeout=5.0)
    for bad in (0, -1, True, "2", 1 << 20):
        with pytest.raises(TicketError, match="members"):
            publisher.new_ticket(members=bad)


def test_a_forged_key_or_token_is_refused_quickly(bench):
    import attrs

    from parallelkit.weights.ticket import Ticket

    publisher = bench.publish()
    ticket = Ticket.decode(publisher.ticket)
    started = time.monotonic()
    forged = attrs.evolve(ticket, token=b"\0" * 32).encode()
    with pytest.raises(TicketError, match="no such ticket"):
        subscribe_weights(sample_model(), forged, timeout=5.0)
    import zmq

    other = attrs.evolve(ticket, server_key=zmq.curve_keypair()[0].decode()).encode()
    with pytest.raises(TicketError, match="handshake"):
        subscribe_weights(sample_model(), other, timeout=5.0)
    nobody = attrs.evolve(ticket, endpoint="tcp://127.0.0.1:1").encode()
    with pytest.raises(PeerLostError, match="does not listen"):
        subscribe_weights(sample_model(), nobody, timeout=5.0)
    assert time.monotonic() - started < 4.0


def test_a_group_takes_part_once_it_is_complete(bench):
    publisher = bench.publish()
    ticket = publisher.new_ticket(members=2, name="engine")
    first = bench.follow(ticket, member=0)
    report = publisher.update()
    assert report.members == ()
    second = bench.follow(ticket, member=1)
    report = bench.update()
    assert [m.name.split(" ")[0] for m in report.members] == ["engine.0", "engine.1"]
    assert values(first.model) == values(second.model) == {1.0}
    second.subscriber.close()
    await_left(publisher, 1)
    assert publisher.update().members == (), "half an engine is no engine"
    first.step()
    assert isinstance(first.done(), PeerLostError)
    assert "of the same group" in str(first.error)


def test_wait_names_who_is_there(bench):
    publisher = bench.publish()
    with pytest.raises(UpdateTimeoutError, match="0 of 1 members joined within 0.05 s: none"):
        publisher.wait(timeout=0.05)
    bench.follow()
    publisher.wait()
    with pytest.raises(UpdateTimeoutError, match="1 of 2"):
        publisher.wait(2, timeout=0.05)


def test_a_member_that_does_not_step_aborts_by_name_and_the_number_is_used_again(bench):
    publisher = bench.publish(timeout=1.0)
    good, idle = bench.follow(), bench.follow()
    with pytest.raises(UpdateAbortedError) as caught:
        bench.update(good)
    assert idle.subscriber.name in str(caught.value)
    assert good.subscriber.name not in str(caught.value)
    assert isinstance(caught.value.__cause__, UpdateTimeoutError)
    assert caught.value.__cause__.missing == (idle.subscriber.name,)
    assert isinstance(good.error, UpdateAbortedError), "the other one is told"
    assert values(good.model) == values(idle.model) == {0.0}
    assert publisher.version == good.subscriber.version == 0
    idle.step()
    assert isinstance(idle.done(), UpdateAbortedError), "and so is the late one, when it comes"
    report = bench.update()
    assert report.version == 1
    assert values(good.model) == values(idle.model) == {1.0}


def test_a_failure_before_the_decision_leaves_all_at_the_old_version(bench):
    publisher = bench.publish()
    good, bad = bench.follow(), bench.follow()
    bench.update()
    fill(bench.source, 2.0)
    bad.subscriber._placement.fetch = lambda *a, **k: 1 / 0
    with pytest.raises(UpdateAbortedError, match="ZeroDivisionError") as caught:
        bench.update()
    assert list(caught.value.failures) == [bad.subscriber.name]
    assert isinstance(bad.error, ZeroDivisionError)
    assert isinstance(good.error, UpdateAbortedError)
    for follower in (good, bad):
        assert follower.subscriber.version == 1
        assert values(follower.model) == {1.0}
    del bad.subscriber._placement.fetch
    assert bench.update().version == 2
    assert values(bad.model) == values(good.model) == {2.0}
    assert publisher.version == 2


class Fragile(Arrays):
    """Fails while live memory is being written, when told to."""

    broken = False

    def finish(self) -> None:
        if self.broken:
            raise OSError("disk on fire")


def test_a_failure_after_the_decision_quarantines_that_member_only(bench):
    publisher = bench.publish()
    good, bad = bench.follow(), bench.follow(model=Fragile(sample_model().arrays))
    bench.update()
    fill(bench.source, 2.0)
    bad.model.broken = True
    with pytest.raises(PartialCommitError, match="disk on fire") as caught:
        bench.update()
    report = caught.value.report
    assert report.version == publisher.version == 2
    assert report.quarantined == (bad.subscriber.name,)
    assert {m.name: m.version for m in report.members} == {
        good.subscriber.name: 2,
        bad.subscriber.name: 1,
    }
    assert values(good.model) == {2.0}
    assert bad.subscriber.state == "quarantined"
    assert isinstance(bad.error, QuarantinedError)
    with pytest.raises(QuarantinedError, match="serves nothing.*disk on fire"):
        with bad.subscriber.use():
            pass
    assert "quarantined" in publisher.explain()
    bad.model.broken = False
    report = bench.update()
    assert report.quarantined == ()
    assert bad.subscriber.version == 3
    assert bad.subscriber.state == "current"
    with bad.subscriber.use() as arrays:
        assert arrays is bad.model.arrays


def test_a_corrupted_byte_aborts_and_names_the_tensor(bench, spy):
    publisher = bench.publish()
    follower = bench.follow()
    bench.update()
    fill(bench.source, 2.0)

    def corrupt():
        publisher._coordinator.exporter.arena.bytes[12] ^= 1

    spy(publisher, "stage", corrupt)
    with pytest.raises(UpdateAbortedError, match="arrived changed") as caught:
        bench.update()
    assert isinstance(caught.value.__cause__, CorruptionError)
    assert "body" in caught.value.__cause__.tensors
    assert values(follower.model) == {1.0}
    assert bench.update().version == 2
    assert values(follower.model) == {2.0}


class Careless(Arrays):
    """Damages a tensor after it was placed."""

    def finish(self) -> None:
        self.arrays["body"][3] += 1


def test_readback_finds_what_placing_broke(bench):
    bench.publish(verify="readback")
    bad = bench.follow(model=Careless(sample_model().arrays))
    with pytest.raises(PartialCommitError, match="live memory differs after placement, in body"):
        bench.update()
    assert isinstance(bad.error, QuarantinedError)
    assert bad.subscriber.state == "quarantined", "it knows, and serves nothing"
    with pytest.raises(QuarantinedError), bad.subscriber.use():
        pass


def test_readback_is_for_what_was_staged_too(bench):
    publisher = bench.publish(verify="readback")
    bad = bench.follow(model=Careless(sample_model().arrays))
    bad.subscriber.serve()
    assert publisher.update().members[0].state == "staged"
    for _ in range(2):
        with pytest.raises(QuarantinedError, match="live memory differs"), bad.subscriber.use():
            pass
    assert bad.subscriber.state == "quarantined"
    assert bad.subscriber.version == 0


def test_a_wrong_number_of_digests_is_an_abort(bench, monkeypatch):
    bench.publish()
    follower = bench.follow()
    monkeypatch.setattr(
        follower.subscriber._placement, "fetch", lambda *a, **k: b"\0" * 8000, raising=False
    )
    with pytest.raises(UpdateAbortedError, match="sent 1000 digests"):
        bench.update()


def test_versions_only_move_forward(bench):
    publisher = bench.publish()
    bench.follow()
    assert bench.update(version=10).version == 10
    for bad in (10, 9, 0, -1, True, 1.5, "11", 1 << 70):
        with pytest.raises(VersionError, match="only move forward"):
            publisher.update(bad)
    assert bench.update().version == 11


def test_without_members_only_the_version_moves(bench):
    report = bench.publish().update()
    assert report.version == 1
    assert "nothing was sent" in str(report)


def test_a_late_joiner_gets_the_next_update(bench, spy):
    publisher = bench.publish()
    early = bench.follow()
    late = []
    spy(publisher, "stage", lambda: late.append(bench.follow()))
    bench.update(early)
    assert late[0].subscriber.state == "waiting"
    with pytest.raises(StateError, match="no version has arrived"):
        with late[0].subscriber.use():
            pass
    assert values(late[0].model) == {0.0}
    bench.update()
    assert values(late[0].model) == {1.0}
    assert late[0].subscriber.version == 2


def test_a_follower_that_leaves_is_not_waited_for(bench):
    bench.publish()
    stays, leaves = bench.follow(), bench.follow()
    bench.update()
    leaves.subscriber.close()
    leaves.subscriber.close()
    report = bench.update(stays)
    assert [m.name for m in report.members] == [stays.subscriber.name]
    with pytest.raises(StateError, match="after close"):
        leaves.subscriber.step()
    assert leaves.subscriber.state == "closed"
    assert values(leaves.model) == {1.0}, "it keeps its weights"


def test_a_member_can_be_dropped_by_name(bench):
    publisher = bench.publish(timeout=0.5)
    stays, hangs = bench.follow(), bench.follow()
    publisher.drop(hangs.subscriber.name)
    assert len(bench.update(stays).members) == 1
    hangs.step()
    assert "let it go" in str(hangs.done())
    with pytest.raises(StateError, match="no member 'nobody'"):
        publisher.drop("nobody")


def test_closing_tells_the_followers(bench):
    publisher = bench.publish()
    follower = bench.follow()
    bench.update()
    follower.step()
    publisher.close()
    publisher.close()
    assert isinstance(follower.done(), PeerLostError)
    assert "publisher closed" in str(follower.error)
    for call in (publisher.update, publisher.new_ticket, publisher.wait, lambda: publisher.ticket):
        with pytest.raises(StateError, match="after close"):
            call()
    assert follower.subscriber.version == 1
    with follower.subscriber.use() as arrays:
        assert arrays is follower.model.arrays


def test_step_waits_or_polls(bench):
    bench.publish()
    follower = bench.follow()
    assert follower.subscriber.step(timeout=0) == 0
    started = time.monotonic()
    with pytest.raises(UpdateTimeoutError, match="began no update within 0.2 s"):
        follower.subscriber.step(timeout=0.2)
    assert 0.15 < time.monotonic() - started < 2.0
    for bad in (-1, float("nan"), float("inf")):
        with pytest.raises(WeightTransferError, match="timeout is"):
            follower.subscriber.step(timeout=bad)


def test_step_inside_use_is_refused(bench):
    bench.publish()
    follower = bench.follow()
    bench.update()
    with follower.subscriber.use():
        with pytest.raises(StateError, match="inside `with subscriber.use"):
            follower.subscriber.step(0)


def test_update_inside_update_is_refused(bench, spy):
    publisher = bench.publish()
    bench.follow()
    caught = []

    def again():
        with pytest.raises(StateError, match="one update at a time"):
            publisher.update()
        caught.append(True)

    spy(publisher, "stage", again)
    bench.update()
    assert caught


def test_an_exception_in_the_source_aborts(bench, monkeypatch):
    publisher = bench.publish()
    follower = bench.follow()
    monkeypatch.setattr(bench.source, "host_bytes", lambda i: 1 / 0, raising=False)
    with pytest.raises(ZeroDivisionError):
        bench.update()
    assert isinstance(follower.error, UpdateAbortedError)
    monkeypatch.undo()
    assert bench.update().version == 1
    assert publisher.version == 1


def test_a_model_that_changes_shape_is_noticed(bench):
    bench.publish()
    follower = bench.follow()
    bench.source.arrays["body"] = np.ones(5, np.float32)
    with pytest.raises(WeightTransferError, match="'body'.*changed after publish_weights"):
        bench.update()
    assert isinstance(follower.error, UpdateAbortedError)
    assert follower.subscriber.version == 0


def test_serve_stages_and_step_or_use_flips(bench):
    publisher = bench.publish()
    follower = bench.follow()
    follower.subscriber.serve()
    follower.subscriber.serve()
    report = publisher.update()
    assert [m.state for m in report.members] == ["staged"]
    assert report.pause_seconds == 0
    assert values(follower.model) == {0.0}, "live memory waits for its owner"
    assert (follower.subscriber.version, follower.subscriber.staged) == (0, 1)
    with follower.subscriber.use():
        assert values(follower.model) == {1.0}
        fill(bench.source, 2.0)
        publisher.update()
        assert values(follower.model) == {1.0}, "one version from beginning to end"
    assert follower.subscriber.step(5.0) == 2
    assert values(follower.model) == {2.0}
    for value in (3.0, 4.0, 5.0):
        fill(bench.source, value)
        publisher.update()
    assert follower.subscriber.step(0) == 5
    assert values(follower.model) == {5.0}
    assert follower.subscriber.step(0) == 5
    with pytest.raises(UpdateTimeoutError, match="no new version was staged"):
        follower.subscriber.step(0.1)


def test_serve_reports_the_end_of_the_publisher(bench):
    publisher = bench.publish()
    follower = bench.follow()
    follower.subscriber.serve()
    publisher.update()
    assert follower.subscriber.connected
    publisher.close()
    assert follower.subscriber.step(5.0) == 1
    with pytest.raises(PeerLostError):
        follower.subscriber.step(5.0)
    assert not follower.subscriber.connected
    assert values(follower.model) == {1.0}


def test_serve_survives_an_abort(bench, spy):
    publisher = bench.publish()
    follower = bench.follow()
    follower.subscriber.serve()
    spy(publisher, "stage", lambda: publisher._coordinator.exporter.arena.bytes.__setitem__(0, 77))
    with pytest.raises(UpdateAbortedError):
        publisher.update()
    with pytest.raises(UpdateAbortedError):
        follower.subscriber.step(5.0)
    publisher.update()
    assert follower.subscriber.step(5.0) == 1


def test_unchanged_weights_are_noticed(bench):
    bench.publish()
    bench.follow()
    assert bench.update().changed_ratio is None
    bench.source.arrays["body"][0] = 9
    assert 0 < bench.update().changed_ratio <= 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert bench.update().changed_ratio == 0
        assert bench.update().changed_ratio == 0
    with pytest.warns(WeightsUnchangedWarning, match="3 versions in a row"):
        report = bench.update()
    assert "3 versions in a row" in str(report)


def test_a_named_segment_works_the_same_and_goes_away(bench):
    from parallelkit.weights.segments import SHM_DIR

    before = set(SHM_DIR.glob("parallelkit-*"))
    publisher = bench.publish(named=True)
    follower = bench.follow()
    bench.update()
    assert values(follower.model) == {1.0}
    assert set(SHM_DIR.glob("parallelkit-*")) - before
    publisher.close()
    assert set(SHM_DIR.glob("parallelkit-*")) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"verify": "md5"}, "verify is 'md5'"),
        ({"commit": "never"}, "commit is 'never'"),
        ({"timeout": 0}, "timeout is 0"),
        ({"timeout": float("nan")}, "timeout is nan"),
        ({"timeout": True}, "timeout is True"),
        ({"transport": "carrier-pigeon"}, "transport 'carrier-pigeon' is not to be had"),
        ({"endpoint": "0.0.0.0:0"}, "one interface"),
        ({"bogus": 1}, "bogus"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_opened(options, message):
    with pytest.raises(WeightTransferError, match=message):
        publish_weights(sample_model(), **options)


def test_unknown_models_and_engines_say_what_to_install(bench):
    with pytest.raises(NoBackendError, match="reads weights from a builtins.dict"):
        publish_weights({})
    publisher = bench.publish()
    with pytest.raises(NoBackendError, match="places weights into a builtins.object"):
        subscribe_weights(object(), publisher.ticket)
    with pytest.raises(UnsupportedFeatureError, match="subscribe_weights"):
        publisher.attach("ftp://127.0.0.1:8000")


def test_hostile_frames_leave_the_publisher_working(bench):
    from parallelkit.weights.client import ControlClient
    from parallelkit.weights.ticket import Ticket

    publisher = bench.publish()
    ticket = Ticket.decode(publisher.new_ticket())
    for frame in (b"", b"\x80\x04cos\nsystem\n", b"\xff" * 3000, b"x" * 5000):
        client = ControlClient(ticket, 5.0)
        client._dealer.send(frame)
        answer = client.receive(time.monotonic() + 5.0)
        assert type(answer).__name__ == "Refused", answer
        client.close()
    bench.follow()
    assert bench.update().version == 1


class Interrupted(Arrays):
    """Fails after some tensors have been placed, when told to."""

    fail_at: int | None = None

    def destination(self, index: int) -> memoryview | None:
        if index == self.fail_at:
            raise MemoryError("no more room")
        return None  # placed one by one, so that those before are in place

    def write(self, index: int, data: memoryview) -> None:
        super().write(index, data)


def test_half_a_placement_is_quarantine_and_the_next_update_is_whole(bench):
    bench.publish()
    follower = bench.follow(model=Interrupted(sample_model().arrays))
    bench.update()
    fill(bench.source, 2.0)
    follower.model.fail_at = 3
    with pytest.raises(PartialCommitError, match="MemoryError"):
        bench.update()
    assert len(values(follower.model)) > 1, "the failure came in the middle"
    assert follower.subscriber.state == "quarantined"
    assert follower.subscriber.version == 1
    follower.model.fail_at = None
    fill(bench.source, 3.0)
    bench.update()
    assert values(follower.model) == {3.0}
    assert follower.subscriber.state == "current"


class Slow(Arrays):
    """Takes its time to place."""

    def begin(self) -> None:
        time.sleep(0.3)


@pytest.mark.parametrize("aliased", [False, True])
def test_the_source_may_change_as_soon_as_update_returns(bench, aliased):
    bench.publish(aliased=aliased)
    quick, slow = bench.follow(), bench.follow(model=Slow(sample_model().arrays))
    for value in (1.0, 2.0):
        fill(bench.source, value)
        for follower in (quick, slow):
            follower.step()
        bench.publisher.update()
        fill(bench.source, -1.0)
        for follower in (quick, slow):
            assert follower.done() is None
            assert values(follower.model) == {value}


def test_one_of_three_failing_leaves_none_ahead(bench):
    bench.publish()
    followers = [bench.follow() for _ in range(3)]
    bench.update()
    fill(bench.source, 2.0)
    followers[1].subscriber._placement.fetch = lambda *a, **k: 1 / 0
    with pytest.raises(UpdateAbortedError):
        bench.update()
    assert [f.subscriber.version for f in followers] == [1, 1, 1]
    assert [values(f.model) for f in followers] == [{1.0}] * 3
    assert [f.subscriber.state for f in followers] == ["current"] * 3


def test_memory_handles_and_threads_are_flat_over_updates(bench):
    import os
    import threading

    bench.publish(aliased=False)
    follower = bench.follow()

    def held():
        rss = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
        return rss, len(os.listdir("/proc/self/fd")), threading.active_count()

    for step in range(5):
        fill(bench.source, step)
        bench.update()
    rss, handles, threads = held()
    for step in range(100):
        fill(bench.source, step)
        bench.update()
    after = held()
    assert after[1:] == (handles, threads)
    assert after[0] - rss < 2 << 20, f"{(after[0] - rss) / 1e6:.1f} MB more after 100 updates"
    assert follower.subscriber.version == 105


def test_what_the_state_does_not_allow_is_refused(bench):
    """Calls against states; what is not listed is allowed."""
    publisher = bench.publish()
    follower = bench.follow().subscriber
    waiting = {"use": StateError}
    for name, error in waiting.items():
        with pytest.raises(error), getattr(follower, name)():
            pass
    bench.update()
    follower.close()
    for call in (follower.step, follower.serve, lambda: follower.use().__enter__()):
        with pytest.raises(StateError, match="after close"):
            call()
    publisher.close()
    for call in (publisher.update, publisher.wait, publisher.new_ticket, publisher.attach):
        with pytest.raises((StateError, TypeError)):
            call()
    assert publisher.version == 1
    assert "version 1" in publisher.explain()


def test_an_interrupt_after_the_decision_uses_the_number_up(bench, monkeypatch):
    publisher = bench.publish()
    follower = bench.follow(model=Slow(sample_model().arrays))
    real = publisher._coordinator.members.inbox.get

    def interrupted(deadline):
        if publisher._coordinator.version:
            monkeypatch.undo()
            raise KeyboardInterrupt
        return real(deadline)

    monkeypatch.setattr(publisher._coordinator.members.inbox, "get", interrupted)
    follower.step()
    with pytest.raises(KeyboardInterrupt):
        publisher.update()
    follower.done()
    assert publisher.version == 1
    assert publisher.members[0].state == "quarantined"
    fill(bench.source, 2.0)
    assert bench.update().version == 2
    assert values(follower.model) == {2.0}


@pytest.mark.parametrize("phase", ["prepared", "commit"])
@pytest.mark.parametrize("serve", [False, True])
def test_an_interrupt_at_a_prepared_subscriber_is_quarantine_on_both_sides(bench, phase, serve):
    publisher = bench.publish()
    follower = bench.follow()
    bench.update()

    def interrupt(name):
        if name == phase:
            follower.subscriber._phase = lambda name: None
            raise KeyboardInterrupt

    follower.subscriber._phase = interrupt
    fill(bench.source, 2.0)
    if serve:
        follower.subscriber.serve()
    with pytest.raises(PartialCommitError, match="KeyboardInterrupt"):
        publisher.update() if serve else bench.update()
    assert serve or isinstance(follower.error, KeyboardInterrupt)
    assert follower.subscriber.state == publisher.members[0].state == "quarantined"
    with pytest.raises(QuarantinedError):
        with follower.subscriber.use():
            pass
    publisher.update() if serve else bench.update()
    with follower.subscriber.use():
        assert values(follower.model) == {2.0}
    assert follower.subscriber.version == 3


def test_an_interrupt_while_what_was_staged_goes_live_is_raised_as_itself(bench, monkeypatch):
    publisher = bench.publish()
    follower = bench.follow()
    follower.subscriber.serve()
    publisher.update()

    def interrupt(workers):
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(follower.subscriber._placement, "place_staged", interrupt, raising=False)
    with pytest.raises(KeyboardInterrupt), follower.subscriber.use():
        pass
    assert follower.subscriber.state == "quarantined"
    with follower.subscriber.use():  # what was staged is there still
        assert follower.subscriber.version == 1
    assert follower.subscriber.state == "current"


def test_a_version_is_not_put_in_place_from_within_another(bench):
    publisher = bench.publish()
    follower = bench.follow()
    subscriber = follower.subscriber
    subscriber.serve()
    publisher.update()
    place, said = subscriber._placement.place_staged, []

    def placing(workers):
        for call in (lambda: subscriber.step(1), lambda: subscriber.use().__enter__()):
            with pytest.raises(StateError, match="while a version is put in place"):
                call()
            said.append(True)
        place(workers)

    subscriber._placement.place_staged = placing
    with subscriber.use():
        assert subscriber.version == 1
    assert said == [True, True]
    del subscriber._placement.place_staged


def test_who_serves_and_has_lost_its_way_to_the_bytes_leaves(bench, monkeypatch):
    """It can get nothing any more: or every later update would wait for it, and be aborted."""
    publisher = bench.publish()
    cut, goes_on = bench.follow(), bench.follow()
    cut.subscriber.serve()
    goes_on.subscriber.serve()

    def gone(*args, **kwargs):
        raise PeerLostError("the connection ended", peers=["publisher rank 0"])

    monkeypatch.setattr(cut.subscriber._placement, "fetch", gone, raising=False)
    collect = Update._collect

    def collected(self, kind, phase, duty):
        if phase == "transfer":  # it has failed, and left, before it is waited for
            await_left(publisher)
        return collect(self, kind, phase, duty)

    monkeypatch.setattr(Update, "_collect", collected)
    with pytest.raises(UpdateAbortedError, match="the connection ended"):
        publisher.update()
    await_left(publisher)
    assert publisher.update().version == 1
    assert [m.state for m in publisher.members] == ["left", "joined"]
    assert not cut.subscriber.connected


def test_what_an_aborted_update_staged_is_no_version_to_compare_with(bench):
    publisher = bench.publish(timeout=1)
    gone = bench.follow()
    bench.update()
    fill(bench.source, 2.0)
    with pytest.raises(UpdateAbortedError):
        publisher.update()  # staged, and the member does not step
    gone.subscriber.close()
    await_left(publisher)
    assert publisher.update().members == ()  # moves the version, and stages nothing
    bench.followers.clear()
    bench.follow()
    assert bench.update().changed_ratio == 1.0


def test_who_is_lost_between_updates_is_named_in_the_next_report(bench):
    publisher = bench.publish()
    stays, leaves = bench.follow(), bench.follow()
    bench.update()
    leaves.subscriber.close()
    await_left(publisher, 1)
    half = publisher.new_ticket(members=2, name="engine")
    bench.follow(half, member=0)
    text = str(bench.update(stays))
    assert f"{leaves.subscriber.name}: left" in text
    assert "engine: waits for 1 more of 2" in text
    assert leaves.subscriber.name not in str(bench.update(stays)), "said once"


def test_a_refused_member_is_named_by_wait_and_may_try_again(bench):
    publisher = bench.publish()
    ticket = publisher.new_ticket(name="engine")
    with pytest.raises(ManifestMismatchError):
        subscribe_weights(Arrays({"x": np.zeros(3)}), ticket, timeout=5.0)
    text = r"engine.0 .*refused.*not what the target needs.*: .*'x'"
    with pytest.raises(UpdateTimeoutError, match=text):
        publisher.wait(timeout=0.5)
    bench.follow(ticket)
    publisher.wait()


def test_the_loss_of_the_publisher_is_told_each_time_while_serving(bench):
    publisher = bench.publish()
    follower = bench.follow()
    follower.subscriber.serve()
    publisher.update()
    follower.subscriber.step(5.0)
    publisher.close()
    for _ in range(3):
        with pytest.raises(PeerLostError):
            follower.subscriber.step(5.0)


def test_a_failed_control_thread_is_an_error_not_an_empty_report(bench, monkeypatch):
    publisher = bench.publish()
    server = publisher._coordinator.server
    monkeypatch.setattr(server, "_flush", lambda: 1 / 0)
    server._wake()
    server._thread.join(5.0)
    for call in (publisher.update, publisher.wait, publisher.new_ticket):
        with pytest.raises(StateError, match="control channel has failed"):
            call()


@pytest.mark.parametrize("name", ["", "a" * 201, "a\ud800", "two\nlines", 5])
def test_group_names_can_be_carried_and_printed(bench, name):
    with pytest.raises(TicketError, match="name is"):
        bench.publish().new_ticket(name=name)


def test_closing_in_the_middle_of_a_call_ends_the_call(bench, spy):
    publisher = bench.publish(timeout=20.0)
    follower, idle = bench.follow(), bench.follow()
    follower.step(timeout=20.0)
    spy(publisher, "stage", publisher.close)
    started = time.monotonic()
    with pytest.raises(StateError, match="while update"):
        publisher.update()
    assert isinstance(follower.done(), UpdateAbortedError | PeerLostError)
    with pytest.raises(StateError, match="after close"):
        publisher.update()
    other = bench.publish()
    waiting = bench.follow(other.new_ticket())
    waiting.step(timeout=20.0)
    time.sleep(0.1)
    waiting.subscriber.close()
    assert isinstance(waiting.done(), StateError)
    assert idle.subscriber.version == 0
    assert time.monotonic() - started < 8.0


def test_a_follower_may_close_right_after_its_step(bench, monkeypatch):
    """The end of a connection is acted on after its last message, however late both are read."""
    publisher = bench.publish()
    server = publisher._coordinator.server
    receive = server._receive

    def late():
        time.sleep(0.05)
        receive()

    monkeypatch.setattr(server, "_receive", late)
    for value in range(5):
        fill(bench.source, value)
        follower = bench.follow()

        def step(follower=follower):
            follower.subscriber.step(10.0)
            follower.subscriber.close()

        import threading

        thread = threading.Thread(target=step)
        thread.start()
        report = publisher.update()
        thread.join()
        assert [m.state for m in report.members] == ["committed"]
        bench.followers.clear()


def test_a_dropped_publisher_closes(bench):
    import gc
    import threading

    before = threading.active_count()
    publisher = publish_weights(sample_model(), timeout=5.0)
    subscriber = subscribe_weights(sample_model(), publisher.ticket, timeout=5.0)
    del publisher
    gc.collect()
    with subscriber, pytest.raises(PeerLostError, match="dropped"):
        subscriber.step(5.0)
    assert threading.active_count() == before


def test_a_version_that_is_here_already_is_refused(bench):
    publisher = bench.publish()
    bench.follow()
    bench.update()
    publisher._version = publisher._coordinator.members.version = 0
    with pytest.raises(UpdateAbortedError, match="version 1 is here already"):
        bench.update()


def test_the_report_accounts_for_the_whole_update(bench, monkeypatch):
    publisher = bench.publish()
    bench.follow()
    monkeypatch.setattr(bench.source, "begin", lambda: time.sleep(0.3), raising=False)
    started = time.monotonic()
    report = bench.update()
    assert report.phases["look"] >= 0.3
    assert 0.3 <= report.seconds <= time.monotonic() - started
    assert publisher.version == 1


def test_a_group_that_is_none_is_refused(bench):
    from parallelkit.errors import GroupError

    with pytest.raises(GroupError, match="group is a str"):
        publish_weights(bench.source, group="trainers")


def test_several_ranks_without_a_group_do_not_publish_apart(bench, monkeypatch):
    from parallelkit.errors import NotInitializedError

    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(NotInitializedError, match="each rank would publish on its own"):
        publish_weights(bench.source)
