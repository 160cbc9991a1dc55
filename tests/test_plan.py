"""Parallel plans: tables of what is right and wrong, and properties over all small plans."""

from __future__ import annotations

import doctest
import itertools
import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallelkit.errors import PlanError
from parallelkit.plan import AXES, DATA_AXES, MODES, ParallelPlan, plan

ALL = (*AXES, "expert")
PLAN_MODULE = sys.modules["parallelkit.plan"]


@st.composite
def plans(draw: st.DrawFn) -> ParallelPlan:
    degrees = {axis: draw(st.integers(1, 3), label=axis) for axis in AXES}
    parts = degrees["data"] * degrees["data_shard"]
    expert = draw(st.sampled_from([d for d in range(1, parts + 1) if parts % d == 0]))
    return plan(math.prod(degrees.values()), **degrees, expert=expert)


# --- degrees and modes ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world", "given", "degrees", "mode"),
    [
        (1, {}, {}, "standalone"),
        (8, {}, {"data": 8}, "data"),
        (8, {"data": -1}, {"data": 8}, "data"),
        (8, {"data": 8}, {"data": 8}, "data"),
        (8, {"tensor": 2}, {"data": 4, "tensor": 2}, "hybrid"),
        (8, {"tensor": 8}, {"tensor": 8}, "hybrid"),
        (8, {"pipeline": 8}, {"pipeline": 8}, "hybrid"),
        (8, {"context": 8}, {"context": 8}, "hybrid"),
        (8, {"data_shard": 8}, {"data_shard": 8}, "hybrid"),
        (8, {"data_shard": -1}, {"data_shard": 8}, "hybrid"),
        (8, {"data_shard": -1, "data": 2}, {"data": 2, "data_shard": 4}, "hybrid"),
        (8, {"tensor": -1}, {"tensor": 8}, "hybrid"),
        (8, {"pipeline": 2, "tensor": -1}, {"pipeline": 2, "tensor": 4}, "hybrid"),
        (8, {"pipeline": -1, "tensor": 4}, {"pipeline": 2, "tensor": 4}, "hybrid"),
        (8, {"context": -1, "data": 4}, {"context": 2, "data": 4}, "hybrid"),
        (8, {"data": -1, "tensor": 8}, {"data": 1, "tensor": 8}, "hybrid"),
        (8, {"data": 8, "tensor": -1}, {"data": 8, "tensor": 1}, "data"),
        (1, {"data": -1}, {}, "standalone"),
        (1, {"tensor": -1}, {}, "standalone"),
        (8, {"expert": 4}, {"data": 8, "expert": 4}, "hybrid"),
        (8, {"expert": -1}, {"data": 8, "expert": 8}, "hybrid"),
        (8, {"expert": -1, "tensor": 2}, {"data": 4, "tensor": 2, "expert": 4}, "hybrid"),
        (
            8,
            {"data": 2, "data_shard": 4, "expert": 8},
            {"data": 2, "data_shard": 4, "expert": 8},
            "hybrid",
        ),
        (np.int64(4), {"tensor": np.int32(2)}, {"data": 2, "tensor": 2}, "hybrid"),
        (
            16,
            {"pipeline": 2, "data": 2, "data_shard": 2, "tensor": 2},
            {"pipeline": 2, "data": 2, "data_shard": 2, "tensor": 2},
            "hybrid",
        ),
    ],
)
def test_degrees_are_inferred(
    world: int, given: dict[str, int], degrees: dict[str, int], mode: str
) -> None:
    made = plan(world, **given)  # type: ignore[arg-type]
    assert made.degrees == dict.fromkeys(ALL, 1) | degrees
    assert list(made.degrees) == list(ALL)
    assert made.mode == mode
    assert made.world_size == world
    assert type(made.world_size) is int


@pytest.mark.parametrize(
    ("world", "mode", "given"),
    [
        (1, "standalone", {}),
        (1, "data", {}),
        (1, "hybrid", {}),
        (1, "auto", {}),
        (8, "data", {}),
        (8, "data", {"data": -1}),
        (8, "hybrid", {"tensor": 2}),
        (8, "hybrid", {}),
        (8, "semi_auto", {}),
        (8, "semi_auto", {"pipeline": 2}),
        (8, "auto", {}),
        (8, "auto", {"pipeline": 2}),
    ],
)
def test_explicit_modes(world: int, mode: str, given: dict[str, int]) -> None:
    assert plan(world, mode, **given).mode == mode  # type: ignore[arg-type]


