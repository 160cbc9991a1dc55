"""Gradients of one model between its train steps and the optimiser.

MindSpore's parameters have no `.grad`, so the context keeps them: those that are reduced over the
data axes, and those that wait for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, final

import mindspore as ms
from mindspore import nn, ops

from parallelkit.errors import (
    GradientError,
    NonFiniteGradientError,
    PlanError,
    UnsupportedFeatureError,
)
from parallelkit.protocols import ProcessGroup


@final
class Gradients:
    """Sums of gradients by parameter."""

    def __init__(self) -> None:
        self._reduced: dict[int, Any] = {}
        self._waiting: dict[int, Any] = {}

    def add(self, weights: Sequence[Any], gradients: Sequence[Any]) -> None:
        """Add what a backward pass gave here; it waits until `reduce`."""
        _add(self._waiting, dict(zip(map(id, weights), gradients, strict=True)))

    def reduce(self, collective: Callable[[list[Any]], list[Any]]) -> None:
        """Reduce what waits over the data axes. Collective if `collective` is.

        Args:
            collective: maps this rank's gradients to those of all.
        """
        found = collective(list(self._waiting.values()))
        _add(self._reduced, dict(zip(self._waiting, found, strict=True)))
        self._waiting.clear()

    def of(self, weights: Sequence[Any]) -> tuple[Any, ...]:
        """Gradients of these parameters; zeros where there are none.

        What was not reduced yet is in it, for this rank alone.
        """
        whole = dict(self._reduced)
        _add(whole, self._waiting)
        return tuple(
            whole[id(weight)] if id(weight) in whole else ops.zeros_like(weight)
            for weight in weights
        )

    def finished(self, weights: Sequence[Any], what: str) -> dict[int, Any]:
        """What is there for these parameters, whole over the data axes.

        Raises:
            GradientError: some of it was not reduced, or nothing is there.
        """
        wanted = set(map(id, weights))
        if wanted & set(self._waiting):
            raise GradientError(
                f"{what} got gradients of this rank alone: the last train_step had sync=False. "
                "Call it with sync=True for the last batch of an optimiser step"
            )
        found = {key: value for key, value in self._reduced.items() if key in wanted}
        if not found:
            raise GradientError(f"{what} has no gradients to use; call train_step before it")
        return found

    def replace(self, gradients: Mapping[int, Any]) -> None:
        """Put others in place of some that are finished."""
        self._reduced.update(gradients)

    def forget(self, weights: Collection[Any]) -> None:
        """Drop the gradients of these parameters."""
        for weight in weights:
            self._reduced.pop(id(weight), None)
            self._waiting.pop(id(weight), None)


def _add(into: dict[int, Any], more: Mapping[int, Any]) -> None:
    for key, value in more.items():
        into[key] = into[key] + value if key in into else value


def optimizer_parameters(optimizer: object, model: Mapping[str, Any]) -> tuple[Any, ...]:
    """The parameters that an optimiser steps, in the order in which it takes gradients.

    Args:
        model: the model's parameters by name.

    Raises:
        UnsupportedFeatureError: it is no optimiser of MindSpore's, of another model, or one of
            `mindspore.mint.optim` on the CPU.
    """
    if not isinstance(optimizer, nn.Optimizer | ms.experimental.optim.Optimizer):
        raise UnsupportedFeatureError(
            f"the optimizer is a {type(optimizer).__qualname__}; it is a mindspore.nn.Optimizer "
            "or one of mindspore.mint.optim or mindspore.experimental.optim"
        )
    in_mint = type(optimizer).__module__.startswith("mindspore.mint.")
    if in_mint and ms.get_context("device_target") == "CPU":
        name = type(optimizer).__qualname__
        raise UnsupportedFeatureError(
            f"mindspore.mint.optim.{name} does not work on the CPU: MindSpore has no kernels, "
            "and SGD and Adam leave the parameters as they are without an error. Use "
            "mindspore.nn or mindspore.experimental.optim"
        )
    held = tuple(optimizer.parameters)
    known = set(map(id, model.values()))
    strange = [parameter.name for parameter in held if id(parameter) not in known]
    if strange:
        raise UnsupportedFeatureError(
            f"the optimizer has {len(strange)} parameters that are not the model's, such as "
            f"{strange[0]!r}; build it from the model that parallelize gave back"
        )
    return held


def norm(
    gradients: Mapping[int, Any],
    divided: Collection[int],
    *,
    norm_type: float,
    group: ProcessGroup,
) -> Any:
    """The p-norm of all gradients over every shard. Collective over `group`: one number.

    Args:
        gradients: by parameter.
        divided: which of them are divided over `group`; the others are whole on each rank.
        norm_type: p, or infinity.
        group: the tensor axis.

    Returns:
        A float32 scalar, the same on every rank of `group`.
    """
    infinite = math.isinf(norm_type)
    parts: dict[bool, list[Any]] = {True: [], False: []}
    for key, gradient in gradients.items():
        if gradient.size:
            size = ops.abs(gradient.astype(ms.float32))
            parts[key in divided].append(size.max() if infinite else (size**norm_type).sum())
    found = {apart: _together(values, infinite) for apart, values in parts.items()}
    if infinite:
        largest = ops.maximum(found[True], found[False])
        return group.all_reduce(largest.reshape(1), "max")[0]
    # What all ranks hold alike counts as a fraction on each, so that all get the same number.
    power = found[True] + found[False] / group.world_size
    return group.all_reduce(power.reshape(1))[0] ** (1.0 / norm_type)


def _together(values: Sequence[Any], infinite: bool) -> Any:
    if not values:
        return ms.Tensor(0.0, ms.float32)
    together = ops.stack(list(values))
    return together.max() if infinite else together.sum()


def clip_grad_norm_(
    held: Gradients,
    trained: Sequence[Any],
    max_norm: float,
    *,
    divided: Collection[int],
    norm_type: float,
    error_if_nonfinite: bool,
    group: ProcessGroup,
) -> Any:
    """Scale gradients so that the norm of all, over every shard, is at most `max_norm`.

    Collective over `group`, the tensor axis; `norm` says how it is made.

    Args:
        trained: the parameters whose gradients count.
        max_norm: largest norm allowed; infinity scales nothing and only measures.

    Returns:
        The norm before scaling.

    Raises:
        PlanError: `max_norm` or `norm_type` is not a positive number.
        GradientError: there are no gradients, or some were not reduced.
        NonFiniteGradientError: on every rank alike; nothing was scaled.
    """
    for name, value in (("max_norm", max_norm), ("norm_type", norm_type)):
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise PlanError(f"{name} is {value!r}; it is a positive number")
    gradients = held.finished(trained, "clip_grad_norm_")
    total = norm(gradients, divided, norm_type=float(norm_type), group=group)
    found = float(total)
    if error_if_nonfinite and not math.isfinite(found):
        raise NonFiniteGradientError(
            f"the norm of the gradients is {found}, and nothing was scaled; with "
            "error_if_nonfinite=False they are scaled all the same"
        )
    factor = max_norm / (found + 1e-6)
    if not factor >= 1.0:  # nor if it is no number
        held.replace({key: gradient * factor for key, gradient in gradients.items()})
    return total
