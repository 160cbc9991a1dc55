"""Publishers of several ranks: each hands out its own parts, members get exactly what they keep."""

from __future__ import annotations

import contextlib
import random
import threading
import time

import numpy as np
import pytest

from parallelkit.errors import (
    CollectiveError,
    CorruptionError,
    ManifestError,
    PeerLostError,
    RankMismatchError,
    TransportError,
    UnsupportedFeatureError,
    UpdateAbortedError,
    UpdateTimeoutError,
    WeightTransferError,
)
from parallelkit.protocols import RegionSink, ShardedSource
from parallelkit.testing.meeting import meet, on_ranks
from parallelkit.testing.parts import PartsSink, PartsSource
from parallelkit.testing.shards import random_manifest, random_needs, random_values
from parallelkit.weights import publish_weights, subscribe_weights
from parallelkit.weights.exports import export, exporting_ranks
from parallelkit.weights.layout import Region
from parallelkit.weights.needs import Needs
from parallelkit.weights.plan import plan_transfer
from parallelkit.weights.report import report_from_dict


def test_the_fakes_are_what_the_protocol_says(spread):
    manifest = spread()
    assert isinstance(PartsSource(manifest, random_values(manifest), 0), ShardedSource)
    assert isinstance(PartsSink(manifest, Needs.whole(manifest), frozenset()), RegionSink)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("commit", ["staged", "in_place"])
@pytest.mark.parametrize("verify", ["digest", "readback", "sample", "off"])
def test_members_get_what_they_keep_from_the_ranks_that_have_it(
    job, transport, commit, verify, spread
):
    run = job(spread(rows=7), transport=transport, commit=commit, verify=verify)
    half = Needs.of(run.manifest, [Region((3, 0), (2, 6)), Region((0, 1), (7, 4)), None])
    run.join(Needs.whole(run.manifest))
    run.join(half, indirect={1})
    for seed in (1, 2):
        run.change(seed)
        results, errors = run.update()
        assert not errors
        run.check()
    report = results[0]
    assert results == [report, report], "every rank has the same"
    assert [m.nbytes for m in report.members] == [
        plan_transfer(run.manifest, needs).nbytes for *_, needs in run.members
    ]
    whole, part = report.members
    assert dict(whole.sources) == {0: 4 * 4 * 6 + 2 * 7 * 3 + 8 * 6, 1: 4 * 3 * 6 + 2 * 7 * 3}
    assert dict(part.sources) == {0: 4 * 6 + 2 * 7 * 2, 1: 4 * 6 + 2 * 7 * 2}
    assert {m.transport for m in report.members} == {report.transport} == {transport}
    assert f"by {transport} from ranks 0-1" in str(report)
    assert report_from_dict(report.to_dict()) == report
    assert report.changed_ratio == (1.0 if verify in ("digest", "readback") else None)
    # One tensor of the second is written by itself: without readback its live bytes are unseen.
    assert ("placed" in report.verified) == (commit == "in_place" and verify == "readback")
    live, mixed = "live memory", "live memory; staged bytes for 1 of 2 tensors"
    in_place = (live, live if verify == "readback" else mixed)
    staged = (live, live) if verify == "readback" else ("staged bytes", "staged bytes")
    expected = in_place if commit == "in_place" else staged
    assert (whole.verified, part.verified) == (
        expected if verify != "off" else ("nothing", "nothing")
    )


@pytest.mark.parametrize("seed", range(8))
def test_random_models_meshes_and_needs(job, seed):
    rng = random.Random(seed)
    manifest = random_manifest(rng)
    while manifest.mesh.size > 8:
        manifest = random_manifest(rng)
    run = job(
        manifest,
        transport=rng.choice(["shm", "tcp"]),
        commit=rng.choice(["staged", "in_place"]),
        verify=rng.choice(["digest", "readback"]),
    )
    for _ in range(3):
        needs = random_needs(rng, manifest)
        indirect = {i for i in range(len(needs)) if rng.randrange(4) == 0}
        member, _ = run.join(needs, indirect)
        if rng.randrange(3) == 0:
            member.serve()
    for version in (1, 2):
        run.change(version)
        results, errors = run.update()
        assert not errors
        assert {type(r).__name__ for r in results} == {"TransferReport"}
        run.check()
        for (*_, needs), member in zip(run.members, results[0].members, strict=True):
            assert member.nbytes == plan_transfer(manifest, needs).nbytes


def test_each_rank_hands_out_its_own_export_and_no_other(job, spread):
    run = job(spread(degree=4))
    posts = run.lead._coordinator.routes.posts
    assert list(posts) == exporting_ranks(run.manifest) == [0, 1, 2, 3]
    assert [p.nbytes for p in posts.values()] == [
        max(export(run.manifest, rank).nbytes, 256) for rank in range(4)
    ]
    member, _ = run.join(Needs.of(run.manifest, [Region((2, 0), (2, 6)), None, None]))
    assert list(member._placement.readers._transports) == [1], "connected to that rank alone"
    text = run.lead.explain()
    assert "2 tensors sharded over x 4, 1 replicated" in text
    assert "4 ranks hand out their own parts" in text
    assert "this is rank 3; rank 0 coordinates" in run.publishers[3].explain()


