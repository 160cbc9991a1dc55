"""A batch of a pipeline: its inputs, its loss, and what a schedule for it depends on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import attrs
import torch

from parallelkit.errors import DataShardError
from parallelkit_torch.parallel.activations import Shape

Loss = Callable[[Any, Any], torch.Tensor]
#: Arguments of torch's schedules, among which those of the model go.
_RESERVED: Final = frozenset({"target", "losses", "return_outputs", "loss_kwargs"})


@attrs.define
class Batch:
    """What the batch in progress needs on this rank.

    Attributes:
        loss: the user's.
        targets: by microbatch.
        factor: each microbatch's loss is multiplied with it.
        failure: what the user's code raised, and where.
    """

    loss: Loss
    targets: list[Any]
    factor: float
    failure: tuple[Exception, str] | None = None


def loss_name(loss: Loss) -> str:
    """The loss by name, as far as it has one: enough to notice that ranks use two."""
    return getattr(loss, "__qualname__", type(loss).__qualname__)


def split_inputs(
    inputs: Any, device: torch.device
) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
    """What the first stage takes by position, and what every stage takes by name, on `device`.

    Raises:
        DataShardError: something is no tensor, nothing is there, or a name is taken.
    """
    if isinstance(inputs, Mapping) and inputs:
        (_, first), *rest = inputs.items()
        arguments, named = (first,), dict(rest)
    else:
        arguments = inputs if isinstance(inputs, tuple) else (inputs,)
        named = {}
    for x in (*arguments, *named.values()):
        if not isinstance(x, torch.Tensor):
            raise DataShardError(
                f"inputs of a pipeline hold a {type(x).__qualname__}; they are a tensor, a tuple "
                "of tensors, or a mapping of names to tensors"
            )
    reserved = _RESERVED & set(named)
    if reserved:
        raise DataShardError(f"inputs of a pipeline cannot be called {', '.join(sorted(reserved))}")
    if not arguments:
        raise DataShardError("inputs of a pipeline are empty; the first stage needs a tensor")
    moved = tuple(x.to(device) for x in arguments)
    return moved, {name: x.to(device) for name, x in named.items()}


def key_of(
    arguments: Sequence[torch.Tensor],
    named: Mapping[str, torch.Tensor],
    parts: int,
    training: bool,
    backward: bool,
    device: torch.device,
) -> tuple[Any, ...]:
    """All that a schedule and the shapes between its stages depend on."""
    auto = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    return (
        tuple(tuple(Shape.of(x)) for x in arguments),
        tuple((name, *Shape.of(x)) for name, x in named.items()),
        parts,
        training,
        backward,
        auto,
    )
