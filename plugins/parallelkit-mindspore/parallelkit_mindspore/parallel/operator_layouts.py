"""The user's layouts in mode `semi_auto`: how operators of a model are divided.

A layout is one of
- for an `nn.Dense`, by the cell's name: `"colwise"`, `"rowwise"` or `"replicate"`, over the plan's
  data and tensor axes;
- for any operator that is an attribute of a cell, by its name (`"blocks.*.up.matmul"`): MindSpore's
  own strategy, a tuple of degrees by dim for each input, or of `mindspore.Layout`s.

What a model divides itself, by `operator.shard(...)`, stays as it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from mindspore import Layout, nn, ops

from parallelkit.errors import LayoutError
from parallelkit.patterns import choose
from parallelkit.plan import ParallelPlan

STYLES: Final = ("colwise", "rowwise", "replicate")


def operators(model: nn.Cell) -> dict[str, Any]:
    """Every operator that is an attribute of a cell, by the cell's name and its own."""
    return {
        f"{name}.{key}".lstrip("."): operator
        for name, cell in model.cells_and_names()
        for key, operator in cell._primitives.items()
        if isinstance(operator, ops.Primitive)
    }


def divided(model: nn.Cell) -> dict[str, Any]:
    """The strategies that operators of a model have now, by name."""
    found = {}
    for name, operator in operators(model).items():
        strategy = operator.attrs.get("in_strategy") or operator.attrs.get("in_layout")
        if strategy is not None:
            found[name] = strategy
    return found


def apply(model: nn.Cell, layouts: Mapping[str, Any], plan: ParallelPlan) -> list[str]:
    """Give each operator the strategy of its pattern; say what was done.

    Everything is checked before the first operator is changed.

    Raises:
        LayoutError: as `check`.
    """
    wanted, found = check(model, layouts, plan), operators(model)
    for name, strategy in wanted.items():
        found[name].shard(strategy)
    return [f"{name} by {_said(strategy)}" for name, strategy in wanted.items()]


def check(model: nn.Cell, layouts: Mapping[str, Any], plan: ParallelPlan) -> dict[str, Any]:
    """Find the strategy of each operator that the layouts name; nothing is changed.

    Raises:
        LayoutError: a pattern fits nothing, a style or strategy is none, is not for that kind of
            cell, or does not divide the layer or the ranks; with the cell's or operator's name.
    """
    cells = {name: cell for name, cell in model.cells_and_names() if name}
    found: dict[str, Any] = {**operators(model), **cells}
    chosen = choose(
        layouts,
        found,
        suits=lambda pattern, name, style: _suits(pattern, name, found[name], style, plan),
        unmatched=lambda pattern: _unmatched(pattern, model),
    )
    wanted: dict[str, Any] = {}
    for name, style in chosen.items():
        if style in ("colwise", "rowwise"):
            wanted |= _dense(name, cells[name], style, plan)
    return wanted | {name: style for name, style in chosen.items() if not isinstance(style, str)}


def _dense(name: str, cell: Any, style: str, plan: ParallelPlan) -> dict[str, Any]:
    """Strategies of a dense layer's operators; its weight is (outputs, inputs)."""
    data, tensor = plan.world_size // plan.pipeline // plan.tensor, plan.tensor
    column = style == "colwise"
    found: dict[str, Any] = {
        f"{name}.matmul": ((data, 1), (tensor, 1)) if column else ((data, tensor), (1, tensor))
    }
    if cell.has_bias:
        found[f"{name}.bias_add"] = ((data, tensor), (tensor,)) if column else ((data, 1), (1,))
    return found


def _suits(pattern: str, name: str, target: Any, style: Any, plan: ParallelPlan) -> None:
    if isinstance(style, str):
        _styled(pattern, name, target, style, plan)
        return
    if isinstance(target, nn.Cell):
        raise LayoutError(
            f"layouts gives {pattern!r} a strategy, and {name!r} is a cell; strategies are for "
            f"operators, such as {_first(target, name)!r}"
        )
    good = isinstance(style, tuple) and bool(style)
    if good and all(isinstance(row, Layout) for row in style):
        return
    ranks = plan.world_size // plan.pipeline
    for row in style if good else ():
        good = good and isinstance(row, tuple) and all(type(d) is int and d > 0 for d in row)
        if good and ranks % math.prod(row):
            raise LayoutError(
                f"layouts divides an input of operator {name!r} in "
                f"{' x '.join(map(str, row))}; the {ranks} ranks of a pipeline stage cannot be "
                "divided so"
            )
    if not good:
        raise LayoutError(
            f"layouts gives {pattern!r} the layout {style!r:.100}; it is "
            f"{', '.join(map(repr, STYLES))}, or for an operator a tuple for each input: degrees "
            "by dim, or a mindspore.Layout"
        )


def _styled(pattern: str, name: str, target: Any, style: str, plan: ParallelPlan) -> None:
    if style not in STYLES:
        raise LayoutError(
            f"layouts gives {pattern!r} the style {style!r}; a style is "
            f"{', '.join(map(repr, STYLES))}"
        )
    if style == "replicate":
        return
    if not isinstance(target, nn.Dense):
        raise LayoutError(
            f"layouts gives {pattern!r} the style {style!r}, and {name!r} is a "
            f"{type(target).__qualname__}; {style!r} is for nn.Dense. Give the operators of others "
            "their strategies by name"
        )
    size = int(target.weight.shape[0 if style == "colwise" else 1])
    if size % plan.tensor:
        raise LayoutError(
            f"layouts divides cell {name!r} ({style}), and its {size} "
            f"{'outputs' if style == 'colwise' else 'inputs'} do not divide by "
            f"tensor={plan.tensor}"
        )


def _unmatched(pattern: str, model: nn.Cell) -> str:
    kinds = [
        *(name for name, cell in model.cells_and_names() if isinstance(cell, nn.Dense)),
        *operators(model),
    ]
    more = f" and {len(kinds) - 6} more" if len(kinds) > 6 else ""
    return (
        f"layouts has the pattern {pattern!r}, which fits no cell or operator of the model; it has "
        f"{', '.join(map(repr, kinds[:6])) or 'none that can be divided'}{more}"
    )


def _first(cell: nn.Cell, name: str) -> str:
    return next((f"{name}.{key}" for key in operators(cell)), f"{name}.<operator>")


def _said(strategy: Any) -> str:
    """Degrees as they are; of MindSpore's layouts the names of each dim's axes."""
    if all(isinstance(row, tuple) for row in strategy):
        return repr(strategy)
    return ", ".join(repr(_aliases(row.to_dict())) for row in strategy)


def _aliases(layout: Mapping[str, Any]) -> tuple[Any, ...]:
    names = layout["alias_name"]

    def name(digit: Any) -> Any:
        if isinstance(digit, tuple):
            return tuple(map(name, digit))
        return names[len(names) - 1 - digit] if digit >= 0 else "None"

    return tuple(map(name, layout["tensor_map"]))
