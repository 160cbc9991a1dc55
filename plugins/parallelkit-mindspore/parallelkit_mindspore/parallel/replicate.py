"""The same model on every rank: names compared, and rank 0's values taken."""

from __future__ import annotations

from typing import Any

from mindspore import nn

from parallelkit.errors import UnsupportedFeatureError
from parallelkit.protocols import ProcessGroup
from parallelkit_mindspore import runtime
from parallelkit_mindspore.parallel import autograd
from parallelkit_mindspore.parallel.agreement import agree
from parallelkit_mindspore.parallel.fused import fused
from parallelkit_mindspore.tensors import dtype_name


def parameters(model: nn.Cell) -> dict[str, Any]:
    """All parameters by name, those of statistics and frozen ones included; tied ones once."""
    return dict(model.parameters_and_names())


def check_same(model: nn.Cell, group: ProcessGroup) -> None:
    """Compare names, shapes, dtypes and what is trained over all ranks. Collective.

    Raises:
        RankMismatchError: on every rank, with the differences.
    """
    lines = [
        f"{name}: {dtype_name(p)} {list(p.shape)}{'' if p.requires_grad else ' frozen'}"
        for name, p in parameters(model).items()
    ]
    agree(lines, group, "models")


def synchronise(model: nn.Cell, group: ProcessGroup) -> None:
    """Give every rank rank 0's values, in place: memory stays where it is. Collective."""
    held = list(parameters(model).values())
    with autograd.unrecorded():
        values = fused(held, lambda flat: group.broadcast(flat, 0))
        if group.rank:
            for parameter, value in zip(held, values, strict=True):
                if parameter.size:
                    parameter.copy_(value)
            runtime.synchronize()


def refuse(model: object) -> None:
    """Raise for what cannot be spread, whatever the plan.

    Raises:
        UnsupportedFeatureError: it is no cell, or has parameters without values.
    """
    if not isinstance(model, nn.Cell):
        raise UnsupportedFeatureError(
            f"parallelize got a {type(model).__qualname__}; it takes a mindspore.nn.Cell"
        )
    empty = [name for name, p in parameters(model).items() if p.has_init]
    if empty:
        raise UnsupportedFeatureError(
            f"parallelize got a cell whose parameter {empty[0]!r} has no values yet; call "
            "cell.init_parameters_data() first: only rank 0's values count"
        )
