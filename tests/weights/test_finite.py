"""check_finite: NaN and infinity are refused at the source, before anything is sent."""

from __future__ import annotations

import numpy as np
import pytest

from parallelkit.errors import ManifestError, NonFiniteError, RankMismatchError, WeightTransferError
from parallelkit.testing.arrays import Arrays
from parallelkit.testing.meeting import meet, on_ranks
from parallelkit.testing.peer import fill, sample_model, values
from parallelkit.weights import publish_weights
from parallelkit.weights.buckets import Workers
from parallelkit.weights.finite import non_finite
from parallelkit.weights.manifest import DTYPE_BYTES
from parallelkit.weights.needs import Needs

BAD = (float("nan"), float("inf"), float("-inf"))


def bits(values, kind):
    return np.array(values, kind).view(np.uint8)


#: By dtype: bit patterns of values that are finite, the largest ones among them, and of others.
PATTERNS = {
    "float8_e4m3fn": (np.uint8, [0x00, 0x7E, 0xFE, 0x78, 0x01], [0x7F, 0xFF]),
    "float8_e5m2": (np.uint8, [0x00, 0x7B, 0xFB, 0x03], [0x7C, 0xFC, 0x7D, 0x7F, 0xFF]),
    "float16": (np.uint16, [0, 0x7BFF, 0xFBFF, 0x03FF], [0x7C00, 0xFC00, 0x7C01, 0x7E00, 0xFFFF]),
    "bfloat16": (np.uint16, [0, 0x7F7F, 0xFF7F, 0x007F], [0x7F80, 0xFF80, 0x7F81, 0x7FC0, 0xFFFF]),
}


@pytest.mark.parametrize("dtype", PATTERNS)
def test_small_floats_by_their_bits(dtype):
    kind, good, bad = PATTERNS[dtype]
    assert non_finite(bits(good * 3, kind), dtype, Workers(1)) == 0
    assert non_finite(bits([*good, *bad, *good], kind), dtype, Workers(1)) == len(bad)


def test_every_pattern_of_float16_is_as_numpy_says():
    everything = np.arange(1 << 16, dtype=np.uint16)
    with np.errstate(invalid="ignore"):
        expected = int((~np.isfinite(everything.view(np.float16))).sum())
    assert non_finite(everything.view(np.uint8), "float16", Workers(1)) == expected == 2048


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
def test_large_floats(dtype):
    limits = np.finfo(dtype)
    good = np.array([0, 1, -1, limits.max, limits.min, limits.tiny], dtype)
    assert non_finite(good.view(np.uint8), dtype, Workers(1)) == 0
    for value in BAD:
        data = good.copy()
        data.view(data.real.dtype)[-1] = value
        assert non_finite(data.view(np.uint8), dtype, Workers(1)) == 1


@pytest.mark.parametrize("dtype", sorted(d for d in DTYPE_BYTES if "int" in d or d == "bool"))
def test_integers_are_finite(dtype):
    assert non_finite(np.full(64, 0xFF, np.uint8), dtype, Workers(1)) == 0


def test_one_value_among_many_is_found_wherever_it_is():
    data = np.zeros(5_000_001, np.float32)
    workers = Workers(3)
    for at in (0, 65535, 65536, 2_500_000, len(data) - 1):
        data[at] = np.nan
        assert non_finite(data.view(np.uint8), "float32", workers) == 1
        data[at] = 0.0
    assert non_finite(data.view(np.uint8), "float32", workers) == 0
    workers.close()


@pytest.mark.parametrize("aliased", [False, True])
@pytest.mark.parametrize("value", BAD)
def test_nothing_is_sent_and_the_tensors_are_named(bench, aliased, value):
    publisher = bench.publish(check_finite=True, aliased=aliased)
    follower = bench.follow()
    bench.update()
    fill(bench.source, 2.0)
    bench.source.arrays["half"][3] = value
    bench.source.arrays["tail"][...] = value
    begun = []
    follower.subscriber._phase = begun.append
    follower.step(0.5)
    with pytest.raises(NonFiniteError, match=r"'half' \(1 of them\), 'head' \(15 of") as caught:
        publisher.update()
    follower.done()
    assert isinstance(caught.value, ManifestError)
    assert caught.value.tensors == ("half", "head")
    assert begun == []
    assert values(follower.model) == {1.0}
    assert publisher.version == 1
    fill(bench.source, 3.0)
    assert bench.update().version == 2
    assert values(follower.model) == {3.0}


def test_with_nobody_there_too(bench):
    publisher = bench.publish(check_finite=True)
    bench.source.arrays["scalar"][...] = np.nan
    with pytest.raises(NonFiniteError):
        publisher.update()
    assert publisher.version == 0


def test_what_is_not_asked_for_is_not_checked(bench):
    bench.publish()
    follower = bench.follow()
    bench.source.arrays["body"][7] = np.inf
    assert bench.update().version == 1
    assert values(follower.model) == {1.0, float("inf")}


def test_many_names_are_cut_in_the_text_and_whole_in_the_attribute(bench):
    bench.source = Arrays({f"t{i:02}": np.full(2, np.nan, np.float32) for i in range(40)})
    with pytest.raises(NonFiniteError, match="and 28 more") as caught:
        bench.publish(check_finite=True).update()
    assert len(caught.value.tensors) == 40


def test_one_rank_s_part_is_an_error_on_every_rank(job, spread):
    manifest = spread()
    team = job(manifest, check_finite=True)
    for value in team.values:
        value[...] = 1
    member, _ = team.join(Needs.whole(manifest))
    assert team.update()[1] == {}
    name = manifest.unique[0].name
    assert (name, team.values[0].shape) == ("w", (8, 6, 4))
    team.values[0][6, 2] = [0, 0, 0xC0, 0x7F]  # NaN, in what rank 1 hands out
    results, errors = team.update()
    assert [type(r) for r in results] == [NonFiniteError] * 2
    assert [r.tensors for r in results] == [(name,)] * 2
    assert "as rank 1 reports" in str(results[0])
    assert [type(e).__name__ for e in errors.values()] == ["UpdateTimeoutError"]
    assert member.version == 1
    team.values[0][...] = 2
    results, errors = team.update()
    assert errors == {}
    assert [r.version for r in results] == [2, 2]


def test_replicas_hear_of_it_too():
    groups = meet(2, timeout=10.0)

    def run(group):
        model = sample_model(1.0)
        model.arrays["head"][1, 2] = model.arrays["scalar"][...] = np.nan
        with publish_weights(model, group=group, timeout=10.0, check_finite=True) as publisher:
            with pytest.raises(NonFiniteError) as caught:
                publisher.update()
            fill(model, 1.0)
            return caught.value.tensors, publisher.update().version

    assert on_ranks(groups, run) == [(("head", "scalar"), 1)] * 2


def test_every_rank_asks_for_the_same():
    groups = meet(2, timeout=10.0)

    def run(group):
        with pytest.raises(RankMismatchError, match="check_finite"):
            publish_weights(sample_model(), group=group, timeout=5.0, check_finite=group.rank == 1)

    on_ranks(groups, run)


def test_it_is_a_flag():
    with pytest.raises(WeightTransferError, match="check_finite is 'yes'"):
        publish_weights(sample_model(), check_finite="yes")
