"""Torch as the conformance suites of `parallelkit.testing.conformance` see it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

import numpy as np
import torch
from torch import Tensor, nn

from parallelkit.protocols import ParallelContext
from parallelkit.testing.conformance.adapter import Array
from parallelkit.testing.conformance.planted import Planted, prints
from parallelkit_torch import names

_WIDE: Final = {torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2}


class MLP(nn.Module):
    """`max(x, 0)` between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.second(torch.relu(self.first(x)))
        return output


class Scale(nn.Module):
    """One number times the input."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(value))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


class Tied(nn.Module):
    """An embedding whose weight is the head's, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.body = nn.Linear(6, 6, bias=False)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        output: Tensor = self.head(self.body(self.embed(ids)))
        return output


class Numbers(torch.utils.data.Dataset[Tensor]):
    """The integers from 0."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(index)


class TorchAdapter:
    """An `Adapter` for torch on the CPU."""

    framework: ClassVar[str] = "torch"
    manager = None
    reopens = True
    reduced = frozenset({"uint8", "int8", "int32", "int64"}) | {
        "float16", "bfloat16", "float32", "float64",
    }  # fmt: skip
    moved = reduced | {"bool", "int16", "complex64", "float8_e4m3fn"}
    model_dtypes = ("float32", "bfloat16", "float64")
    graph_options: Mapping[str, Any] = {"backend": "aot_eager"}

    def tensor(self, values: Array, dtype: str) -> Tensor:
        return torch.from_numpy(np.array(values)).to(getattr(torch, dtype))

    def array(self, tensor: Tensor) -> Array:
        plain = tensor.detach()
        return (plain.float() if plain.dtype in _WIDE else plain.clone()).numpy()

    def dtype(self, tensor: Tensor) -> str:
        return str(tensor.dtype).removeprefix("torch.")

    def mlp(self, weights: Mapping[str, Array], dtype: str = "float32") -> nn.Module:
        return _filled(MLP(), weights).to(getattr(torch, dtype))

    def scale(self, value: float) -> nn.Module:
        return Scale(value)

    def tied(self, weights: Mapping[str, Array]) -> nn.Module:
        return _filled(Tied(), weights)

    def momentum(self, model: nn.Module, lr: float, momentum: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)

    def parameters(self, model: nn.Module) -> dict[str, Array]:
        plain = names.unwrap(model)
        return {name: self.array(p) for name, p in plain.named_parameters()}

    def gradients(self, context: ParallelContext, model: nn.Module) -> dict[str, Array]:
        plain = names.unwrap(model)
        found = {name: p.grad for name, p in plain.named_parameters()}
        return {name: self.array(g) for name, g in found.items() if g is not None}

    def set_parameter(self, model: nn.Module, name: str, values: Array) -> None:
        with torch.no_grad():
            names.unwrap(model).get_parameter(name).copy_(torch.from_numpy(values))

    def retype(self, model: nn.Module) -> None:
        model.get_submodule("first").to(torch.float64)

    def dataset(self, count: int) -> Numbers:
        return Numbers(count)

    def numbers(self, batch: Any) -> list[int]:
        return [int(number) for number in batch.flatten()]

    def draw(self) -> float:
        return float(torch.rand(()))

    def global_mode(self) -> str:
        return str(torch._dynamo.eval_frame._stance.stance)

    def planted(self) -> Planted:
        return prints


def _filled(model: nn.Module, weights: Mapping[str, Array]) -> nn.Module:
    with torch.no_grad():
        for name, values in weights.items():
            model.get_parameter(name).copy_(torch.from_numpy(values))
    return model


adapter: Final = TorchAdapter()
