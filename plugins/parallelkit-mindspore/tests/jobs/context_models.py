"""Models, batches and comparisons of the jobs about parallel contexts."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn, ops

warnings.filterwarnings("ignore", "getName")  # MindSpore's own, at exit

ITEMS, LENGTH, VOCAB = 8, 6, 16
MODES = {"eager": ms.PYNATIVE_MODE, "graph": ms.GRAPH_MODE}


class Mlp(nn.Cell):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Dense(6, 8, activation="tanh")
        self.down = nn.Dense(8, 8)
        self.head = nn.Dense(8, 4, has_bias=False)

    def construct(self, x: Any) -> Any:
        return self.head(self.down(self.up(x)))


class Tokens(nn.Cell):  # type: ignore[misc]
    """A layer over tokens; logits are whole."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 8)
        self.norm = nn.LayerNorm((8,))
        self.up = nn.Dense(8, 16)
        self.down = nn.Dense(16, 8)
        self.head = nn.Dense(8, VOCAB)

    def construct(self, x: Any) -> Any:
        hidden = self.embed(x)
        hidden = hidden + self.down(ops.relu(self.up(self.norm(hidden))))
        return ops.reshape(self.head(hidden), (-1, VOCAB))


class Images(nn.Cell):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3, pad_mode="same", has_bias=True)
        self.pool = nn.MaxPool2d(2, 2)
        self.flat = nn.Flatten()
        self.head = nn.Dense(27, 4)

    def construct(self, x: Any) -> Any:
        return self.head(self.flat(self.pool(ops.relu(self.conv(x)))))


KINDS = {"mlp": Mlp, "tokens": Tokens, "images": Images}
#: How each kind of model is divided over a tensor axis.
LAYOUTS = {
    "mlp": {"up": "colwise", "down": "rowwise", "head": "colwise_gather"},
    "tokens": {"embed": "rowwise", "up": "colwise", "down": "rowwise", "head": "colwise_gather"},
    "columns": {"embed": "colwise_gather", "head": "colwise_gather"},
}


def build(kind: str, seed: int) -> nn.Cell:
    """A model whose values depend on `seed`; names are always the same."""
    model = KINDS[kind]()
    random = np.random.RandomState(seed)
    for parameter in model.get_parameters():
        values = random.uniform(-0.5, 0.5, parameter.shape).astype(np.float32)
        parameter.asnumpy()[...] = values
    model.set_train()
    return model


def batch(kind: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    random = np.random.RandomState(7)
    if kind == "tokens":
        tokens = random.randint(0, VOCAB, (ITEMS, LENGTH + 1)).astype(np.int32)
        return tokens[:, :-1].copy(), tokens[:, 1:].copy()
    shape = (ITEMS, 6) if kind == "mlp" else (ITEMS, 1, 6, 6)
    x = random.uniform(-1, 1, shape).astype(np.float32)
    return x, random.randint(0, 4, ITEMS).astype(np.int32)


MEAN = nn.CrossEntropyLoss()
_sum = nn.CrossEntropyLoss(reduction="sum")


def mean_loss(output: Any, target: Any) -> Any:
    return MEAN(output, ops.reshape(target, (-1,)))


def sum_loss(output: Any, target: Any) -> Any:
    return _sum(output, ops.reshape(target, (-1,)))


def half_loss(output: Any, target: Any) -> Any:
    return mean_loss(output, target) / 2


class Reference:
    """One process with the whole model and the whole batch: momentum by hand, in NumPy."""

    def __init__(self, kind: str, rate: float = 0.1) -> None:
        self.model = build(kind, seed=0)
        self.gradients = [np.zeros(p.shape, np.float32) for p in self.model.trainable_params()]
        self._moments = [np.zeros_like(g) for g in self.gradients]
        self._rate = rate

    def add(self, x: np.ndarray[Any, Any], y: np.ndarray[Any, Any], loss: Any) -> float:
        """Add the gradients of one batch; return its loss."""

        def forward(inputs: Any, target: Any) -> Any:
            return loss(self.model(inputs), target)

        weights = self.model.trainable_params()
        with _eager():
            value, found = ms.value_and_grad(forward, None, weights)(ms.Tensor(x), ms.Tensor(y))
        for total, new in zip(self.gradients, found, strict=True):
            total += new.asnumpy()
        return float(value)

    def norm(self) -> float:
        return float(np.sqrt(sum(np.sum(np.square(g, dtype=np.float64)) for g in self.gradients)))

    def scale(self, factor: float) -> None:
        for total in self.gradients:
            total *= factor

    def step(self, factor: float = 1.0) -> None:
        """Momentum 0.9, as `nn.Momentum` has it, with gradients times `factor`; forget them."""
        weights = self.model.trainable_params()
        for weight, total, moment in zip(weights, self.gradients, self._moments, strict=True):
            moment *= 0.9
            moment += total * factor
            weight.asnumpy()[...] -= self._rate * moment
            total[...] = 0


class _eager:
    def __enter__(self) -> None:
        self._before = ms.get_context("mode")
        ms.set_context(mode=ms.PYNATIVE_MODE)

    def __exit__(self, *exc: object) -> None:
        ms.set_context(mode=self._before)


def part(whole: np.ndarray[Any, Any], shape: Sequence[int], rank: int) -> np.ndarray[Any, Any]:
    """This rank's part of a value that may be divided in one dim."""
    for dim, size in enumerate(shape):
        if whole.shape[dim] != size:
            return whole.take(range(rank * size, (rank + 1) * size), axis=dim)
    return whole


def close(
    actual: Iterable[Any], expected: Iterable[Any], what: str, *, rank: int = 0, atol: float = 1e-6
) -> None:
    """Compare tensors with whole arrays, to `atol`."""
    for number, (mine, whole) in enumerate(zip(actual, expected, strict=True)):
        value = mine.asnumpy()
        np.testing.assert_allclose(
            value, part(np.asarray(whole), value.shape, rank), rtol=0, atol=atol,
            err_msg=f"{what}, number {number}",
        )  # fmt: skip
