"""`commit="in_place"`: members fetch after the decision, straight into live memory."""

from __future__ import annotations

import numpy as np
import pytest

from parallelkit.errors import CorruptionError, PartialCommitError, QuarantinedError
from parallelkit.testing.arrays import Arrays
from parallelkit.testing.peer import fill, sample_model, values
from parallelkit.weights.readers import Readers

TRANSPORTS = pytest.mark.parametrize("transport", ["shm", "tcp"])


@pytest.fixture
def fetches(monkeypatch):
    """How many buckets were asked for in each fetch; the first `damage` come changed."""

    class Fetches(list):
        damage = 0

    seen, real = Fetches(), Readers.bring

    def bring(self, buckets, memories, workers, **options):
        real(self, buckets, memories, workers, **options)
        seen.append(len(buckets))
        if seen.damage:
            seen.damage -= 1
            piece = buckets[0].pieces[0]
            memories[piece.tensor][piece.target.offset] ^= 1

    monkeypatch.setattr(Readers, "bring", bring)
    return seen


@TRANSPORTS
def test_nothing_is_fetched_before_the_decision(bench, spy, fetches, transport):
    publisher = bench.publish(commit="in_place", transport=transport)
    follower = bench.follow()
    for version in (1, 2):
        fill(bench.source, version + 0.5)
        before = values(follower.model)
        at_verify = []
        spy(
            publisher,
            "verify",
            lambda seen=at_verify: seen.append((list(fetches), values(follower.model))),
        )
        report = bench.update()
        assert at_verify == [([1] * (version - 1), before)]
        assert fetches == [1] * version
        assert values(follower.model) == {version + 0.5}
    (member,) = report.members
    assert member.state == "committed"
    assert member.pause_seconds > 0
    assert member.repeated == 0
    assert "at the source and as placed" in report.verified
    assert (member.verified, member.staged_tensors) == ("live memory", 0)
    assert "commit in_place" in publisher.explain()


@TRANSPORTS
def test_it_needs_no_memory_besides(bench, transport):
    bench.publish(commit="in_place", transport=transport)
    follower = bench.follow()
    bench.update()
    assert follower.subscriber._placement._spare is None
    assert follower.subscriber._placement._staging is None


@TRANSPORTS
def test_a_bucket_that_comes_changed_is_fetched_once_more(bench, fetches, transport):
    bench.publish(commit="in_place", transport=transport)
    follower = bench.follow()
    fetches.damage = 1
    report = bench.update()
    assert fetches == [1, 1]
    assert report.members[0].repeated == 1
    assert values(follower.model) == {1.0}


@TRANSPORTS
def test_one_that_comes_changed_twice_is_quarantine_by_tensor(bench, fetches, transport):
    publisher = bench.publish(commit="in_place", transport=transport)
    good, bad = bench.follow(), bench.follow()
    bench.update()
    fill(bench.source, 2.0)
    bad.subscriber._placement._bring = _damaging(bad.subscriber._placement)
    with pytest.raises(PartialCommitError, match="buckets came changed twice, in body") as caught:
        bench.update(good, bad)
    assert caught.value.report.quarantined == (bad.subscriber.name,)
    assert isinstance(bad.error, QuarantinedError)
    assert isinstance(bad.error.__cause__, CorruptionError)
    assert "body" in bad.error.__cause__.tensors
    assert values(good.model) == {2.0}
    assert bad.subscriber.state == "quarantined"
    assert publisher.version == 2
    del bad.subscriber._placement._bring
    assert bench.update(good, bad).quarantined == ()
    assert values(bad.model) == {2.0}
    assert bad.subscriber.version == 3


def _damaging(placement):
    real = placement._bring

    def bring(fetch, buckets, memories, workers):
        real(fetch, buckets, memories, workers)
        piece = buckets[0].pieces[0]
        memories[piece.tensor][piece.target.offset] ^= 1

    return bring


def test_a_byte_changed_in_the_arena_after_the_source_was_hashed_is_found(bench, spy):
    publisher = bench.publish(commit="in_place")
    bench.follow()

    def corrupt():
        publisher._coordinator.exporter.arena.bytes[12] ^= 1

    spy(publisher, "verify", corrupt)
    with pytest.raises(PartialCommitError, match="came changed twice, in body"):
        bench.update()


def test_what_is_not_hashed_is_not_fetched_again(bench, fetches):
    bench.publish(commit="in_place", verify="off")
    follower = bench.follow()
    fetches.damage = 1
    report = bench.update()
    assert fetches == [1]
    assert report.members[0].repeated == 0
    assert "not verified" in report.verified
    assert report.members[0].verified == "nothing"
    assert len(values(follower.model)) > 1


class Indirect(Arrays):
    """Its memory is written by itself."""

    def __init__(self, arrays):
        super().__init__(arrays)
        self.written = []

    def destination(self, index):
        return None

    def write(self, index, data):
        self.written.append(index)
        super().write(index, data)


@TRANSPORTS
def test_a_target_that_writes_itself_gets_whole_verified_tensors(bench, fetches, transport):
    bench.publish(commit="in_place", transport=transport, verify="readback")
    follower = bench.follow(model=Indirect(sample_model().arrays))
    fetches.damage = 1
    report = bench.update()
    assert report.members[0].repeated == 1
    assert report.members[0].verified == "live memory", "read back"
    assert values(follower.model) == {1.0}
    assert sorted(follower.model.written) == [0, 1, 2, 3], "all but the empty one, once"


def test_many_buckets_are_fetched_and_hashed_in_turn(bench, fetches):
    rng = np.random.default_rng(0)
    arrays = {f"t{i}": rng.integers(0, 256, (3 << 20) + i, np.uint8) for i in range(20)}
    bench.source = Arrays(arrays)
    bench.publish(commit="in_place")
    follower = bench.follow(model=Arrays({k: np.zeros_like(a) for k, a in arrays.items()}))
    bench.update()
    assert fetches == [16, 4]
    for name, array in arrays.items():
        np.testing.assert_array_equal(follower.model.arrays[name], array)


@TRANSPORTS
def test_one_that_serves_fetches_after_the_decision_into_memory_of_its_own(bench, transport):
    publisher = bench.publish(commit="in_place", transport=transport)
    follower = bench.follow()
    follower.subscriber.serve()
    report = publisher.update()
    assert [m.state for m in report.members] == ["staged"]
    assert values(follower.model) == {0.0}
    assert follower.subscriber.step(5.0) == 1
    assert values(follower.model) == {1.0}


@pytest.mark.parametrize("commit", ["staged", "in_place"])
def test_the_ranks_of_a_publisher_commit_alike(job, spread, commit):
    from parallelkit.weights.needs import Needs

    run = job(spread(), commit=commit)
    run.join(Needs.whole(run.manifest))
    results, errors = run.update()
    assert not errors
    assert results[0] == results[1]
    run.check()


def test_automatic_is_staged(bench):
    assert "commit staged" in bench.publish().explain()
