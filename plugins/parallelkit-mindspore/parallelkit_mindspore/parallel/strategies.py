"""Strategies that MindSpore found or was given: read, checked, and said in a plan's words.

Three sources say the same in three ways: a compiled graph's operators, a compiled graph's
parameters, and a saved strategy file. No MindSpore is imported here.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs

from parallelkit.errors import StrategyError
from parallelkit.plan import ParallelPlan
from parallelkit.plan import plan as plan_degrees
from parallelkit_mindspore.parallel.device_layout import (
    DeviceLayout,
    Piece,
    mesh_of,
    own_dims,
    words,
)

#: Operators whose dims, in order, are the digits of their device matrix.
_IN_ORDER: Final = frozenset(
    {"Abs", "Add", "BiasAdd", "Cast", "Div", "Dropout", "Exp", "FastGeLU", "GeLU", "LayerNorm"}
    | {"Log", "Maximum", "Minimum", "Mul", "Neg", "Pow", "RealDiv", "ReLU", "ReduceMax"}
    | {"ReduceMean", "ReduceMin", "ReduceSum", "Rsqrt", "SiLU", "Sigmoid", "Softmax", "Sqrt"}
    | {"Square", "Sub", "Tanh", "_VirtualDataset"}
)
_SHOWN: Final = 40


@attrs.frozen(kw_only=True)
class Strategies:
    """How parameters and operators of one pipeline stage are divided.

    Attributes:
        parameters: name to layout.
        operators: name to the degrees of each input's dims.
        stage: the pipeline stage; None where the source does not say.
    """

    parameters: Mapping[str, DeviceLayout] = attrs.field(factory=dict)
    operators: Mapping[str, tuple[tuple[int, ...], ...]] = attrs.field(factory=dict)
    stage: int | None = None

    def check(self, plan: ParallelPlan, where: str) -> None:
        """Raise `StrategyError` unless these can be strategies of a stage of `plan`.

        Args:
            where: what they are, for the message.
        """
        ranks = plan.world_size // plan.pipeline
        for name, layout in self.parameters.items():
            if layout.ranks != ranks:
                raise StrategyError(
                    f"{where} lays {name!r} over {layout.ranks} ranks; a stage of this plan "
                    f"({plan.title}) has {ranks}"
                )
        for name, inputs in self.operators.items():
            for degrees in inputs:
                if ranks % math.prod(degrees):
                    raise StrategyError(
                        f"{where} divides operator {name!r} in {_by(degrees)}; the {ranks} ranks "
                        f"of a stage of this plan ({plan.title}) cannot be divided so"
                    )

    def found_plan(self, plan: ParallelPlan) -> ParallelPlan | None:
        """The degrees that a search came to, as a hybrid plan; None where no plan has these.

        Ranks over which some parameter is divided are the axis `tensor`, those of the parallel
        optimizer `data_shard`, the rest hold replicas: `data`.
        """
        split = [p for layout in self.parameters.values() for p in _divided(layout)]
        state = [p for layout in self.parameters.values() for p in _sharded(layout)]
        top = plan.world_size // plan.pipeline
        cuts = sorted(
            {1, top} | {c for p in (*split, *state) for c in (p.stride, p.stride * p.degree)}
        )
        degrees: dict[str, int] = {}
        for low, high in itertools.pairwise(cuts):
            if high % low:
                return None
            axis = "tensor" if _over(split, low) else "data_shard" if _over(state, low) else "data"
            if axis in degrees and axis != next(reversed(degrees)):
                return None  # the axis would be in two places
            degrees[axis] = degrees.get(axis, 1) * (high // low)
        if list(degrees) != [axis for axis in ("tensor", "data_shard", "data") if axis in degrees]:
            return None
        degrees.setdefault("data", 1)
        return plan_degrees(plan.world_size, "hybrid", pipeline=plan.pipeline, **degrees)

    def explain(self, plan: ParallelPlan) -> list[str]:
        """One line for each parameter and operator, in the words of `plan`."""
        stage = "" if plan.pipeline == 1 or self.stage is None else f" of stage {self.stage}"
        lines = [f"parameters{stage}: {len(self.parameters)}"]
        rows = [
            f"  {name} {_shape(layout)}: {_said(layout.pieces, plan)}"
            for name, layout in self.parameters.items()
        ]
        lines += [*_short(rows), f"operators{stage}: {len(self.operators)}"]
        rows = []
        for name, inputs in self.operators.items():
            found = operator_pieces(name, inputs, plan.world_size // plan.pipeline)
            rows.append(f"  {name}: {_inputs(inputs, found, plan)}")
        return lines + _short(rows)


def from_compiled(
    operators: Mapping[str, Sequence[Sequence[int]]],
    layouts: Mapping[str, Sequence[Any]],
    *,
    names: Collection[str],
    stage: int | None = None,
) -> Strategies:
    """Read what MindSpore keeps of a compiled cell.

    Args:
        operators: name to degrees, as `_cell_graph_executor._get_shard_strategy(cell)` gives.
        layouts: `cell.parameter_layout_dict`: name to (device matrix, tensor map, shape of the
            part, field size, uniform, group of the parallel optimizer, whole shape, shape of the
            part with cut dims, ...).
        names: of the parameters to keep; others there are inputs and optimizer states.
        stage: the pipeline stage that was compiled.

    Raises:
        StrategyError: they are not of this form.
    """
    parameters = {}
    for name, layout in layouts.items():
        if name in names:
            try:
                parameters[name] = _compiled_layout(layout)
            except (StrategyError, LookupError, TypeError, ValueError) as error:
                raise StrategyError(
                    f"MindSpore gave parameter {name!r} the layout {layout!r:.300}, which cannot "
                    f"be read: {error}"
                ) from error
    return Strategies(
        parameters=parameters,
        operators={name: _degrees(name, inputs) for name, inputs in operators.items()},
        stage=stage,
    )


def read_file(path: str | Path) -> Strategies:
    """Read a strategy file that MindSpore saved as JSON.

    Operators are named there by their parameter, `MatMul_d1.weight`.

    Raises:
        StrategyError: the file is missing, damaged, or not a strategy file.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise StrategyError(
            f"the strategy file {str(path)!r} cannot be read: {error.strerror}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise StrategyError(f"the strategy file {str(path)!r} is no JSON: {error}") from error
    try:
        return _file_content(content)
    except (StrategyError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise StrategyError(f"the strategy file {str(path)!r} is damaged: {error}") from error


def operator_pieces(
    name: str, inputs: Sequence[Sequence[int]], ranks: int
) -> list[list[Piece]] | None:
    """The divisions of each input, for operators whose device matrix is known; else None.

    MindSpore takes the degrees in the order of the operator's dims, slowest first; ranks that are
    left over repeat the work and are the fastest digit.

    Example:
        >>> operator_pieces("MatMul-op0", [[2, 1], [1, 4]], 8)
        [[Piece(dim=0, degree=2, stride=4)], [Piece(dim=1, degree=4, stride=1)]]
    """
    kind = _kind(name)
    if kind == "MatMul" and [len(degrees) for degrees in inputs] == [2, 2]:
        return _matmul(inputs, ranks)
    if kind not in _IN_ORDER or not inputs:
        return None
    longest = max(inputs, key=len)
    strides = _strides(longest, ranks)
    found = []
    for degrees in inputs:
        shift = len(longest) - len(degrees)
        row = []
        for dim, degree in enumerate(degrees):
            if degree > 1:
                if degree != longest[dim + shift]:
                    return None
                row.append(Piece(dim, degree, strides[dim + shift]))
        found.append(row)
    return found


# --- reading -----------------------------------------------------------------------------------


def _compiled_layout(layout: Sequence[Any]) -> DeviceLayout:
    matrix, tensor_map, part, whole, group = (layout[at] for at in (0, 1, 2, 6, 5))
    cut = layout[7] if len(layout) > 7 and len(layout[7]) == len(tensor_map) else part
    degrees = [1 if digit < 0 else matrix[len(matrix) - 1 - digit] for digit in tensor_map]
    shape = [extent * degree for extent, degree in zip(cut, degrees, strict=True)]
    return DeviceLayout(
        matrix=matrix,
        tensor_map=tensor_map,
        shape=shape,
        dims=own_dims(shape, whole),
        optimizer=int(group.partition("-")[0]) if group else 0,  # "2-16453000547691086251"
    )


def _file_content(content: Any) -> Strategies:
    items = content["parallel_strategy_item"]
    layouts = content.get("parallel_layout_item", {})  # operator strategy files have none
    stages = {item["stage"] for item in items.values()}
    parameters = {}
    for name, item in layouts.items():
        parameters[name] = DeviceLayout(
            matrix=item["dev_matrix"],
            tensor_map=item["tensor_map"],
            shape=item["tensor_shape"],
            optimizer=item["opt_weight_shard_size"],
            step=item["opt_weight_shard_step"],
        )
    return Strategies(
        parameters=parameters,
        operators={name: _degrees(name, item["parallel_strategy"]) for name, item in items.items()},
        stage=stages.pop() if len(stages) == 1 else None,
    )


def _degrees(name: str, inputs: Iterable[Iterable[Any]]) -> tuple[tuple[int, ...], ...]:
    found = tuple(tuple(degrees) for degrees in inputs)
    if any(type(degree) is not int or degree < 1 for degrees in found for degree in degrees):
        raise StrategyError(f"operator {name!r} has the strategy {found!r:.200}; degrees are 1 up")
    return found


# --- arithmetic --------------------------------------------------------------------------------


def _kind(name: str) -> str:
    """`MatMul` of `Default/d1-Dense/MatMul-op0` and of `MatMul_d1.weight`."""
    last = re.sub(r"-op\d+$", "", name.rsplit("/", 1)[-1])
    return last if last.startswith("_") else last.partition("_")[0]


def _matmul(inputs: Sequence[Sequence[int]], ranks: int) -> list[list[Piece]] | None:
    """A matrix product: its digits are rows, what is summed over, columns.

    Whether an input is transposed is not said; None where that makes a difference.
    """
    readings = set()
    for left, right in itertools.product(((0, 1), (1, 0)), repeat=2):
        rows, summed = (inputs[0][dim] for dim in left)
        same, columns = (inputs[1][dim] for dim in right)
        if same == summed and ranks % (rows * summed * columns) == 0:
            down, inner, across = _strides((rows, summed, columns), ranks)
            first = ((left[0], rows, down), (left[1], summed, inner))
            second = ((right[0], same, inner), (right[1], columns, across))
            both = (tuple(Piece(*p) for p in sorted(row) if p[1] > 1) for row in (first, second))
            readings.add(tuple(both))
    return [list(row) for row in readings.pop()] if len(readings) == 1 else None


def _strides(degrees: Sequence[int], ranks: int) -> list[int]:
    """How far apart neighbours on each digit are; left-over ranks are the fastest digit."""
    strides, stride = [], ranks
    for degree in degrees:
        stride //= degree
        strides.append(stride)
    return strides


def _divided(layout: DeviceLayout) -> Sequence[Piece]:
    return layout.pieces[: len(layout.pieces) - len(_sharded(layout))]


def _sharded(layout: DeviceLayout) -> Sequence[Piece]:
    """The pieces of the parallel optimizer, which come last."""
    count, found = max(layout.optimizer, 1), list[Piece]()
    for piece in reversed(layout.pieces):
        if count > 1:
            found.append(piece)
            count //= piece.degree
    return found[::-1]


def _over(pieces: Iterable[Piece], stride: int) -> bool:
    return any(p.stride <= stride < p.stride * p.degree for p in pieces)


# --- words -------------------------------------------------------------------------------------


def _by(degrees: Sequence[int]) -> str:
    return " x ".join(map(str, degrees))


def _shape(layout: DeviceLayout) -> str:
    whole = dict.fromkeys(layout.dims, 1)
    for dim, extent in zip(layout.dims, layout.shape, strict=True):
        whole[dim] *= extent
    return str(list(whole.values()))


def _inputs(
    inputs: Sequence[Sequence[int]], found: list[list[Piece]] | None, plan: ParallelPlan
) -> str:
    said = []
    for number, degrees in enumerate(inputs):
        if found is not None:
            text = _said(found[number], plan)
        else:
            cut = [f"dim {dim} in {degree}" for dim, degree in enumerate(degrees) if degree > 1]
            text = ", ".join(cut) or "whole"
        said.append(f"input {number}: {text}")
    return "; ".join(said) or "given as layouts; see its parameters"


def _said(pieces: Sequence[Piece], plan: ParallelPlan) -> str:
    """By the axes of the plan, an axis cut up only where this tensor needs it."""
    return words(pieces, mesh_of(plan, pieces) or mesh_of(plan, ()))


def _short(rows: Sequence[str]) -> list[str]:
    more = len(rows) - _SHOWN
    return [*rows[:_SHOWN], *([f"  ... and {more} more"] if more > 0 else [])]
