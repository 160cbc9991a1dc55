"""ResNet-50, with the names and shapes of torchvision's, so that weights saved there load here."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

#: Channels out of a block for each of its width.
EXPANSION = 4
#: Blocks of each stage of ResNet-50.
BLOCKS = (3, 4, 6, 3)

Norm = Callable[[int], nn.Module]


class ResNet50(nn.Module):
    """Images [batch, 3, height, width] to logits [batch, classes]; 25,557,032 parameters at 1000.

    The variant "v1.5": a stage's stride is in its 3x3 convolution. Any size of image from 32 on.

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
        self.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = norm_of(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = stage(width, width, norm_of, blocks=blocks[0], stride=1)
        self.layer2 = stage(4 * width, 2 * width, norm_of, blocks=blocks[1], stride=2)
        self.layer3 = stage(8 * width, 4 * width, norm_of, blocks=blocks[2], stride=2)
        self.layer4 = stage(16 * width, 8 * width, norm_of, blocks=blocks[3], stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(32 * width, classes)
        self.apply(initialise)
        for block in self.modules():
            if norm == "group" and isinstance(block, Bottleneck):
                nn.init.zeros_(block.bn3.weight)

    def forward(self, images: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(self.avgpool(x).flatten(1))
        return logits


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions, added to what came in."""

    def __init__(self, channels: int, width: int, stride: int, norm_of: Norm) -> None:
        super().__init__()
        out = width * EXPANSION
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = norm_of(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = norm_of(width)
        self.conv3 = nn.Conv2d(width, out, 1, bias=False)
        self.bn3 = norm_of(out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or channels != out:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels, out, 1, stride=stride, bias=False), norm_of(out)
            )

    def forward(self, x: Tensor) -> Tensor:
        kept = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)))
        out: Tensor = self.relu(self.bn3(self.conv3(x)) + kept)
        return out


def stage(channels: int, width: int, norm_of: Norm, *, blocks: int, stride: int) -> nn.Sequential:
    """Blocks in a row, the first of which takes `channels` and strides."""
    rest = [Bottleneck(width * EXPANSION, width, 1, norm_of) for _ in range(blocks - 1)]
    return nn.Sequential(Bottleneck(channels, width, stride, norm_of), *rest)


def group_norm(channels: int) -> nn.Module:
    """Normalise each image by itself, over all channels together."""
    return nn.GroupNorm(1, channels)


def initialise(module: nn.Module) -> None:
    """Initialise as torchvision does: convolutions by He et al. (2015), the rest as torch does."""
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
