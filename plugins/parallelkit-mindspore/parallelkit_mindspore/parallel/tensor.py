"""Tensor parallel: layers of a cell divided over the ranks of one axis, by layouts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping
from typing import Any, Final

import attrs
import mindspore as ms
from mindspore import mint, nn, ops

from parallelkit.errors import LayoutError, UnsupportedFeatureError
from parallelkit.patterns import grouped
from parallelkit.protocols import ProcessGroup
from parallelkit_mindspore.parallel.agreement import any_rank
from parallelkit_mindspore.parallel.divided import DividedEmbedding, DividedLinear
from parallelkit_mindspore.parallel.existing import refuse_optimizers
from parallelkit_mindspore.parallel.kept import carry, float_of
from parallelkit_mindspore.parallel.layouts import (
    EMBEDDING,
    STYLES,
    cells,
    check,
    divided_dim,
    resolve,
    weight_of,
)
from parallelkit_mindspore.tensors import dtype_name

#: dtypes that MindSpore's own AllReduce takes on the CPU.
_CPU_DTYPES: Final = ("float32", "float16")
#: How far gradients may be apart that ranks compute alike, relative to the largest.
_TOLERANCE: Final = 1e-4


@attrs.frozen(eq=False)
class Division:
    """What was divided.

    Attributes:
        model: the whole model; another cell than before if it was itself one layer.
        dims: of each divided parameter, by name.
        lines: for people.
    """

    model: nn.Cell
    dims: Mapping[str, int]
    lines: list[str]


def look(model: nn.Cell, layouts: Mapping[str, str] | None, degree: int) -> dict[str, str]:
    """Find the style of each layer that is divided; nothing is changed or sent.

    Raises:
        LayoutError: no layouts, or they do not fit the model, or a layer does not divide evenly.
        UnsupportedFeatureError: a dtype that cannot be reduced on this device.
        ContextOrderError: an optimiser holds a parameter that would be replaced.
    """
    if not layouts:
        raise LayoutError(
            f"tensor={degree} divides layers by your layouts: layouts={{'layers.*.up': 'colwise', "
            "'layers.*.down': 'rowwise'}"
        )
    found = cells(model)
    styles = resolve(layouts, found)
    check(model, styles, degree)
    replaced: list[Any] = []
    for name, style in styles.items():
        cell: Any = found[name]
        weight = weight_of(cell)
        computed = float_of(cell)
        if ms.get_context("device_target") == "CPU" and (
            dtype_name(weight) not in _CPU_DTYPES or computed == ms.bfloat16
        ):
            how = "" if computed is None else f", with to_float({computed})"
            raise UnsupportedFeatureError(
                f"layouts divides cell {name!r}, whose weight is {dtype_name(weight)}{how}; on "
                f"the CPU MindSpore reduces activations of {' and '.join(_CPU_DTYPES)} only"
            )
        bias = getattr(cell, "bias", None)
        replaced += [weight, bias] if bias is not None and style != "rowwise" else [weight]
    refuse_optimizers(replaced)
    return styles


def apply(model: nn.Cell, styles: Mapping[str, str], group: ProcessGroup) -> Division:
    """Divide the layers in `styles` over `group`, in place. Not collective.

    Parameters keep their names and are new objects: make the optimiser afterwards.
    """
    found = cells(model)
    dims: dict[str, int] = {}
    names = {id(parameter): name for name, parameter in model.parameters_and_names()}
    for name, style in styles.items():
        plain: Any = found[name]
        kind = DividedEmbedding if isinstance(plain, EMBEDDING) else DividedLinear
        part = kind(plain, style, group.native, group.rank, group.world_size)
        carry(plain, part)
        dims[names[id(weight_of(plain))]] = divided_dim(plain, style)
        bias = getattr(plain, "bias", None)
        if bias is not None and style != "rowwise":
            dims[names[id(bias)]] = 0
        if name:
            _replace(found.values(), plain, part)
        else:
            model = part
    for name, parameter in model.parameters_and_names():
        parameter.name = name  # containers put a prefix on what they are given
    return Division(model, dims, _lines(styles))


def check_whole(
    gradients: Mapping[str, Any], divided: Collection[str], group: ProcessGroup
) -> set[str]:
    """See that ranks got the same gradients for what is whole on each. Collective over `group`.

    Zeros are equal whatever was divided, as long as a weight behind them is zero, and so tell
    nothing yet; nor do infinities and NaN.

    Returns:
        The names whose gradients were compared: neither all zero nor without end. The same on
        every rank.

    Raises:
        LayoutError: on every rank, if they differ: a layer works on a part of the activations and
            holds its parameters whole.
    """
    whole = {name: g for name, g in gradients.items() if name not in divided and g.size}
    if not whole:
        return set()
    flat = [g.reshape(-1).astype(ms.float32) for g in whole.values()]
    largest = group.all_reduce(ops.stack([ops.abs(g).max() for g in flat]), "max").asnumpy()
    telling = [0.0 < float(size) < math.inf for size in largest]
    compared = dict(itertools.compress(zip(whole, flat, strict=True), telling))
    if not compared:
        return set()
    sizes = [int(mine.size) for mine in compared.values()]
    first = mint.split(group.broadcast(mint.cat(list(compared.values())), 0), sizes)
    wrong = None
    for (name, mine), other in zip(compared.items(), first, strict=True):
        apart = float(ops.abs(mine - other).max())
        if wrong is None and not apart <= _TOLERANCE * (float(ops.abs(other).max()) + 1e-6):
            wrong = name
    if any_rank(wrong is not None, group):
        which = f"the parameter {wrong!r}" if wrong else "a parameter, named on another rank,"
        raise LayoutError(
            f"{which} is whole on each rank of the tensor axis and got different gradients there: "
            "what it works on is divided. Divide it too, or end the divided part before it, with "
            "'rowwise' or 'colwise_gather'"
        )
    return set(compared)


def _replace(everything: Collection[nn.Cell], plain: nn.Cell, part: nn.Cell) -> None:
    """Put `part` in all places where `plain` is."""
    for parent in everything:
        keys = list(parent._cells)
        for place, key in enumerate(keys):
            if parent._cells[key] is not plain:
                continue
            if isinstance(parent, nn.SequentialCell | nn.CellList):
                parent[place] = part
            elif isinstance(parent, nn.CellDict):
                parent[key] = part
            else:
                setattr(parent, key, part)


def _lines(styles: Mapping[str, str]) -> list[str]:
    lines = []
    for shown, members in grouped(styles).items():
        hows = dict.fromkeys(STYLES[styles[member]] for member in members)
        count = f" ({len(members)})" if len(members) > 1 else ""
        lines.append(f"tensor: {shown or 'the model'}{count}: {'; '.join(hows)}")
    return lines
