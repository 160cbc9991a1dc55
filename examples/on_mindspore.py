"""What `train_resnet.py` needs of MindSpore; `on_torch.py` has the same for torch."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import Any

import mindspore as ms
from mindspore import Tensor, nn, ops
from resnet_mindspore import ResNet50

import parallelkit as pk


def seed(base: int) -> None:
    """Seed what draws a network's first values."""
    ms.set_seed(base)


def network(classes: int, args: argparse.Namespace) -> nn.Cell:
    return ResNet50(classes, args.blocks, args.norm, args.width)


def search(net: nn.Cell, args: argparse.Namespace) -> dict[str, Any]:
    """What mode auto looks at here: MindSpore searches as it compiles the first step."""
    return {"search_mode": "recursive_programming"}


def momentum(net: nn.Cell) -> nn.Cell:
    return nn.Momentum(net.trainable_params(), learning_rate=0.01, momentum=0.9)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return ops.cross_entropy(logits, labels.astype(ms.int32))


def accuracy(logits: Tensor, labels: Tensor) -> Tensor:
    """Share of the images that are labelled right."""
    return (logits.argmax(1) == labels).astype(ms.float32).mean()


def training(net: nn.Cell, flag: bool) -> None:
    """Let norms and such know whether the network is trained or asked."""
    net.set_train(flag)


def vector(values: Any, group: pk.ProcessGroup) -> Tensor:
    """Numbers as a float32 tensor: not every backend adds up float64."""
    return Tensor(values, ms.float32)


def statistics(net: nn.Cell) -> list[Tensor]:
    """Running means and variances of batch norms."""
    return [p for p in net.get_parameters() if "moving_" in p.name.rpartition(".")[2]]


def write(tensors: Iterable[Tensor], values: Sequence[Any]) -> None:
    """Set tensors to arrays, in place."""
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(Tensor(value))


def array(tensor: Tensor) -> Any:
    return tensor.asnumpy()


def move(batch: Sequence[Tensor], group: pk.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Images and labels: MindSpore moves them to its device by itself."""
    images, labels = batch
    return images, labels


def workers(count: int) -> dict[str, Any]:
    """Options of a loader with processes that make items."""
    return {"num_parallel_workers": count} if count else {}


def train_by_model(
    net: nn.Cell, loader: Any, optimizer: nn.Cell, *, sink: bool, most: int | None
) -> list[float]:
    """Train an epoch by MindSpore's own `Model`, at `most` so many steps; return the losses.

    It reduces gradients as the parallel context says, which was set before.
    """
    recorder = Recorder(most)
    model = ms.Model(net, loss_fn=Loss(), optimizer=optimizer)
    model.train(1, loader.native, callbacks=[recorder], dataset_sink_mode=sink)
    return recorder.losses


class Loss(nn.Cell):
    def construct(self, logits: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(logits, labels)


class Recorder(ms.train.Callback):
    """Keeps the loss of every step, and stops after the last one wanted."""

    def __init__(self, most: int | None) -> None:
        super().__init__()
        self._most = most
        self.losses: list[float] = []

    def on_train_step_end(self, run_context: Any) -> None:
        self.losses.append(float(run_context.original_args().net_outputs.asnumpy()))
        if len(self.losses) == self._most:
            run_context.request_stop()
