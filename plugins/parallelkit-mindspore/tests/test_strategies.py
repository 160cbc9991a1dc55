"""Layouts and strategies of MindSpore's in our words: recorded ones, random ones, damaged ones."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from parallelkit_mindspore.parallel.device_layout import (
    DeviceLayout,
    Piece,
    mesh_of,
    own_dims,
    shard_layout,
    words,
)
from parallelkit_mindspore.parallel.strategies import (
    Strategies,
    from_compiled,
    operator_pieces,
    read_file,
)

from parallelkit.errors import StrategyError
from parallelkit.plan import ParallelPlan, plan
from parallelkit.weights.layout import region

NAMES = ("d1.weight", "d1.bias", "d2.weight", "d2.bias")

#: What MindSpore 2.10 gave for a two-layer perceptron on 8 ranks, by recursive programming.
LAYOUTS: dict[str, Any] = {
    "args0": ([8], [-1, -1], [64, 512], 0, True, "", [64, 512], [64, 512], False, False, 0, 0),
    "d1.weight": ([2, 4], [0, -1], [256, 512], 0, True, "", [1024, 512], [256, 512], False),
    "moments.d1.weight": ([2, 4], [0, -1], [256, 512], 0, True, "", [1024, 512], [256, 512]),
    "d1.bias": ([2, 4], [0], [256], 0, True, "", [1024], [256], False, False, 0, 0),
    "d2.weight": ([2, 4], [-1, 0], [512, 256], 0, True, "", [512, 1024], [512, 256]),
    "d2.bias": ([2, 4], [-1], [512], 0, True, "", [512], [512], False, False, 0, 0),
}
OPERATORS = {
    "Default/d1-Dense/MatMul-op2": [[2, 1], [4, 1]],
    "Default/d1-Dense/BiasAdd-op2": [[2, 4], [4]],
    "Default/d2-Dense/MatMul-op2": [[2, 4], [1, 4]],
    "Default/r-Roll/Roll-op2": [[2, 4]],
}
FILE: dict[str, Any] = {
    "current_stage": 4,
    "parallel_layout_item": {
        "d1.bias": {
            "dev_matrix": [8],
            "field": 0,
            "opt_weight_shard_size": 2,
            "opt_weight_shard_step": 1,
            "tensor_map": [-1],
            "tensor_shape": [128],
        },
        "d1.weight": {
            "dev_matrix": [2, 4],
            "field": 0,
            "opt_weight_shard_size": 2,
            "opt_weight_shard_step": 4,
            "tensor_map": [0, -1],
            "tensor_shape": [128, 64],
        },
    },
    "parallel_strategy_item": {
        "MatMul_d1.weight": {"parallel_strategy": [[2, 1], [4, 1]], "stage": 0}
    },
}


def compiled(layouts: Any = LAYOUTS, operators: Any = OPERATORS, **options: Any) -> Strategies:
    return from_compiled(operators, layouts, names=NAMES, **options)


def saved(tmp_path: Path, content: Any) -> Path:
    path = tmp_path / "strategies.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


# --- recorded ----------------------------------------------------------------------------------


def test_a_compiled_model_is_said_in_the_words_of_the_plan() -> None:
    lines = compiled().explain(plan(8, "semi_auto", data=2, tensor=4))
    assert lines == [
        "parameters: 4",
        "  d1.weight [1024, 512]: dim 0 over tensor (4)",
        "  d1.bias [1024]: dim 0 over tensor (4)",
        "  d2.weight [512, 1024]: dim 1 over tensor (4)",
        "  d2.bias [512]: whole",
        "operators: 4",
        "  Default/d1-Dense/MatMul-op2: input 0: dim 0 over data (2); "
        "input 1: dim 0 over tensor (4)",
        "  Default/d1-Dense/BiasAdd-op2: input 0: dim 0 over data (2), dim 1 over tensor (4); "
        "input 1: dim 0 over tensor (4)",
        "  Default/d2-Dense/MatMul-op2: input 0: dim 0 over data (2), dim 1 over tensor (4); "
        "input 1: dim 1 over tensor (4)",
        "  Default/r-Roll/Roll-op2: input 0: dim 0 in 2, dim 1 in 4",  # its order is not known
    ]


def test_a_search_is_said_as_the_plan_that_it_found() -> None:
    searched = plan(8, "auto")
    found = compiled().found_plan(searched)
    assert found == plan(8, "hybrid", data=2, tensor=4)
    everything_whole = {"d1.bias": ([8], [-1], [64], 0, True, "", [64], [64])}
    assert compiled(everything_whole, {}).found_plan(searched) == plan(8, "hybrid", data=8)


def test_the_parallel_optimizer_is_the_axis_data_shard() -> None:
    weight = ([2, 4], [0, -1], [32, 64], 0, True, "2-1645300", [128, 64], [32, 64])
    both = compiled({"d1.weight": weight}, {})
    layout = both.parameters["d1.weight"]
    assert layout.pieces == (Piece(0, 4, 1), Piece(0, 2, 4))
    assert both.found_plan(plan(8, "auto")) == plan(8, "hybrid", data=1, data_shard=2, tensor=4)


def test_a_dim_that_two_digits_divide() -> None:
    layout = ([2, 2, 2], [1, 0, -1], [256, 512], 0, True, "", [1024, 512], [1, 256, 512])
    both = compiled({"d1.weight": layout}, {})
    lines = both.explain(plan(8, "semi_auto", data=2, tensor=4))
    assert lines[1] == "  d1.weight [1024, 512]: dim 0 over tensor.0 (2), dim 0 over tensor.1 (2)"


def test_ranks_that_are_left_over_are_the_fastest_digit() -> None:
    """Recorded: on 8 ranks, a MatMul with weight degrees (4, 1) has the device matrix (4, 2)."""
    recorded = DeviceLayout(matrix=(4, 2), tensor_map=(1, -1), shape=(1024, 512))
    found = operator_pieces("MatMul-op1", [[1, 1], [4, 1]], 8)
    assert found is not None
    assert tuple(found[1]) == recorded.pieces == (Piece(0, 4, 2),)
    said = words(recorded.pieces, mesh_of(plan(8, data=2, tensor=4), recorded.pieces))
    assert said == "dim 0 over data (2) x tensor.0 (2)"


def test_stages_are_named() -> None:
    strategies = compiled({"d1.bias": ([4], [0], [16], 0, True, "", [64], [16])}, {}, stage=1)
    lines = strategies.explain(plan(8, "semi_auto", pipeline=2, tensor=4, data=1))
    assert lines[:2] == ["parameters of stage 1: 1", "  d1.bias [64]: dim 0 over tensor (4)"]


def test_long_lists_are_cut() -> None:
    many = {f"Default/ReLU-op{n}": [[8, 1]] for n in range(50)}
    lines = from_compiled(many, {}, names=()).explain(plan(8))
    assert lines[-1] == "  ... and 10 more"


@pytest.mark.parametrize(
    ("inputs", "right"),
    [
        ([[2, 1], [1, 4]], [Piece(1, 4, 1)]),
        ([[2, 1], [4, 1]], [Piece(0, 4, 1)]),  # transposed
        ([[2, 4], [1, 4]], [Piece(1, 4, 1)]),
        ([[8, 1], [1, 1]], []),
        ([[1, 2], [2, 2]], None),  # transposed or not: not to be seen
        ([[2, 3], [5, 7]], None),  # no matrix product
    ],
)
def test_digits_of_a_matrix_product(inputs: list[list[int]], right: list[Piece] | None) -> None:
    found = operator_pieces("Default/MatMul-op0", inputs, 8)
    assert (found and found[1]) == right or (found is None and right is None)


def test_inputs_that_broadcast_share_digits() -> None:
    assert operator_pieces("Mul-op0", [[2, 4], [4]], 8) == [
        [Piece(0, 2, 4), Piece(1, 4, 1)],
        [Piece(0, 4, 1)],
    ]
    assert operator_pieces("Mul-op0", [[2, 4], [2]], 8) is None


# --- random ------------------------------------------------------------------------------------


@st.composite
def laid_out(draw: st.DrawFn) -> tuple[ParallelPlan, DeviceLayout]:
    """A plan, and a layout with any factors of its stage in any order on any dims."""
    degrees = {axis: draw(st.integers(1, 3)) for axis in ("pipeline", "data", "tensor")}
    spread = plan(math.prod(degrees.values()), "semi_auto", **degrees)
    stage = spread.world_size // spread.pipeline
    matrix = draw(st.permutations(_factors(stage)))
    digits = [-1] * draw(st.integers(1, 3))
    free = list(range(len(matrix)))
    for dim in range(len(digits)):
        if free and draw(st.booleans()):
            digits[dim] = free.pop(draw(st.integers(0, len(free) - 1)))
    part = draw(st.lists(st.integers(1, 3), min_size=len(digits), max_size=len(digits)))
    cut = [1 if d < 0 else matrix[len(matrix) - 1 - d] for d in digits]
    shape = [a * b for a, b in zip(part, cut, strict=True)]
    return spread, DeviceLayout(matrix=matrix or (1,), tensor_map=digits, shape=shape)


def _factors(number: int) -> list[int]:
    for factor in range(2, number + 1):
        if number % factor == 0:
            return [factor, *_factors(number // factor)]
    return []


@given(laid_out())
def test_our_words_place_every_part_where_mindspore_does(
    case: tuple[ParallelPlan, DeviceLayout],
) -> None:
    spread, layout = case
    mesh = mesh_of(spread, layout.pieces)
    if mesh is None:
        return
    ours = shard_layout(layout.pieces, mesh)
    ours.check(mesh, layout.shape)
    for rank in spread.ranks:
        box = region(ours, mesh, layout.shape, rank)
        assert box is not None
        assert box.offsets == _offsets(layout, rank % layout.ranks)
        assert math.prod(box.sizes) * math.prod(p.degree for p in layout.pieces) == math.prod(
            layout.shape
        )


def _offsets(layout: DeviceLayout, rank: int) -> tuple[int, ...]:
    """MindSpore's own rule: digits of the rank in the matrix, and by them the part of each dim."""
    digits = []
    for degree in reversed(layout.matrix):
        rank, digit = divmod(rank, degree)
        digits.append((digit, degree))
    return tuple(
        0 if at < 0 else digits[at][0] * (extent // digits[at][1])
        for at, extent in zip(layout.tensor_map, layout.shape, strict=True)
    )


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_cut_dims_belong_to_the_dims_they_multiply_up_to(
    shape: list[int], data: st.DataObject
) -> None:
    cut = list(
        itertools.chain.from_iterable(
            _factors(extent)[::-1] or [1] if data.draw(st.booleans()) else [extent]
            for extent in shape
        )
    )
    dims = own_dims(cut, shape)
    for dim, extent in enumerate(shape):
        assert math.prod(c for c, d in zip(cut, dims, strict=True) if d == dim) == extent


# --- files -------------------------------------------------------------------------------------


def test_a_file_reads_as_what_was_compiled(tmp_path: Path) -> None:
    read = read_file(saved(tmp_path, FILE))
    assert read.stage == 0
    assert read.parameters["d1.weight"].pieces == (Piece(0, 4, 1), Piece(0, 2, 4))
    assert read.parameters["d1.bias"].pieces == (Piece(0, 2, 1),)
    assert read.operators == {"MatMul_d1.weight": ((2, 1), (4, 1))}
    lines = read.explain(plan(8, "semi_auto", data_shard=2, tensor=4))
    assert lines[2] == "  d1.weight [128, 64]: dim 0 over tensor (4), dim 0 over data_shard (2)"


def test_the_optimizers_ranks_are_found_as_the_file_has_them() -> None:
    for item in FILE["parallel_layout_item"].values():
        layout = DeviceLayout(
            matrix=item["dev_matrix"],
            tensor_map=item["tensor_map"],
            shape=item["tensor_shape"],
            optimizer=item["opt_weight_shard_size"],
        )
        assert layout.pieces[-1].stride == item["opt_weight_shard_step"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "no JSON"),
        ("{", "no JSON"),
        ("[" * 100_000, "no JSON"),
        ("[]", "damaged"),
        ({}, "parallel_strategy_item"),
        ({"parallel_strategy_item": []}, "damaged"),
        ({"parallel_strategy_item": {"MatMul_w": {"stage": 0}}}, "parallel_strategy"),
        (
            {"parallel_strategy_item": {"M": {"stage": 0, "parallel_strategy": [[0]]}}},
            "degrees are 1 up",
        ),
        ({**FILE, "parallel_layout_item": {"w": {"dev_matrix": [8]}}}, "tensor_map"),
    ],
)
def test_a_damaged_file(tmp_path: Path, content: Any, says: str) -> None:
    path = saved(tmp_path, content)
    with pytest.raises(StrategyError, match=says) as caught:
        read_file(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("dev_matrix", [], "one or more positive"),
        ("dev_matrix", ["2", 4], "integers"),
        ("dev_matrix", [2, 0], "positive"),
        ("tensor_map", [0], "one number for each dim"),
        ("tensor_map", [0, 0], "one dim only"),
        ("tensor_map", [2, -1], "0 to 1"),
        ("tensor_map", [-2, -1], "0 to 1"),
        ("tensor_shape", [126, 64], "cannot be divided by 4"),
        ("opt_weight_shard_size", -1, "positive"),
    ],
)
def test_a_damaged_layout(tmp_path: Path, field: str, value: Any, says: str) -> None:
    content = json.loads(json.dumps(FILE))
    content["parallel_layout_item"]["d1.weight"][field] = value
    with pytest.raises(StrategyError, match=says):
        read_file(saved(tmp_path, content))


