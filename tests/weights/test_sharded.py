"""A publisher whose weights are spread: what it calls, in which order, and what it reports."""

from __future__ import annotations

import attrs
import numpy as np
import pytest

from parallelkit.errors import (
    ManifestError,
    PeerLostError,
    RankMismatchError,
    UnsupportedFeatureError,
    UpdateAbortedError,
)
from parallelkit.launch import LaunchInfo
from parallelkit.protocols import ShardedSource
from parallelkit.specs import GroupSpec
from parallelkit.testing.arrays import Arrays
from parallelkit.testing.fake import FakeGroup
from parallelkit.testing.peer import fill, sample_model, values
from parallelkit.weights import publish_weights
from parallelkit.weights.layout import Mesh, ShardLayout
from parallelkit.weights.manifest import Manifest
from parallelkit.weights.report import report_from_dict

MESH = Mesh(("data_shard",), (2,))


class Spread:
    """The sample model as if rank 1 held half of `body`; says what it was called for."""

    device = "cpu"

    def __init__(self) -> None:
        self.model = sample_model(1.0)
        self.calls: list[str] = []
        self.problem: Exception | None = None
        self.whole = True

    def join(self, group):
        self.calls.append("join")

    def manifest(self):
        cut = ShardLayout([("data_shard", 0)])
        specs = self.model.manifest().tensors
        return Manifest(
            (attrs.evolve(t, layout=cut if t.shape == (65536,) else None) for t in specs), MESH
        )

    def look(self):
        self.calls.append("look")

    def begin(self):
        self.calls.append("begin")

    def host_bytes(self, index):
        raise AssertionError("whole tensors are not read one by one")

    def adopt(self, buffers):
        raise UnsupportedFeatureError("'body' is spread")

    def gather(self, buffers, *, seconds, check):
        self.calls.append(f"gather check={check}")
        assert 0 < seconds <= 5
        if self.problem is not None:
            raise self.problem
        for index, buffer in enumerate(buffers):
            np.frombuffer(buffer, np.uint8)[:] = np.frombuffer(
                self.model.host_bytes(index), np.uint8
            )

    def serve(self, seconds):
        self.calls.append("serve")
        if self.problem is not None:
            raise self.problem

    def dismiss(self):
        self.calls.append("dismiss")
        return self.whole


def group_of_two(rank=0, **peers):
    spec = GroupSpec(
        framework="fake",
        backend="memory",
        device="cpu",
        rank=rank,
        world_size=2,
        local_rank=rank,
        local_world_size=2,
        master_addr="127.0.0.1",
        timeout=5.0,
        launch=LaunchInfo(),
    )
    return FakeGroup(spec, {int(name[1:]): answer for name, answer in peers.items()})


def test_the_fake_is_a_sharded_source():
    assert isinstance(Spread(), ShardedSource)
    assert not isinstance(sample_model(), ShardedSource)


@pytest.mark.parametrize("verify", ["digest", "readback", "sample", "off"])
def test_parts_are_gathered_into_the_arena(bench, verify):
    bench.source = Spread()
    publisher = bench.publish(verify=verify)
    assert bench.source.calls == ["join"]
    follower = bench.follow()
    for value in (1.5, 2.5):
        bench.source.calls.clear()
        fill(bench.source.model, value)
        report = bench.update()
        check = verify in ("digest", "readback")
        assert bench.source.calls == ["look", "begin", f"gather check={check}"]
        assert values(follower.model) == {value}
    assert report.gathered_bytes == 4 * 65536 // 2
    assert list(report.phases) == ["look", "begin", "gather", "digest", "ready", "verify", "commit"]
    assert "(0.1 MB gathered)" in str(report)
    assert report_from_dict(report.to_dict()) == report
    text = publisher.explain()
    assert "1 tensor sharded over data_shard 2, 5 replicated" in text
    assert "mesh of 2 ranks: data_shard 2" in text
    assert "0.1 MB from other ranks to rank 0, which holds 0.1 MB" in text


