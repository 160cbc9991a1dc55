"""ResNet-50, with the names and shapes of torchvision's, so that weights saved there load here."""

from __future__ import annotations

from torch import Tensor, nn

#: Channels out of a block for each of its width.
EXPANSION = 4


class ResNet50(nn.Module):
    """Images [batch, 3, height, width] to logits [batch, classes]; 25,557,032 parameters at 1000.

    The variant "v1.5": a stage's stride is in its 3x3 convolution. Any size of image from 32 on.
    """

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = stage(64, 64, blocks=3, stride=1)
        self.layer2 = stage(256, 128, blocks=4, stride=2)
        self.layer3 = stage(512, 256, blocks=6, stride=2)
        self.layer4 = stage(1024, 512, blocks=3, stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(2048, classes)
        self.apply(initialise)

    def forward(self, images: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(self.avgpool(x).flatten(1))
        return logits


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions, added to what came in."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = width * EXPANSION
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, out, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or channels != out:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels, out, 1, stride=stride, bias=False), nn.BatchNorm2d(out)
            )

    def forward(self, x: Tensor) -> Tensor:
        kept = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)))
        out: Tensor = self.relu(self.bn3(self.conv3(x)) + kept)
        return out


def stage(channels: int, width: int, *, blocks: int, stride: int) -> nn.Sequential:
    """Blocks in a row, the first of which takes `channels` and strides."""
    rest = [Bottleneck(width * EXPANSION, width, 1) for _ in range(blocks - 1)]
    return nn.Sequential(Bottleneck(channels, width, stride), *rest)


def initialise(module: nn.Module) -> None:
    """Initialise as torchvision does: convolutions by He et al. (2015), the rest as torch does."""
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
