"""What a backend gives the suites: its tensors, three small models, and what only it can tell."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np

from parallelkit.errors import PluginContractError
from parallelkit.loader import PluginManager
from parallelkit.protocols import ParallelContext
from parallelkit.testing.conformance.planted import Planted

Array = np.ndarray[Any, Any]
Tensor = Any


@runtime_checkable
class Adapter(Protocol):
    """One backend, as the suites see it. Everything is on the CPU.

    dtypes are named as in manifests: `"float32"`, `"bfloat16"`, `"bool"`.
    """

    @property
    def framework(self) -> str:
        """What `init_process_group(framework=...)` is given."""

    @property
    def manager(self) -> PluginManager | None:
        """The plugins to use; None: those that are installed."""

    @property
    def reopens(self) -> bool:
        """Whether a process can open a second group after the first was closed."""

    @property
    def reduced(self) -> frozenset[str]:
        """dtypes that `all_reduce` and `reduce_scatter` add."""

    @property
    def moved(self) -> frozenset[str]:
        """dtypes that `broadcast` and `all_gather` carry, bit for bit."""

    @property
    def model_dtypes(self) -> tuple[str, ...]:
        """dtypes that its models can have, float32 and float64 among them."""

    @property
    def graph_options(self) -> Mapping[str, Any]:
        """Options of graph mode that make the suite quick; usually none."""

    # --- tensors

    def tensor(self, values: Array, dtype: str) -> Tensor:
        """Make a tensor of the values, converted to `dtype`, with the array's shape."""

    def array(self, tensor: Tensor) -> Array:
        """Copy a tensor to an array; what NumPy has no dtype for comes as float32."""

    def dtype(self, tensor: Tensor) -> str:
        """The dtype's name."""

    # --- models: parameters have the names and shapes of the arrays given

    def mlp(self, weights: Mapping[str, Array], dtype: str = "float32") -> Any:
        """Make linear layers `first` and `second`, `max(x, 0)` between them: `reference.MLP`."""

    def scale(self, value: float) -> Any:
        """Make a model with one scalar float32 parameter `weight` that gives `weight * x`."""

    def tied(self, weights: Mapping[str, Array]) -> Any:
        """Make `embed.weight` and `head.weight`, one parameter, with a `body.weight` between.

        `weights` has `embed.weight` and `body.weight`. Inputs are token ids.
        """

    def momentum(self, model: Any, lr: float, momentum: float) -> Any:
        """An optimiser: `velocity = momentum * velocity + gradient; weight -= lr * velocity`."""

    def parameters(self, model: Any) -> dict[str, Array]:
        """Copy the parameters, by plain name."""

    def gradients(self, context: ParallelContext, model: Any) -> dict[str, Array]:
        """Copy the gradients of the train steps since the last `apply_gradients`, by plain name.

        Where there was no step they are left out, or zero.
        """

    def set_parameter(self, model: Any, name: str, values: Array) -> None:
        """Write a parameter in place."""

    def retype(self, model: Any) -> None:
        """Change some parameter of an `mlp` to another dtype, name and shape as before."""

    # --- data, chance, modes

    def dataset(self, count: int) -> Any:
        """A data set of the integers from 0 to `count`."""

    def numbers(self, batch: Any) -> list[int]:
        """The integers in a batch of a loader over `dataset`."""

    def draw(self) -> float:
        """Draw a number from the framework's default generator."""

    def global_mode(self) -> Any:
        """Whatever an execution mode's block changes, as a comparable value."""

    def planted(self) -> Planted:
        """A function that graph mode cannot take whole; see `planted`."""


def load(reference: str) -> Adapter:
    """Import an adapter from `"package.module:name"`.

    Raises:
        PluginContractError: it is not written so, or what is found there lacks members.
    """
    module, _, name = reference.partition(":")
    if not module or not name:
        raise PluginContractError(f"adapter is {reference!r}; it is written 'package.module:name'")
    found = getattr(importlib.import_module(module), name, None)
    if not isinstance(found, Adapter):
        members = [m for m in dir(Adapter) if not m.startswith("_")]
        missing = [m for m in members if not hasattr(found, m)]
        raise PluginContractError(f"{reference} is no Adapter: it lacks {', '.join(missing)}")
    return found