def test_a_member_that_keeps_nothing_takes_part(job, spread):
    run = job(spread())
    run.join(Needs.of(run.manifest, [None, None, None]))
    results, errors = run.update()
    assert not errors
    assert results[0].members[0].nbytes == 0
    assert run.members[0][0].version == 1


def test_a_rank_that_fails_is_named_and_everyone_keeps_the_old_version(job, spread):
    run = job(spread())
    run.join(Needs.whole(run.manifest))
    run.update()
    before = [kept.copy() for kept in run.members[0][1].kept]
    for rank in (0, 1):
        run.change(5)
        run.sources[rank].problem = ManifestError("its tensor is gone")
        results, errors = run.update()
        assert [type(r) for r in results] == [ManifestError, ManifestError]
        other = results[1 - rank]
        assert "its tensor is gone" in str(results[rank])
        assert f"as rank {rank} reports" in str(other) or rank == 0
        assert isinstance(errors[0], UpdateAbortedError)
        for kept, old in zip(run.members[0][1].kept, before, strict=True):
            assert np.array_equal(kept, old)
        assert [p.version for p in run.publishers] == [1, 1]
    results, errors = run.update()
    assert not errors
    assert [r.version for r in results] == [2, 2]
    run.check()


def test_a_rank_that_dies_is_named_and_everyone_keeps_the_old_version(job, spread):
    run = job(spread(degree=3))
    run.join(Needs.whole(run.manifest))
    run.update()

    def die(*args):
        run.groups[1].leave()
        raise SystemExit

    run.publishers[1]._worker._stage = die
    real = run.groups[1].broadcast_object

    def silent(obj, src=0, **options):
        if src == 1:
            raise CollectiveError("dead")
        return real(obj, src, **options)

    run.groups[1].broadcast_object = silent
    run.change(3)
    results, errors = run.update()
    for rank in (0, 2):
        assert isinstance(results[rank], PeerLostError)
        assert results[rank].peers == ("publisher rank 1",)
    assert isinstance(errors[0], UpdateAbortedError)
    assert "publisher rank 1" in str(errors[0])
    assert run.members[0][0].version == 1
    assert run.lead.version == 1


def test_a_rank_that_stalls_is_named_at_the_deadline(job, spread):
    run = job(spread(), timeout=1.0)
    run.join(Needs.whole(run.manifest))
    stage = run.publishers[1]._worker._stage

    def slow(order):
        time.sleep(2.0)
        return stage(order)

    run.publishers[1]._worker._stage = slow
    results, errors = run.update()
    assert isinstance(results[0], UpdateTimeoutError)
    assert results[0].missing == ("publisher rank 1",)
    assert "publisher rank 1" in str(errors[0])
    assert run.members[0][0].version == 0


def test_a_byte_that_is_changed_in_another_rank_s_arena_is_found_by_tensor(job, spread):
    run = job(spread())
    run.join(Needs.whole(run.manifest))
    worker = run.publishers[1]._worker
    stage = worker._stage

    def corrupt(order):
        said = stage(order)
        worker._lanes["host"].arena.bytes[3] ^= 1
        return said

    worker._stage = corrupt
    results, errors = run.update()
    assert isinstance(results[0], UpdateAbortedError)
    assert isinstance(results[0].__cause__, CorruptionError)
    assert "w" in results[0].__cause__.tensors
    assert isinstance(results[1], UpdateAbortedError)
    assert run.members[0][0].version == 0
    worker._stage = stage
    results, errors = run.update()
    assert not errors
    run.check()


def test_members_that_keep_the_same_are_hashed_for_once(job, spread):
    run = job(spread())
    for _ in range(3):
        run.join(Needs.whole(run.manifest))
    run.join(Needs.of(run.manifest, [Region((0, 0), (1, 6)), None, None]))
    for _ in range(2):
        run.update()
    assert len(run.publishers[1]._worker._lanes["host"]._sides) == 2
    assert len(run.publishers[1]._worker._kinds._known) == 2
    run.check()


