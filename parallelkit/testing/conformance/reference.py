"""The numbers that every backend must give: a small model in NumPy, in float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]

INPUTS: Final = 4
HIDDEN: Final = 8
OUTPUTS: Final = 3


def mean_squares(output: Any, target: Any) -> Any:
    """The loss of the suites: the mean over items and outputs of the squared difference."""
    difference = output - target
    return (difference * difference).mean()


def sum_squares(output: Any, target: Any) -> Any:
    """The same summed over items, the mean over outputs: for steps that weigh items."""
    difference = output - target
    return (difference * difference).sum() / OUTPUTS


def mean_output(output: Any, target: Any) -> Any:
    """The mean of the output alone."""
    return output.mean()


def mlp_weights(seed: int = 0) -> Arrays:
    """Weights of an MLP, float32, equal for equal seeds."""
    random = np.random.RandomState(seed)
    shapes = {
        "first.weight": (HIDDEN, INPUTS),
        "first.bias": (HIDDEN,),
        "second.weight": (OUTPUTS, HIDDEN),
        "second.bias": (OUTPUTS,),
    }
    return {name: random.randn(*shape).astype(np.float32) / 2 for name, shape in shapes.items()}


def tied_weights(seed: int = 0) -> Arrays:
    """Weights for an adapter's `tied` model."""
    random = np.random.RandomState(seed)
    shapes = {"embed.weight": (11, 6), "body.weight": (6, 6)}
    return {name: random.randn(*shape).astype(np.float32) for name, shape in shapes.items()}


def batch(items: int, seed: int = 1) -> tuple[Array, Array]:
    """Inputs and targets, float32."""
    random = np.random.RandomState(seed)
    inputs, targets = random.randn(items, INPUTS), random.randn(items, OUTPUTS)
    return inputs.astype(np.float32), targets.astype(np.float32)


class MLP:
    """Two linear layers with a rectifier between; its loss and gradients, and an optimiser
    with momentum, all in one process.

    No smoother function: frameworks' kernels of `tanh` differ by a few hundred-thousandths.

    Args:
        weights: as `mlp_weights` gives them; copied to float64.
    """

    def __init__(self, weights: Mapping[str, Array]) -> None:
        self.weights: Arrays = {name: w.astype(np.float64) for name, w in weights.items()}
        self._velocity: Arrays = {}

    def loss(self, inputs: Array, targets: Array) -> float:
        """`mean_squares` of the whole batch."""
        return float(mean_squares(self._forward(inputs)[1], targets))

    def gradients(self, inputs: Array, targets: Array) -> Arrays:
        """Gradients of `loss`, by name."""
        hidden, output = self._forward(inputs)
        above = 2 * (output - targets) / output.size
        below = (above @ self.weights["second.weight"]) * (hidden > 0)
        return {
            "first.weight": below.T @ inputs,
            "first.bias": below.sum(0),
            "second.weight": above.T @ hidden,
            "second.bias": above.sum(0),
        }

    def step(self, gradients: Mapping[str, Array], lr: float, momentum: float) -> None:
        """Take one optimiser step."""
        for name, gradient in gradients.items():
            before = self._velocity.get(name, np.zeros_like(gradient))
            self._velocity[name] = momentum * before + gradient
            self.weights[name] = self.weights[name] - lr * self._velocity[name]

    def _forward(self, inputs: Array) -> tuple[Array, Array]:
        wide = inputs.astype(np.float64)
        hidden = np.maximum(wide @ self.weights["first.weight"].T + self.weights["first.bias"], 0)
        return hidden, hidden @ self.weights["second.weight"].T + self.weights["second.bias"]