def test_a_missing_file() -> None:
    with pytest.raises(StrategyError, match="cannot be read: No such file"):
        read_file("nowhere.json")


def test_strategies_for_other_ranks(tmp_path: Path) -> None:
    read = read_file(saved(tmp_path, FILE))
    read.check(plan(8), "the file")
    with pytest.raises(StrategyError, match=r"the file lays 'd1.bias' over 8 ranks.* has 4"):
        read.check(plan(4), "the file")
    with pytest.raises(StrategyError, match=r"operator 'M' in 3"):
        Strategies(operators={"M": ((3,),)}).check(plan(4), "the file")


def test_a_layout_that_cannot_be_read() -> None:
    with pytest.raises(StrategyError, match=r"parameter 'd1.bias' the layout"):
        compiled({"d1.bias": ([8], [0])}, {})
    with pytest.raises(StrategyError, match="more than the shape"):
        own_dims((2, 2, 2), (2, 2))
    with pytest.raises(StrategyError, match="no cut of the shape"):
        own_dims((3, 2), (4, 2))


def test_degrees_that_overlap_no_axis_are_said_plainly() -> None:
    pieces = [Piece(0, 2, 1), Piece(1, 3, 2)]  # the matrix (3, 2) over a plan of (2, 3)
    assert mesh_of(plan(6, data=2, tensor=3), pieces) is None
    assert words(pieces, None) == "dim 0 in 2, next to each other, dim 1 in 3, 2 ranks apart"
    strategies = Strategies(
        parameters={"w": DeviceLayout(matrix=(3, 2), tensor_map=(0, 1), shape=(4, 6))}
    )
    lines = strategies.explain(plan(6, data=2, tensor=3))
    assert lines[1] == "  w [4, 6]: dim 0 in 2, next to each other, dim 1 in 3, 2 ranks apart"
