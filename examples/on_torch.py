"""What `train_resnet.py` needs of torch; `on_mindspore.py` has the same for MindSpore."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from resnet import ResNet50
from torch import Tensor, nn

import parallelkit as pk


def seed(base: int) -> None:
    """Seed what draws a network's first values."""
    torch.manual_seed(base)


def network(classes: int, args: argparse.Namespace) -> nn.Module:
    return ResNet50(classes, args.blocks, args.norm, args.width)


def search(net: nn.Module, args: argparse.Namespace) -> dict[str, Any]:
    """What mode auto looks at here. A ResNet has no blocks of one kind to make stages of."""
    example = torch.zeros(args.batch, 3, args.size, args.size)
    return {"model": net, "example": example, "optimizer": "momentum", "pipeline": 1, "tensor": 1}


def momentum(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits, labels)


def accuracy(logits: Tensor, labels: Tensor) -> Tensor:
    """Share of the images that are labelled right."""
    return (logits.argmax(1) == labels).float().mean()


def training(net: nn.Module, flag: bool) -> None:
    """Let norms and such know whether the network is trained or asked."""
    net.train(flag)


def vector(values: Any, group: pk.ProcessGroup) -> Tensor:
    """Numbers as a float64 tensor, where the group's tensors are."""
    return torch.tensor(values, dtype=torch.float64, device=group.device)


def statistics(net: nn.Module) -> list[Tensor]:
    """Running means and variances of batch norms."""
    return [buffer for buffer in net.buffers() if buffer.is_floating_point()]


def write(tensors: Iterable[Tensor], values: Sequence[Any]) -> None:
    """Set tensors to arrays."""
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(torch.from_numpy(value))


def array(tensor: Tensor) -> Any:
    return np.asarray(tensor.detach().cpu())


def move(batch: Sequence[Tensor], group: pk.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Images and labels, where the network is."""
    images, labels = (column.to(group.device) for column in batch)
    return images, labels


def workers(count: int) -> dict[str, Any]:
    """Options of a loader with processes that make items."""
    return {"num_workers": count}
