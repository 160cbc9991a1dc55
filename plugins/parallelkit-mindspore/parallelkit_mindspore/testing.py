"""MindSpore as the conformance suites of `parallelkit.testing.conformance` see it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

import mindspore as ms
import numpy as np
from mindspore import mint, nn, ops

from parallelkit.protocols import ParallelContext
from parallelkit.testing.conformance.adapter import Array
from parallelkit.testing.conformance.planted import Planted, tries
from parallelkit_mindspore import names, tensors

#: dtypes that NumPy has no counterpart of.
_WIDE: Final = ("bfloat16",)


class MLP(nn.Cell):  # type: ignore[misc]
    """`max(x, 0)` between two linear layers."""

    def __init__(self, dtype: Any) -> None:
        super().__init__()
        self.first = mint.nn.Linear(4, 8, dtype=dtype)
        self.second = mint.nn.Linear(8, 3, dtype=dtype)

    def construct(self, x: Any) -> Any:
        return self.second(mint.nn.functional.relu(self.first(x)))


class Scale(nn.Cell):  # type: ignore[misc]
    """One number times the input."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = ms.Parameter(ms.Tensor(value, ms.float32), name="weight")

    def construct(self, x: Any) -> Any:
        return self.weight * x


class Tied(nn.Cell):  # type: ignore[misc]
    """An embedding whose table is the head's weight, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.body = mint.nn.Linear(6, 6, bias=False)
        self.head = mint.nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.embedding_table

    def construct(self, ids: Any) -> Any:
        return self.head(self.body(self.embed(ids)))


class MindSporeAdapter:
    """An `Adapter` for MindSpore on the CPU."""

    framework: ClassVar[str] = "mindspore"
    manager = None
    reopens = False  # MindSpore's collectives fail after a second init
    reduced = frozenset({"uint8", "int8", "int32", "int64"}) | {
        "float16", "bfloat16", "float32", "float64",
    }  # fmt: skip
    moved = reduced | {"bool", "int16", "complex64"}
    model_dtypes = ("float32", "bfloat16", "float64")
    graph_options: Mapping[str, Any] = {}

    def tensor(self, values: Array, dtype: str) -> Any:
        direct = "float32" if dtype in _WIDE else dtype
        array = np.ascontiguousarray(values, dtype=direct).reshape(np.shape(values))
        made = tensors.from_bytes(array.tobytes(), direct, array.shape)
        return made.astype(tensors.dtype_of(dtype)) if dtype != direct else made

    def array(self, tensor: Any) -> Array:
        wide = tensor.astype(ms.float32) if tensors.dtype_name(tensor) in _WIDE else tensor
        return np.array(wide.asnumpy())

    def dtype(self, tensor: Any) -> str:
        return tensors.dtype_name(tensor)

    def mlp(self, weights: Mapping[str, Array], dtype: str = "float32") -> nn.Cell:
        return self._filled(MLP(tensors.dtype_of(dtype)), weights)

    def scale(self, value: float) -> nn.Cell:
        return Scale(value)

    def tied(self, weights: Mapping[str, Array]) -> nn.Cell:
        return self._filled(Tied(), weights)

    def momentum(self, model: nn.Cell, lr: float, momentum: float) -> Any:
        return nn.Momentum(model.trainable_params(), lr, momentum)

    def parameters(self, model: nn.Cell) -> dict[str, Array]:
        return {slot.name: self.array(slot.tensor) for slot in names.slots(model)}

    def gradients(self, context: ParallelContext, model: nn.Cell) -> dict[str, Array]:
        held: Any = context
        found = held.gradients(model)
        if not found:
            return {}
        tied_first = reversed(list(names.slots(model)))  # of several names the first stays
        plain = {id(slot.tensor): slot.name for slot in tied_first}
        parameters = model.trainable_params()
        return {plain[id(p)]: self.array(g) for p, g in zip(parameters, found, strict=True)}

    def set_parameter(self, model: nn.Cell, name: str, values: Array) -> None:
        parameter = {slot.name: slot.tensor for slot in names.slots(model)}[name]
        parameter.copy_(self.tensor(values, tensors.dtype_name(parameter)))

    def retype(self, model: nn.Cell) -> None:
        wide = self.tensor(self.array(model.first.weight), "float64")
        model.first.weight = ms.Parameter(wide, name="first.weight")

    def dataset(self, count: int) -> Any:
        return ms.dataset.NumpySlicesDataset(
            np.arange(count, dtype=np.int32), ["number"], shuffle=False
        )

    def numbers(self, batch: Any) -> list[int]:
        column = batch[0] if isinstance(batch, list | tuple) else batch
        return [int(number) for number in column.asnumpy().flatten()]

    def draw(self) -> float:
        return float(ops.rand(1).asnumpy()[0])

    def global_mode(self) -> int:
        return int(ms.get_context("mode"))

    def planted(self) -> Planted:
        return tries

    def _filled(self, model: nn.Cell, weights: Mapping[str, Array]) -> nn.Cell:
        for name, values in weights.items():
            self.set_parameter(model, name, values)
        return model


adapter: Final = MindSporeAdapter()
