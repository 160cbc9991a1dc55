"""One training step, written for raw MindSpore in two ways, and for parallelkit in both.

Each arm builds the same model from the same values over the same batches, in a process whose group
is open and whose parallel context is set already: MindSpore has one for the process, and a second
group cannot be opened. So the raw arms read the very settings that a raw script would set. They
are MindSpore's own classes and functions and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import nn, ops

import parallelkit as pk

RANKS = 2
CLASSES = 64
BATCHES = 8

#: Which raw arm each is compared with; in this order. The second raw ones show how far the same
#: differs from itself.
ARMS = {
    "cell": "cell",
    "cell again": "cell",
    "parallelkit, cell": "cell",
    "step": "step",
    "step again": "step",
    "parallelkit, step": "step",
}


class Size(NamedTuple):
    """A model of `blocks` residual layers of `width`, and a rank's batch."""

    width: int
    blocks: int
    batch: int


#: Small: the step is all overhead. Large: gradients of 4 MB.
SIZES = {"small": Size(64, 4, 16), "large": Size(512, 4, 16)}


class Net(nn.Cell):
    """Residual layers between an input of `width` and logits of `CLASSES`."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.blocks = nn.CellList([nn.Dense(size.width, size.width) for _ in range(size.blocks)])
        self.head = nn.Dense(size.width, CLASSES)

    def construct(self, x: Any) -> Any:
        for block in self.blocks:
            x = x + ops.relu(block(x))
        return self.head(x)


class Loss(nn.Cell):
    def construct(self, logits: Any, labels: Any) -> Any:
        return ops.cross_entropy(logits, labels)


def cross_entropy(logits: Any, labels: Any) -> Any:
    return ops.cross_entropy(logits, labels)


class Trainer:
    """A model and its step, over batches that repeat."""

    def __init__(
        self, model: Any, batches: list[tuple[Any, Any]], step: Callable[[Any, Any], Any]
    ) -> None:
        self.model, self._batches, self._step = model, batches, step
        self._taken = 0

    def train(self, steps: int) -> None:
        """Take steps, and wait until they are done."""
        for _ in range(steps):
            self._step(*self._batches[self._taken % BATCHES])
            self._taken += 1
        self.weights()  # PyNative runs behind the caller

    def weights(self) -> Any:
        """All parameters in one vector; waits for them."""
        return np.concatenate([p.asnumpy().ravel() for p in self.model.trainable_params()])


def build(arm: str, size: Size, rank: int, context: pk.ParallelContext) -> Trainer:
    """Build an arm, in MindSpore's present mode. Collective."""
    random = np.random.RandomState(0)
    net = Net(size)
    for parameter in net.get_parameters():
        bound = size.width**-0.5
        values = random.uniform(-bound, bound, parameter.shape).astype(np.float32)
        parameter.asnumpy()[...] = values
    batches = []
    for _ in range(BATCHES):
        x = random.standard_normal((RANKS, size.batch, size.width)).astype(np.float32)
        y = random.randint(CLASSES, size=(RANKS, size.batch)).astype(np.int32)
        batches.append((ms.Tensor(x[rank]), ms.Tensor(y[rank])))
    graph = ms.get_context("mode") == ms.GRAPH_MODE
    if arm.startswith("parallelkit"):
        net = context.parallelize(net)
    net.set_train()
    optimizer = nn.Momentum(net.trainable_params(), learning_rate=0.01, momentum=0.9)
    if arm == "parallelkit, step":
        return Trainer(net, batches, with_train_step(net, optimizer, context))
    if ARMS[arm] == "cell":
        return Trainer(net, batches, nn.TrainOneStepCell(nn.WithLossCell(net, Loss()), optimizer))
    return Trainer(net, batches, by_hand(net, optimizer, graph=graph))


def by_hand(net: Any, optimizer: Any, *, graph: bool) -> Callable[[Any, Any], Any]:
    """The custom step of MindSpore's documentation."""

    def forward(x: Any, y: Any) -> Any:
        return cross_entropy(net(x), y)

    differentiate = ms.value_and_grad(forward, None, optimizer.parameters)
    reduced = nn.DistributedGradReducer(optimizer.parameters)

    def step(x: Any, y: Any) -> Any:
        loss, gradients = differentiate(x, y)
        optimizer(reduced(gradients))
        return loss

    return ms.jit(step) if graph else step


def with_train_step(
    net: Any, optimizer: Any, context: pk.ParallelContext
) -> Callable[[Any, Any], Any]:
    def step(x: Any, y: Any) -> Any:
        loss = context.train_step(net, x, y, loss=cross_entropy)
        context.apply_gradients(net, optimizer)
        return loss

    return step
