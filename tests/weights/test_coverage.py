"""Members of one group keep everything together, or are refused with what is missing."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from parallelkit.errors import CoverageError, ManifestMismatchError, WeightTransferError
from parallelkit.testing.parts import PartsSink
from parallelkit.testing.shards import random_manifest, random_needs, slices
from parallelkit.weights import coverage, subscribe_weights
from parallelkit.weights.coverage import check_coverage, gaps, uncovered
from parallelkit.weights.layout import Mesh, Region, ShardLayout
from parallelkit.weights.manifest import Manifest, TensorSpec
from parallelkit.weights.needs import Needs

SECONDS = 10.0


@pytest.mark.parametrize("seed", range(60))
def test_what_boxes_leave_is_what_a_mask_leaves(seed):
    rng = random.Random(seed)
    shape = tuple(rng.randint(1, 6) for _ in range(rng.randint(0, 3)))
    boxes = []
    for _ in range(rng.randint(0, 9)):
        low = tuple(rng.randint(0, n) for n in shape)
        boxes.append(
            Region(low, tuple(rng.randint(0, n - a) for n, a in zip(shape, low, strict=True)))
        )
    mask = np.zeros(shape, np.int64)
    for box in uncovered(shape, boxes):
        mask[slices(box)] += 1
    assert mask.max(initial=0) <= 1, "they do not overlap"
    kept = np.zeros(shape, bool)
    for box in boxes:
        kept[slices(box)] = True
    assert ((mask > 0) == ~kept).all()


@pytest.mark.parametrize("seed", range(20))
def test_any_members_of_any_model(seed):
    """Against masks, with keys that are numbered anew or not."""
    rng = random.Random(seed)
    manifest = random_manifest(rng)
    members = [random_needs(rng, manifest) for _ in range(rng.randint(1, 40))]
    found = gaps(manifest, members)
    for i, tensor in enumerate(manifest.unique):
        kept, missing = np.zeros(tensor.shape, bool), np.zeros(tensor.shape, bool)
        for box in (needs[i] for needs in members):
            if box is not None:
                kept[slices(box)] = True
        for box in found.get(i, ()):
            missing[slices(box)] = True
        assert (missing == ~kept).all()
        assert (i in found) == missing.any()


@pytest.mark.parametrize("degrees", [(1024,), (32, 32)])
def test_all_shards_of_a_mesh_are_everything_and_all_but_one_are_not(degrees):
    """As many members as there are, so that keys have to be numbered anew."""
    tensors = [
        TensorSpec(name=f"{i}.{n}", dtype="bfloat16", shape=(n, 96))
        for i, n in itertools.product(range(3), (4096, 1000, 96))
    ]
    manifest = Manifest(tensors)
    mesh = Mesh(("x", "y")[: len(degrees)], degrees)
    layout = ShardLayout([(axis, dim) for dim, axis in enumerate(mesh.axes)])
    layouts = [layout] * len(tensors)
    members = [Needs.sharded(manifest, layouts, mesh, rank) for rank in range(mesh.size)]
    assert gaps(manifest, members) == {}
    lost = members.pop(517)
    assert gaps(manifest, members) == {
        i: [lost[i]] for i in range(len(tensors)) if lost[i].elements
    }
    assert set(gaps(manifest, members)) != set(), "or nothing is tested"


def test_the_error_names_tensors_and_boxes():
    tensors = [TensorSpec(name=f"t{i}", dtype="float32", shape=(4, 2)) for i in range(14)]
    tensors.append(TensorSpec(name="tied", dtype="float32", shape=(4, 2), alias_of="t0"))
    manifest = Manifest(tensors)
    upper, lower = Region((0, 0), (2, 2)), Region((2, 1), (2, 1))
    one = Needs.of(manifest, [upper] * 13 + [None])
    two = Needs.of(manifest, [lower] * 13 + [None])
    with pytest.raises(CoverageError) as caught:
        check_coverage(manifest, [one, two], "the 2 members of actors")
    lines = str(caught.value).splitlines()
    assert lines[0] == (
        "not all that is published is kept by the 2 members of actors; of 14 of 14 tensors there "
        "is missing:"
    )
    assert lines[1] == "  't0' (float32[4, 2]): [2:4, 0:1]"
    assert lines[11] == "  ... and 4 more"
    assert "partial=True" in lines[12]
    assert len(caught.value.differences) == 14
    assert caught.value.differences[13] == "'t13' (float32[4, 2]): all of it"
    assert isinstance(caught.value, ManifestMismatchError)


def join(run, ticket, needs, member, **options):
    sink = PartsSink(run.manifest, needs, frozenset())
    return subscribe_weights(sink, ticket, member=member, timeout=SECONDS, **options), sink


def halves(manifest, gap=0):
    """What two members keep: rows of `w`, columns of `c`, and `norm` at the second alone."""
    one = Needs.of(manifest, [Region((0, 0), (4, 6)), Region((0, 0), (8, 3 - gap)), None])
    two = Needs.of(manifest, [Region((4, 0), (4, 6)), Region((0, 3), (8, 3)), Region((0,), (6,))])
    return one, two


def test_a_group_that_lacks_something_is_refused_as_a_whole_and_may_try_again(job, spread):
    run = job(spread())
    ticket = run.lead.new_ticket(members=2, name="actors")
    one, two = halves(run.manifest, gap=1)
    first, _ = join(run, ticket, one, 0)
    with pytest.raises(CoverageError, match=r"members of actors; .*\n  'c' .*: \[0:8, 2:3\]\n"):
        join(run, ticket, two, 1)
    with pytest.raises(CoverageError, match="the publisher refused: not all that is published"):
        first.step(SECONDS)
    first.close()
    results, _ = run.update()
    assert "actors.0" in str(results[0])
    assert str(results[0]).count(": refused, not all that is published is kept") == 2
    for number, needs in enumerate(halves(run.manifest)):
        run.members.append((*join(run, ticket, needs, number), needs))
    run.change(1)
    results, errors = run.update()
    assert not errors
    assert [m.state for m in results[0].members] == ["committed"] * 2
    run.check()


def test_one_that_serves_hears_why_its_group_was_refused(job, spread):
    run = job(spread(), keep_last=True)
    run.join(Needs.whole(run.manifest))
    run.update()
    ticket = run.lead.new_ticket(members=2)
    one, two = halves(run.manifest, gap=2)
    first, _ = join(run, ticket, one, 0)
    first.serve()
    with pytest.raises(CoverageError):
        join(run, ticket, two, 1)
    with pytest.raises(CoverageError, match=r"\[0:8, 1:3\]"):
        first.step(SECONDS)
    first.close()
    results, errors = run.update()
    assert not errors
    assert len(results[0].members) == 1


@pytest.mark.parametrize("who", [(True, True), (True, False), (False, True)])
def test_a_target_that_is_meant_to_lack_something_says_so(job, spread, who):
    run = job(spread())
    ticket = run.lead.new_ticket(members=2)
    for number, needs in enumerate(halves(run.manifest, gap=1)):
        member = join(run, ticket, needs, number, partial=who[number])
        run.members.append((*member, needs))
    _, errors = run.update()
    assert not errors
    run.check()


def test_one_alone_may_not_lack_anything_unsaid(job, spread):
    run = job(spread())
    with pytest.raises(CoverageError, match=r"(?s)kept by subscriber-1.0 \(.*'norm' .*: all of it"):
        join(run, run.lead.new_ticket(), Needs.of(run.manifest, [*_all(run), None]), 0)


def test_partial_is_true_or_false(job, spread):
    run = job(spread())
    with pytest.raises(WeightTransferError, match="partial is 'yes'; it is True or False"):
        join(run, run.lead.new_ticket(), Needs.whole(run.manifest), 0, partial="yes")


def test_whole_targets_are_not_looked_at(bench, monkeypatch):
    """Nor is anything computed for them but what they keep."""
    monkeypatch.setattr(coverage, "uncovered", None)
    bench.publish()
    bench.follow()
    assert bench.update().version == 1


def _all(run):
    whole = Needs.whole(run.manifest)
    return [whole[0], whole[1]]