def wrong(case: str, world: Any, *mentions: str, mode: Any = None, **degrees: Any) -> Any:
    return pytest.param(world, mode, degrees, mentions, id=case)


@pytest.mark.parametrize(
    ("world", "mode", "degrees", "mentions"),
    [
        *(
            wrong(
                f"{axis}={value!r}", 8, f"{axis} is {value!r}", "positive integer", **{axis: value}
            )
            for axis in ALL
            for value in (0, -2, -8, True, False, 1.0, 2.5, "2", float("nan"), [2])
        ),
        *(
            wrong(f"{one}, {two}", 8, f"{one}=-1", f"{two}=-1", "at most one", **{one: -1, two: -1})
            for one, two in itertools.combinations(ALL, 2)
        ),
        *(
            wrong(f"world {world!r}", world, f"world_size is {world!r}", "positive integer")
            for world in (0, -1, True, 2.0, "2", None)
        ),
        *(
            wrong(
                f"{axis} does not divide",
                8,
                "not divisible by 3",
                f"{axis}=3",
                "1, 2, 4, 8",
                **{axis: 3},
            )
            for axis in AXES
            if axis != "data"
        ),
        wrong("product too small", 8, "is 4", "world_size is 8", "data=2, ", data=2, tensor=2),
        wrong("product too large", 8, "is 16", "world_size is 8", data=8, tensor=2),
        wrong("data alone", 8, "is 2", "world_size is 8", data=2),
        wrong("too large to infer", 2, "not divisible by 4", tensor=4),
        wrong("two together", 8, "not divisible by 6", pipeline=2, tensor=3),
        wrong("expert", 8, "expert=3", "1, 2, 4, 8", expert=3),
        wrong("expert beyond data", 8, "expert=8", "= 4", "1, 2, 4", expert=8, tensor=2),
        wrong("mode", 8, "'fsdp'", "'hybrid'", "'semi_auto'", mode="fsdp"),
        wrong("mode type", 8, "mode is 3", mode=3),
        wrong("standalone", 8, "'standalone'", "world_size is 8", mode="standalone"),
        *(
            wrong(
                f"data and {axis}", 8, "'data'", f"{axis}=2", "'hybrid'", mode="data", **{axis: 2}
            )
            for axis in ALL
            if axis != "data"
        ),
    ],
)
def test_impossible_plans(
    world: Any, mode: Any, degrees: dict[str, Any], mentions: tuple[str, ...]
) -> None:
    with pytest.raises(PlanError) as caught:
        plan(world, mode, **degrees)
    for mention in mentions:
        assert mention in str(caught.value)


@given(st.dictionaries(st.sampled_from(ALL), st.integers(-3, 6)), st.integers(1, 36))
def test_any_degrees_make_a_plan_or_a_plan_error(degrees: dict[str, int], world: int) -> None:
    possible = sum(value == -1 for value in degrees.values()) <= 1 and all(
        value > 0 or value == -1 for value in degrees.values()
    )
    try:
        made = plan(world, **degrees)  # type: ignore[arg-type]
    except PlanError:
        fixed = math.prod(degrees.get(axis, 1) for axis in AXES)
        assert not (possible and degrees.keys() == set(AXES) and fixed == world)
    else:
        assert possible
        assert math.prod(made.degree(axis) for axis in AXES) == world
        assert all(made.degree(axis) == value for axis, value in degrees.items() if value > 0)


def test_a_plan_is_a_frozen_value() -> None:
    made = plan(8, tensor=2)
    assert made == plan(8, data=4, tensor=2)
    assert hash(made) == hash(plan(8, "hybrid", tensor=2))
    assert made != plan(8, "auto", tensor=2)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        made.tensor = 4  # type: ignore[misc]


def test_direct_construction_is_checked() -> None:
    for values in (
        {"world_size": 4, "mode": "hybrid", "tensor": 2},
        {"world_size": 2, "mode": "data", "data": 2, "expert": 2},
        {"world_size": 2, "mode": "other", "data": 2},
        {"world_size": 1, "mode": "data", "data": -1},
    ):
        with pytest.raises(PlanError):
            ParallelPlan(**values)  # type: ignore[arg-type]


