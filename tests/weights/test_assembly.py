"""One manifest from what each rank holds."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallelkit.errors import ManifestError, RankMismatchError, UnsupportedFeatureError
from parallelkit.weights.assembly import Digit, Entry, Roster, assemble, make_mesh
from parallelkit.weights.layout import Mesh, ShardLayout

SHARD = Digit(2, 2, "data_shard")
TENSOR = Digit(2, 1, "tensor")


def entry(name="w", shape=(4, 4), **fields):
    return Entry(name=name, dtype="float32", shape=shape, **fields)


def roster(*entries, **fields):
    return Roster(entries=entries, **fields)


def test_fully_sharded_over_tensor_parallel():
    mine = roster(
        entry("embed", mesh=(SHARD, TENSOR), shards=((1, 0), (0, 0))),
        entry("norm", shape=(4,), mesh=(SHARD,), shards=((0, 0),)),
        entry("head", mesh=(SHARD, TENSOR), shards=((1, 0), (0, 0)), alias_of="embed"),
        entry("step", shape=()),
    )
    manifest = assemble([mine], [0] * 8)
    assert manifest.mesh == Mesh(("replica", "data_shard", "tensor"), (2, 2, 2))
    both = ShardLayout([("tensor", 0), ("data_shard", 0)])
    assert {t.name: t.layout for t in manifest.tensors} == {
        "embed": both,
        "norm": ShardLayout([("data_shard", 0)]),
        "head": both,
        "step": None,
    }
    assert [t.alias_of for t in manifest.tensors] == [None, None, "embed", None]


def test_nothing_divided_needs_no_mesh():
    manifest = assemble([roster(entry("a"), entry("b"))], [0, 0])
    assert manifest.mesh is None
    assert [t.layout for t in manifest.tensors] == [None, None]


@pytest.mark.parametrize("interleaved", [False, True])
def test_stages_are_put_in_forward_order(interleaved):
    stages = ((0, 2), (1, 3)) if interleaved else ((0, 1), (2, 3))
    rosters = [
        roster(*(entry(f"layers.{s}", stage=s) for s in here), stages=here) for here in stages
    ]
    manifest = assemble(rosters, [0, 0, 1, 1])
    assert [t.name for t in manifest.tensors] == [f"layers.{s}" for s in range(4)]
    assert manifest.mesh == Mesh(("pipeline", "replica"), (2, 2))
    where = [t.layout.at for t in manifest.tensors]
    one, two = (("pipeline", 0),), (("pipeline", 1),)
    assert where == ([one, two, one, two] if interleaved else [one, one, two, two])


def test_stages_of_sharded_tensors():
    def stage(s):
        cut = {"mesh": (TENSOR,), "shards": ((0, 1),)}
        return roster(entry(f"w{s}", stage=s, **cut), entry(f"n{s}", stage=s), stages=(s,))

    manifest = assemble([stage(0), stage(1)], [0, 0, 1, 1])
    assert manifest.mesh == Mesh(("pipeline", "tensor"), (2, 2))
    assert {t.name: str(t.layout) for t in manifest.tensors} == {
        "w0": "dim 1 over tensor, at pipeline 0",
        "n0": "at pipeline 0",
        "w1": "dim 1 over tensor, at pipeline 1",
        "n1": "at pipeline 1",
    }


def test_a_tensor_on_several_stages_is_served_by_the_first():
    rosters = [
        roster(entry("embed", stage=s), entry(f"w{s}", stage=s), stages=(s,))
        if s in (0, 3)
        else roster(entry(f"w{s}", stage=s), stages=(s,))
        for s in range(4)
    ]
    manifest = assemble(rosters, [0, 1, 2, 3])
    layouts = {t.name: t.layout for t in manifest.tensors}
    assert layouts["embed"] == ShardLayout(at=[("pipeline", 0)])
    assert list(layouts) == ["embed", "w0", "w1", "w2", "w3"]
    everywhere = [roster(entry("embed", stage=s), stages=(s,)) for s in range(2)]
    assert assemble(everywhere, [0, 1]).tensors[0].layout is None


def test_a_tensor_on_a_slice_of_the_ranks():
    mesh = (Digit(2, 1, "tp"),)
    here = roster(entry("w", mesh=mesh, shards=((0, 0),)), entry("b"))
    away = roster(entry("w", mesh=mesh, shards=((0, 0),), held=False), entry("b"))
    manifest = assemble([away, here], [0, 0, 1, 1])
    assert manifest.tensors[0].layout == ShardLayout([("tp", 0)], [("replica", 1)])
    with pytest.raises(UnsupportedFeatureError, match=r"'w' is on the ranks \[1, 2\] of 4"):
        assemble([away, here], [0, 1, 1, 0])
    with pytest.raises(UnsupportedFeatureError, match=r"'w' is on the ranks \[\]"):
        assemble([away], [0, 0, 0, 0])


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (roster(entry("w", shape=(4, 5))), r"'w' is float32\[4, 4\] on one rank and float32\[4, 5"),
        (roster(entry("w", mesh=(TENSOR,), shards=((0, 0),))), r"\(dim 0 by 2\) on another"),
        (roster(entry("v")), "rank 0 has 'w' where another rank has 'v'"),
        (roster(entry("w"), entry("v")), "rank 0 has nothing more where another rank has 'v'"),
        (roster(), "rank 0 has 'w' where another rank has nothing more"),
        (roster(entry("w"), stages=(1,)), "some ranks publish stages"),
    ],
)
def test_ranks_with_different_models(other, said):
    with pytest.raises(RankMismatchError, match=said):
        assemble([roster(entry("w")), other], [0, 1])


def test_ranks_that_tie_differently():
    apart, tied = roster(entry("a"), entry("b")), roster(entry("a"), entry("b", alias_of="a"))
    with pytest.raises(RankMismatchError, match=r"another rank has 'b' \(tied to 'a'\)"):
        assemble([apart, tied], [0, 1])


def test_stages_that_are_no_slice():
    rosters = [roster(entry(f"w{s}", stage=s), stages=(s,)) for s in range(2)]
    for by_rank in ([0, 1, 1, 0], [0, 0, 0, 1], [0, 1, 1]):
        with pytest.raises(UnsupportedFeatureError, match="slice of a mesh"):
            assemble(rosters, by_rank)


def test_an_empty_model():
    assert assemble([roster()], [0, 0]).tensors == ()
    with pytest.raises(ManifestError, match="tensor name ''"):
        assemble([roster(entry(""))], [0])


def test_rosters_travel_as_plain_lists():
    mine = roster(
        entry("w", stage=3, mesh=(SHARD, TENSOR), shards=((1, 0), (0, 0))),
        entry("v", alias_of="w", held=False),
        stages=(3, 7),
    )
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(mine.to_plain()))
    assert Roster.from_plain(sent) == mine


def test_axes_without_names_and_with_the_same():
    mesh = make_mesh([Digit(2, 4, None), Digit(2, 2, "tp"), Digit(2, 1, "tp")], 16)
    assert mesh == Mesh(("replica", "axis1", "tp", "tp2"), (2, 2, 2, 2))
    named_later = make_mesh([Digit(2, 1, None), Digit(2, 1, "model"), Digit(1, 1, "one")], 2)
    assert named_later == Mesh(("model",), (2,))
    assert make_mesh([], 1) == Mesh(("replica",), (1,))


@pytest.mark.parametrize(
    ("digits", "world"),
    [
        ([(2, 1), (4, 1)], 4),
        ([(2, 1), (3, 1)], 6),
        ([(2, 3), (4, 1)], 12),
        ([(4, 1)], 6),
        ([(2, 4)], 4),
    ],
)
def test_axes_that_overlap(digits, world):
    with pytest.raises(UnsupportedFeatureError, match=f"do not make up one mesh of {world} ranks"):
        make_mesh([Digit(*digit, None) for digit in digits], world)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(2, 4), max_size=5), st.data())
def test_any_axes_of_a_mesh_give_a_mesh_with_them(degrees, data):
    strides, step = [], 1
    for degree in degrees:
        strides.append(step)
        step *= degree
    everything = [Digit(d, s, f"a{s}") for d, s in zip(degrees, strides, strict=True)]
    some = [digit for digit in everything if data.draw(st.booleans())]
    mesh = make_mesh(data.draw(st.permutations(some)), step)
    assert mesh.size == step
    for digit in some:
        assert (mesh.degree(digit.name), mesh.stride(digit.name)) == (digit.degree, digit.stride)
