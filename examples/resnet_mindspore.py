"""The network of `resnet.py` in MindSpore: the same structure, the same names of attributes.

Its parameters have MindSpore's names for a norm's (`gamma`, `beta`), which parallelkit takes for
torch's (`weight`, `bias`) wherever weights cross.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mindspore import Tensor, nn
from mindspore.common.initializer import Constant, HeNormal

#: Channels out of a block for each of its width.
EXPANSION = 4
#: Blocks of each stage of ResNet-50.
BLOCKS = (3, 4, 6, 3)

Norm = Callable[..., nn.Cell]


class ResNet50(nn.Cell):
    """Images [batch, 3, height, width] to logits [batch, classes]; 25,557,032 parameters at 1000.

    Args:
        classes: how many.
        blocks: of each of the four stages; fewer for a smaller network.
        norm: `"batch"`, or `"group"`: no statistics of a batch, and every block begins as the
            identity, which keeps rounding small enough to compare frameworks by.
        width: channels in the first stage.
    """

    def __init__(
        self,
        classes: int = 1000,
        blocks: Sequence[int] = BLOCKS,
        norm: str = "batch",
        width: int = 64,
    ) -> None:
        super().__init__()
        norm_of: Norm = nn.BatchNorm2d if norm == "batch" else group_norm
        self.conv1 = convolution(3, width, 7, stride=2)
        self.bn1 = norm_of(width)
        self.relu = nn.ReLU()
        self.maxpool = nn.MaxPool2d(3, stride=2, pad_mode="pad", padding=1)
        self.layer1 = stage(width, width, norm_of, blocks=blocks[0], stride=1)
        self.layer2 = stage(4 * width, 2 * width, norm_of, blocks=blocks[1], stride=2)
        self.layer3 = stage(8 * width, 4 * width, norm_of, blocks=blocks[2], stride=2)
        self.layer4 = stage(16 * width, 8 * width, norm_of, blocks=blocks[3], stride=2)
        self.fc = nn.Dense(32 * width, classes)

    def construct(self, images: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(x.mean((2, 3)))


class Bottleneck(nn.Cell):
    """1x1, 3x3 and 1x1 convolutions, added to what came in."""

    def __init__(self, channels: int, width: int, stride: int, norm_of: Norm) -> None:
        super().__init__()
        out = width * EXPANSION
        self.conv1 = convolution(channels, width, 1)
        self.bn1 = norm_of(width)
        self.conv2 = convolution(width, width, 3, stride=stride)
        self.bn2 = norm_of(width)
        self.conv3 = convolution(width, out, 1)
        self.bn3 = norm_of(out, gamma_init=0.0) if norm_of is group_norm else norm_of(out)
        self.relu = nn.ReLU()
        self.downsample = None
        if stride != 1 or channels != out:
            self.downsample = nn.SequentialCell(
                convolution(channels, out, 1, stride=stride), norm_of(out)
            )

    def construct(self, x: Tensor) -> Tensor:
        kept = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)))
        return self.relu(self.bn3(self.conv3(x)) + kept)


def stage(
    channels: int, width: int, norm_of: Norm, *, blocks: int, stride: int
) -> nn.SequentialCell:
    """Blocks in a row, the first of which takes `channels` and strides."""
    rest = [Bottleneck(width * EXPANSION, width, 1, norm_of) for _ in range(blocks - 1)]
    return nn.SequentialCell(Bottleneck(channels, width, stride, norm_of), *rest)


def convolution(channels: int, out: int, size: int, *, stride: int = 1) -> nn.Conv2d:
    """A convolution as torch pads it, initialised by He et al. (2015) as torchvision does."""
    padding: dict[str, Any] = {"pad_mode": "pad", "padding": size // 2}
    init = HeNormal(mode="fan_out", nonlinearity="relu")
    return nn.Conv2d(
        channels, out, size, stride=stride, has_bias=False, weight_init=init, **padding
    )


def group_norm(channels: int, gamma_init: float = 1.0) -> nn.Cell:
    """Normalise each image by itself, over all channels together."""
    return nn.GroupNorm(1, channels, gamma_init=Constant(gamma_init))