# --- places --------------------------------------------------------------------------------------


def test_golden_table() -> None:
    made = plan(16, pipeline=2, data=2, data_shard=2, tensor=2, expert=2)
    table = [tuple(made.coordinates(rank).values()) for rank in range(16)]
    assert table == [
        # pipeline, data, data_shard, context, tensor, expert
        *[(0, 0, 0, 0, 0, 0), (0, 0, 0, 0, 1, 0), (0, 0, 1, 0, 0, 1), (0, 0, 1, 0, 1, 1)],
        *[(0, 1, 0, 0, 0, 0), (0, 1, 0, 0, 1, 0), (0, 1, 1, 0, 0, 1), (0, 1, 1, 0, 1, 1)],
        *[(1, 0, 0, 0, 0, 0), (1, 0, 0, 0, 1, 0), (1, 0, 1, 0, 0, 1), (1, 0, 1, 0, 1, 1)],
        *[(1, 1, 0, 0, 0, 0), (1, 1, 0, 0, 1, 0), (1, 1, 1, 0, 0, 1), (1, 1, 1, 0, 1, 1)],
    ]
    assert made.groups("tensor") == tuple((rank, rank + 1) for rank in range(0, 16, 2))
    assert made.groups("data_shard")[:2] == ((0, 2), (1, 3))
    assert made.groups("data")[:4] == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert made.groups("pipeline")[:2] == ((0, 8), (1, 9))
    assert made.groups("context") == tuple((rank,) for rank in range(16))
    assert made.groups("expert")[:4] == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert made.groups("data", "data_shard")[:2] == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert [made.data_shard_index(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]


@given(plans(), st.data())
def test_ranks_and_coordinates_are_a_bijection(made: ParallelPlan, data: st.DataObject) -> None:
    seen = set()
    for rank in range(made.world_size):
        place = made.coordinates(rank)
        assert list(place) == list(ALL)
        assert made.rank_of(place) == rank
        assert all(0 <= place[axis] < made.degree(axis) for axis in ALL)
        seen.add(tuple(place.values()))
    assert len(seen) == made.world_size
    rank = data.draw(st.integers(0, made.world_size - 1))
    short = {axis: at for axis, at in made.coordinates(rank).items() if made.degree(axis) > 1}
    short.pop("expert", None)
    assert made.rank_of(short) == rank


@given(plans(), st.sampled_from(ALL))
def test_groups_are_the_ranks_that_differ_on_the_axis_only(made: ParallelPlan, axis: str) -> None:
    groups = made.groups(axis)
    assert sorted(itertools.chain(*groups)) == list(range(made.world_size))
    assert list(groups) == sorted(groups)
    for group in groups:
        assert len(group) == made.degree(axis)
        assert list(group) == sorted(group)
        places = [made.coordinates(rank) for rank in group]
        assert [place[axis] for place in places] == list(range(len(group)))
        same = set(AXES) - {axis} if axis != "expert" else set(AXES) - set(DATA_AXES)
        assert all(len({place[other] for place in places}) == 1 for other in same)


@given(plans(), st.sets(st.sampled_from(AXES), min_size=1))
def test_groups_over_several_axes(made: ParallelPlan, axes: set[str]) -> None:
    groups = made.groups(*axes)
    assert sorted(itertools.chain(*groups)) == list(range(made.world_size))
    keys = set()
    for group in groups:
        assert len(group) == math.prod(made.degree(axis) for axis in axes)
        assert list(group) == sorted(group)
        rest = {
            tuple(at for axis, at in made.coordinates(rank).items() if axis in set(AXES) - axes)
            for rank in group
        }
        assert len(rest) == 1
        keys |= rest
    assert len(keys) == len(groups)


@given(plans())
def test_data_parts(made: ParallelPlan) -> None:
    parts = [made.data_shard_index(rank) for rank in range(made.world_size)]
    assert set(parts) == set(range(made.data_shard_count))
    for group in made.groups("data", "data_shard"):
        assert [parts[rank] for rank in group] == list(range(made.data_shard_count))
    for axis in ("pipeline", "context", "tensor"):  # they load the same
        assert all(len({parts[rank] for rank in group}) == 1 for group in made.groups(axis))


def shapes(world: int, axes: int) -> Iterator[tuple[int, ...]]:
    """Every way to write `world` as a product of so many degrees."""
    if axes == 1:
        yield (world,)
        return
    for degree in range(1, world + 1):
        if world % degree == 0:
            for rest in shapes(world // degree, axes - 1):
                yield (degree, *rest)


def test_every_shape_up_to_64_ranks() -> None:
    count = 0
    for world in range(1, 65):
        ranks = np.arange(world)
        for degrees in shapes(world, len(AXES)):
            made = plan(world, **dict(zip(AXES, degrees, strict=True)))  # type: ignore[arg-type]
            cube = ranks.reshape(degrees)  # numpy's row-major order is the reference
            for number, axis in enumerate(AXES):
                want = np.moveaxis(cube, number, -1).reshape(-1, degrees[number])
                assert np.array_equal(made.groups(axis), want)
            parts = np.broadcast_to(
                np.arange(made.data_shard_count).reshape(1, *degrees[1:3], 1, 1), degrees
            )
            assert [made.data_shard_index(rank) for rank in made.ranks] == parts.ravel().tolist()
            last = made.coordinates(world - 1)
            assert tuple(last[axis] for axis in AXES) == tuple(d - 1 for d in degrees)
            count += 1
    assert count > 3000


@pytest.mark.parametrize("only", AXES)
@pytest.mark.parametrize("view", ALL)
def test_every_view_works_when_every_other_degree_is_one(only: str, view: str) -> None:
    made = plan(4, **{only: 4})  # type: ignore[arg-type]
    want = ((0, 1, 2, 3),) if view == only else ((0,), (1,), (2,), (3,))
    assert made.groups(view) == want
    assert made.degree(view) == len(want[0])
    assert [made.coordinates(rank)[view] for rank in range(4)] == (
        [0, 1, 2, 3] if view == only else [0] * 4
    )
    assert made.data_shard_count == (4 if only in DATA_AXES else 1)


def test_a_plan_inside_a_wider_world() -> None:
    made = plan(4, data=2, tensor=2, offset=1)
    assert list(made.ranks) == [1, 2, 3, 4]
    places = [{"data": d, "tensor": t} for d in range(2) for t in range(2)]
    assert [made.rank_of(place) for place in places] == [1, 2, 3, 4]
    assert [made.data_shard_index(rank) for rank in made.ranks] == [0, 0, 1, 1]
    assert made.groups("tensor") == ((1, 2), (3, 4))
    assert made.groups("data") == ((1, 3), (2, 4))
    assert made.groups("data", "tensor") == ((1, 2, 3, 4),)
    assert made.groups("context") == ((1,), (2,), (3,), (4,))
    assert str(made).splitlines()[:3] == [
        "hybrid: 4 ranks from 1 on = data 2 x tensor 2",
        "rank  data  tensor  data part",
        "   1     0       0     0 of 2",
    ]
    assert json.loads(made.to_json())["offset"] == 1
    for rank in (0, 5):
        with pytest.raises(PlanError, match=f"rank is {rank}; allowed is 1 to 4"):
            made.coordinates(rank)
    for offset in (-1, 1.0, True, "1"):
        with pytest.raises(PlanError, match="offset is .* 0 or a positive integer"):
            plan(4, offset=offset)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="offset is -1"):
        ParallelPlan(world_size=1, mode="data", offset=-1)


@given(plans(), st.integers(0, 10_000), st.sampled_from(ALL))
def test_an_offset_moves_ranks_and_nothing_else(made: ParallelPlan, offset: int, axis: str) -> None:
    moved = attrs.evolve(made, offset=offset)
    for here, there in zip(made.ranks, moved.ranks, strict=True):
        assert there == here + offset
        assert moved.coordinates(there) == made.coordinates(here)
        assert moved.rank_of(made.coordinates(here)) == there
        assert moved.data_shard_index(there) == made.data_shard_index(here)
    assert moved.groups(axis) == tuple(
        tuple(rank + offset for rank in group) for group in made.groups(axis)
    )


@pytest.mark.parametrize("rank", [-1, 8, 100, 1.0, True, "0", None])
def test_no_such_rank(rank: Any) -> None:
    made = plan(8)
    for call in (made.coordinates, made.data_shard_index):
        with pytest.raises(PlanError, match=r"rank is .* 0 to 7"):
            call(rank)


@pytest.mark.parametrize(
    ("place", "mention"),
    [
        ({"tensor": 0}, "'data' is missing"),
        ({}, "'data' is missing"),
        ({"data": 0}, "'tensor' is missing"),
        ({"data": 4, "tensor": 0}, "data coordinate is 4; allowed is 0 to 3"),
        ({"data": -1, "tensor": 0}, "data coordinate is -1"),
        ({"data": True, "tensor": 0}, "data coordinate is True"),
        ({"data": 0, "tensor": 0.0}, "tensor coordinate is 0.0"),
        ({"data": 0, "tensor": 0, "context": 1}, "context coordinate is 1"),
        ({"data": 0, "tensor": 0, "model": 0}, "no axis 'model'"),
        ({"data": 1, "tensor": 0, "expert": 0}, "imply 1"),
    ],
)
def test_no_such_place(place: dict[str, Any], mention: str) -> None:
    with pytest.raises(PlanError) as caught:
        plan(8, tensor=2, expert=2).rank_of(place)
    assert mention in str(caught.value)


def test_no_such_axis() -> None:
    made = plan(8)
    for call in (made.degree, made.groups):
        with pytest.raises(PlanError, match="no axis 'model'; the axes are pipeline, data"):
            call("model")
    for axes in ((), ("expert", "data")):
        with pytest.raises(PlanError, match="expert"):
            made.groups(*axes)


# --- what people see -----------------------------------------------------------------------------


def test_text_is_capped() -> None:
    text = str(plan(1024, pipeline=4, tensor=8, data_shard=4, expert=2))
    lines = text.splitlines()
    assert lines[0] == (
        "hybrid: 1024 ranks = pipeline 4 x data 8 x data_shard 4 x tensor 8, "
        "expert 2 over data x data_shard"
    )
    assert len(lines) == 19
    assert lines[-1] == "... and 1,008 more"
    assert str(plan(1)) == "standalone: 1 rank\nrank  data part\n   0     0 of 1"


def test_json() -> None:
    assert json.loads(plan(8, tensor=2).to_json()) == {
        "world_size": 8,
        "offset": 0,
        "mode": "hybrid",
        "axes": list(AXES),
        "degrees": dict.fromkeys(ALL, 1) | {"data": 4, "tensor": 2},
        "data_shard_count": 4,
    }


def test_names() -> None:
    assert AXES == ("pipeline", "data", "data_shard", "context", "tensor")
    assert MODES == ("standalone", "data", "semi_auto", "auto", "hybrid")
    assert DATA_AXES == ("data", "data_shard")


def test_examples_run() -> None:
    failed, attempted = doctest.testmod(PLAN_MODULE)
    assert attempted > 0
    assert failed == 0


def test_the_examples_of_the_document_run() -> None:
    document = Path(__file__).resolve().parents[1] / "docs" / "plan.md"
    failed, attempted = doctest.testfile(str(document), module_relative=False)
    assert attempted > 5
    assert failed == 0


# --- cost ----------------------------------------------------------------------------------------


def _seconds(world: int) -> float:
    start = time.process_time()
    made = plan(world, pipeline=4, data_shard=4, tensor=4, expert=4)
    for axis in ALL:
        assert sum(map(len, made.groups(axis))) == world
    for rank in range(world):
        made.data_shard_index(rank)
    made.coordinates(world - 1)
    str(made)
    made.to_json()
    return time.process_time() - start


def test_a_thousand_ranks_take_milliseconds() -> None:
    assert min(_seconds(1024) for _ in range(5)) < 0.05


def test_a_hundred_thousand_ranks_are_possible() -> None:
    assert _seconds(102_400) < 4


def test_the_module_imports_no_framework() -> None:
    code = (
        "import sys, parallelkit.plan, parallelkit.data, parallelkit.launch;"
        "print(sorted({'torch', 'mindspore', 'vllm', 'numpy', 'zmq', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
