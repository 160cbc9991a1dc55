"""Layouts: which patterns of cell names a user writes, and which styles they stand for."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, Final

from mindspore import mint, nn

from parallelkit.errors import LayoutError
from parallelkit.patterns import choose, general, grouped
from parallelkit_mindspore.parallel.kept import check_kept

#: Styles by name, as in the torch plugin, and what each does with a cell's parameters.
STYLES: Final[Mapping[str, str]] = {
    "colwise": "weight divided by outputs; whole input, output divided in its last dim",
    "colwise_gather": "as colwise, and the output is gathered",
    "rowwise": "weight divided by inputs (an embedding's by its rows); whole output",
    "replicate": "left alone, with all cells below",
}
LINEAR: Final = (nn.Dense, mint.nn.Linear)
EMBEDDING: Final = (nn.Embedding, mint.nn.Embedding)
#: Activations inside `nn.Dense` that work on each element by itself, so on a part of the outputs.
_ELEMENTWISE: Final = frozenset(
    {"ReLU", "ReLU6", "LeakyReLU", "ELU", "GELU", "FastGelu", "SiLU", "Sigmoid", "LogSigmoid"}
    | {"Tanh", "HSwish", "HSigmoid", "Mish", "SeLU", "Softsign", "Identity"}
)
_SHOWN: Final = 6


def cells(model: nn.Cell) -> dict[str, nn.Cell]:
    """Every cell of `model` by name, the model itself under `""`; one in several places once."""
    return {str(name): cell for name, cell in model.cells_and_names()}


def resolve(layouts: Mapping[str, str], found: Mapping[str, nn.Cell]) -> dict[str, str]:
    """Give each cell the style of its pattern; pure. `patterns.choose` has the rules.

    Raises:
        LayoutError: a style is unknown or not for that kind of cell, a pattern matches nothing
            (the nearest names are listed), two equally good patterns give different styles, or
            nothing is left to divide.
    """
    for pattern, style in layouts.items():
        _known(pattern, style)
    chosen = choose(
        layouts,
        found,
        suits=lambda pattern, name, style: _suits(pattern, name, found[name], style),
        unmatched=lambda pattern: _unmatched(pattern, found),
    )
    if all(style == "replicate" for style in chosen.values()):
        raise LayoutError(
            f"the layouts divide nothing; the model has {dividable(found)}. Write such as "
            "layouts={'layers.*.up': 'colwise', 'layers.*.down': 'rowwise'}"
        )
    return {name: style for name, style in chosen.items() if style != "replicate"}


def check(model: nn.Cell, styles: Mapping[str, str], degree: int) -> None:
    """Find what cannot be divided by `degree`; pure.

    Raises:
        LayoutError: with the cell's name, and the degrees that are possible; or with what a part
            could not keep.
    """
    found = cells(model)
    check_kept(found, styles)
    holders: dict[int, list[str]] = {}
    for name, holder in found.items():
        for key, parameter in holder._params.items():
            if parameter is not None:
                holders.setdefault(id(parameter), []).append(f"{name}.{key}".lstrip("."))
    for name, style in styles.items():
        cell: Any = found[name]
        _plain(name, cell, style)
        weight = weight_of(cell)
        shared = holders[id(weight)]
        if len(shared) > 1:
            raise LayoutError(
                f"layouts divides cell {name!r}, whose weight is also {shared[1]!r}; tied weights "
                "are not divided. Leave both whole, with 'replicate'"
            )
        size = int(weight.shape[divided_dim(cell, style)])
        if size % degree:
            possible = [d for d in range(2, size + 1) if size % d == 0][:_SHOWN]
            raise LayoutError(
                f"layouts divides cell {name!r} ({style}), and its {size} "
                f"{_unit(cell, style)} do not divide by tensor={degree}; it can be "
                f"{', '.join(map(str, possible)) or 'no degree'}"
            )


def weight_of(cell: Any) -> Any:
    """The parameter that is divided."""
    return cell.embedding_table if isinstance(cell, nn.Embedding) else cell.weight


def divided_dim(cell: object, style: str) -> int:
    """Which dim of the weight is divided.

    Dim 0 is a linear layer's outputs, and an embedding's rows.
    """
    return int((style == "rowwise") != isinstance(cell, EMBEDDING))


def dividable(found: Mapping[str, nn.Cell]) -> str:
    """The general names of the layers that can be divided, for messages."""
    kinds = list(grouped(n for n, cell in found.items() if isinstance(cell, LINEAR + EMBEDDING)))
    more = f" and {len(kinds) - _SHOWN} more" if len(kinds) > _SHOWN else ""
    shown = ", ".join(map(repr, kinds[:_SHOWN])) + more
    return shown if kinds else "no nn.Dense, mint.nn.Linear or embedding"


def _unit(cell: object, style: str) -> str:
    if isinstance(cell, EMBEDDING):
        return "rows" if style == "rowwise" else "columns"
    return "inputs" if style == "rowwise" else "outputs"


def _plain(name: str, cell: Any, style: str) -> None:
    """Raise for options of a layer that a part of it could not keep."""
    odd = None
    if isinstance(cell, nn.Dense) and style == "colwise" and cell.activation is not None:
        kind = type(cell.activation).__name__
        odd = None if kind in _ELEMENTWISE else f"activation {kind}, which needs all outputs"
    if isinstance(cell, nn.Embedding) and cell.use_one_hot:
        odd = "use_one_hot=True"
    if isinstance(cell, mint.nn.Embedding):
        given = {
            "padding_idx": cell.padding_idx,
            "max_norm": cell.max_norm,
            "scale_grad_by_freq": cell.scale_grad_by_freq or None,
        }
        odd = next((f"{key}={value}" for key, value in given.items() if value is not None), None)
    if odd is not None:
        raise LayoutError(
            f"layouts divides cell {name!r} ({style}), which has {odd}; that cannot be divided. "
            "Leave it whole, with 'replicate'"
        )


def _known(pattern: object, style: object) -> None:
    if not isinstance(pattern, str):
        raise LayoutError(f"layouts has the pattern {pattern!r:.100}; a pattern is a string")
    if isinstance(style, str) and style in STYLES:
        return
    near = difflib.get_close_matches(style, STYLES, n=1) if isinstance(style, str) else []
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise LayoutError(
        f"layouts gives {pattern!r} the style {style!r:.100}{hint}; a style of the mindspore "
        f"plugin is {', '.join(map(repr, STYLES))}"
    )


def _suits(pattern: str, name: str, cell: nn.Cell, style: str) -> None:
    if style != "replicate" and not isinstance(cell, LINEAR + EMBEDDING):
        raise LayoutError(
            f"layouts gives {pattern!r} the style {style!r}, and cell {name!r} is a "
            f"{type(cell).__qualname__}; {style!r} is for nn.Dense, mint.nn.Linear, nn.Embedding "
            "and mint.nn.Embedding"
        )


def _unmatched(pattern: str, found: Mapping[str, nn.Cell]) -> str:
    kinds = [kind for kind in grouped(found) if kind]
    near = difflib.get_close_matches(general(pattern), kinds, n=3, cutoff=0.5)
    hint = f"the nearest are {', '.join(map(repr, near))}" if near else f"it has {dividable(found)}"
    return f"layouts has the pattern {pattern!r}, which fits no cell of the model; {hint}"