def test_what_members_that_left_kept_is_forgotten_on_every_rank(job, spread):
    run = job(spread())
    coordinator, worker = run.lead._coordinator, run.publishers[1]._worker
    run.join(Needs.whole(run.manifest))
    other = Needs.of(run.manifest, [None, None, Region((2,), (1,))])
    for row in range(5):
        run.change(row)
        run.join(Needs.of(run.manifest, [Region((row, 0), (1, 6)), None, None]))
        run.join(other)
        if row == 3:  # one that fails forgets nothing that is still needed
            run.sources[1].problem = OSError("gone")
            results, _ = run.update()
            assert isinstance(results[0], WeightTransferError)
            run.sources[1].problem = None
        results, errors = run.update()
        assert not errors
        run.check()
        for _ in range(2):
            run.members.pop()[0].close()
        until = time.monotonic() + 10.0
        while sum(x.present for x in run.lead.members) > 1 and time.monotonic() < until:
            time.sleep(0.01)
    for _ in range(2):
        results, errors = run.update()
        assert not errors
        assert results[0].changed_ratio is not None
    for exporter in (coordinator.exporter, worker._lanes["host"]):
        assert len(exporter._sides) == 1
    assert len(coordinator._kinds._numbers) == len(coordinator._kinds._told) == 1
    assert len(worker._kinds._known) == 1
    assert [x.needs is None for x in run.lead.members] == [False] + [True] * 10
    run.check()


def test_ranks_that_join_again_and_leave_do_not_pile_up(job, spread):
    run = job(spread())
    for seed in range(4):
        run.join(Needs.whole(run.manifest))
        run.change(seed)
        results, errors = run.update()
        assert not errors
        run.members.pop()[0].close()
    assert [m.version for m in results[0].members][-1] == 4


def test_nothing_is_staged_for_nobody(job, spread):
    run = job(spread())
    results, _ = run.update()
    assert results[0].members == ()
    assert "begin" not in run.sources[1].calls
    assert run.publishers[1].version == 1


def test_bad_versions_and_late_words_are_the_same_on_every_rank(job, spread):
    run = job(spread())
    run.join(Needs.whole(run.manifest))
    assert all(r.version == 7 for r in run.update(7)[0])
    results = run.all(lambda group: run.publishers[group.rank].update(3))
    assert {type(r).__name__ for r in results} == {"VersionError"}


def test_a_model_on_more_ranks_than_there_are_is_refused(spread):
    manifest = spread()
    source = PartsSource(manifest, random_values(manifest), 0)
    with pytest.raises(RankMismatchError, match="spread over 2 ranks .*publisher has 1"):
        publish_weights(source)


def test_a_rank_that_cannot_open_its_arena_is_named_on_all(monkeypatch, spread):
    from parallelkit.weights import shm

    real = shm.ShmPublisher.__init__

    def no_memory(self, nbytes, *, secret, rank=0, named=False):
        if rank == 1:
            raise TransportError("no memory left")
        real(self, nbytes, secret=secret, rank=rank, named=named)

    monkeypatch.setattr(shm.ShmPublisher, "__init__", no_memory)
    manifest = spread()
    groups = meet(2)
    values = random_values(manifest)

    def publish(group):
        return publish_weights(PartsSource(manifest, values, group.rank), group=group, timeout=5.0)

    before = threading.active_count()
    results = on_ranks(groups, publish)
    assert [type(r) for r in results] == [TransportError, TransportError]
    assert "no memory left (as rank 1 reports)" in str(results[0])
    assert "no memory left" in str(results[1])
    assert threading.active_count() == before


def test_aliased_is_refused_on_every_rank(spread):
    manifest = spread()
    values = random_values(manifest)

    def publish(group):
        source = PartsSource(manifest, values, group.rank)
        return publish_weights(source, group=group, timeout=5.0, aliased=True)

    results = on_ranks(meet(2), publish)
    assert [type(r) for r in results] == [UnsupportedFeatureError] * 2


def test_ranks_of_which_one_holds_a_whole_model_are_told_apart(spread):
    from parallelkit.testing.arrays import Arrays

    manifest = spread()
    values = random_values(manifest)

    def publish(group):
        if group.rank:
            return publish_weights(Arrays({"w": np.ones(3)}), group=group, timeout=5.0)
        return publish_weights(PartsSource(manifest, values, 0), group=group, timeout=5.0)

    for result in on_ranks(meet(2), publish):
        assert isinstance(result, RankMismatchError)
        assert "rank 0: a model in parts" in str(result)


def test_replicas_hear_the_outcome_and_hand_nothing_out():
    from parallelkit.testing.arrays import Arrays

    groups = meet(2)

    def publish(group):
        model = Arrays({"w": np.full(9, group.rank + 1.0)})
        return publish_weights(model, group=group, timeout=5.0)

    publishers = on_ranks(groups, publish)
    target = Arrays({"w": np.zeros(9)})
    with (
        contextlib.closing(publishers[0]) as lead,
        contextlib.closing(publishers[1]),
        subscribe_weights(target, lead.ticket, timeout=5.0) as member,
    ):
        member.serve()
        results = on_ranks(groups, lambda group: publishers[group.rank].update())
        assert member.step(5.0) == 1
        assert results[0] == results[1]
        assert set(target.arrays["w"]) == {1.0}
        assert publishers[1]._worker._lanes is None