def test_nothing_is_gathered_for_nobody(bench):
    bench.source = Spread()
    report = bench.publish().update()
    assert bench.source.calls == ["join", "look", "begin"]
    assert report.gathered_bytes == 0
    assert "gathered" not in str(report)


def test_a_follower_does_not_mind_layouts_and_learns_them(bench):
    bench.source = Spread()
    publisher = bench.publish()
    follower = bench.follow()
    assert follower.subscriber.plan.digest == publisher.plan.digest
    assert follower.subscriber.plan.manifest.mesh == MESH


def test_an_error_while_parts_come_leaves_everyone_at_the_old_version(bench):
    bench.source = Spread()
    bench.publish()
    follower = bench.follow()
    bench.update()
    fill(bench.source.model, 3.5)
    bench.source.problem = PeerLostError("publisher rank 1 is gone", peers=["publisher rank 1"])
    with pytest.raises(PeerLostError, match="publisher rank 1 is gone"):
        bench.update()
    error = follower.done()
    assert isinstance(error, UpdateAbortedError)
    assert "publisher rank 1 is gone" in str(error)
    assert values(follower.model) == {1.0}
    assert bench.publisher.version == 1
    bench.source.problem = None
    assert bench.update().version == 2
    assert values(follower.model) == {3.5}


def test_aliased_is_refused(bench):
    bench.source = Spread()
    with pytest.raises(UnsupportedFeatureError, match="'body' is spread"):
        bench.publish(aliased=True)


def test_rank_0_lets_the_others_go_however_an_update_ends(bench):
    said = []
    group = group_of_two(r0=lambda obj: said.append(obj) or obj, r1=lambda obj: obj)
    bench.source = source = Spread()
    bench.publish(group=group)
    said.clear()
    bench.follow()
    bench.update()
    assert source.calls[-1] == "dismiss"
    assert said[-1]["report"]["version"] == 1
    source.problem = ManifestError("cannot read")
    with pytest.raises(ManifestError):
        bench.update()
    assert source.calls[-1] == "dismiss"
    assert said[-1]["error"] == "ManifestError"
    said.clear()
    source.whole = False  # the stream broke: the others know, and no broadcast can follow
    with pytest.raises(ManifestError):
        bench.update()
    assert source.calls[-1] == "dismiss"
    assert said == []


def test_the_other_ranks_serve_and_then_hear_the_outcome():
    answers = [None, {"report": None, "version": 0}, {"report": None, "version": 7}]
    mine = {}

    def rank_0(obj):
        answer = answers.pop(0)
        return mine.setdefault("said", obj) if answer is None else answer

    source = Spread()
    group = group_of_two(rank=1, r0=rank_0)
    with publish_weights(source, timeout=5, group=group) as publisher:
        assert mine["said"].startswith("a model in parts")
        assert publisher.update() is None  # the stand-in has no report to give
        assert publisher.version == 7
        assert source.calls == ["join", "look", "serve"]
        assert "rank 1: rank 0 serves" in publisher.explain()
        source.problem = PeerLostError("publisher rank 2 is gone (as rank 0 reports)")
        with pytest.raises(PeerLostError, match="publisher rank 2"):
            publisher.update()
        assert answers == []


def test_ranks_of_which_one_holds_a_whole_model_are_told_apart():
    group = group_of_two(r1=lambda obj: "model 1234, auto, verify digest, 5 s")
    with pytest.raises(
        RankMismatchError, match=r"rank 0: a model in parts.*\n.*rank 1: model 1234"
    ):
        publish_weights(Spread(), timeout=5, group=group)


def test_whole_models_are_staged_as_before(bench):
    bench.source = Arrays({"w": np.ones(3, np.float32)})
    publisher = bench.publish()
    bench.follow(model=Arrays({"w": np.zeros(3, np.float32)}))
    report = bench.update()
    assert "stage" in report.phases
    assert "gather" not in report.phases
    assert "sharded" not in publisher.explain()
