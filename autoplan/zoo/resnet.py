"""Residual networks for image classification, with batch normalisation.

Sizes: He et al., arXiv 1512.03385, table 1; wide variants: Zagoruyko and Komodakis, arXiv 1605.07146
(twice the inner width of each bottleneck).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from autoplan.zoo.preset import Inputs


@dataclass(frozen=True)
class ResNetConfig:
    """Sizes of a ResNet.

    ``blocks``: residual blocks of each group; a group after the first halves the image and doubles the
    channels.  ``expansion``: output over inner channels of a bottleneck, 1 for the basic block.
    """

    blocks: tuple[int, ...]
    expansion: int
    channels: int = 64
    widening: int = 1
    image: int = 224
    classes: int = 1000

    @property
    def sequence(self) -> None:
        return None

    def model(self) -> nn.Module:
        return ResNet(self)

    def inputs(self, make: Inputs) -> dict[str, Tensor]:
        images = make.floats(3, self.image, self.image)
        return {"images": images} | ({"labels": make.integers(self.classes)} if make.labels else {})


def convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    """A convolution that keeps the image's size (over ``stride``), and its batch normalisation."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False), nn.BatchNorm2d(outputs)
    )


class Residual(nn.Module):
    """A basic block (two 3x3 convolutions) or a bottleneck (1x1, 3x3, 1x1), and the way around it."""

    def __init__(self, inputs: int, inner: int, outputs: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        shapes = (
            [(inputs, inner, 1, 1), (inner, inner, 3, stride), (inner, outputs, 1, 1)]
            if bottleneck
            else [(inputs, outputs, 3, stride), (outputs, outputs, 3, 1)]
        )
        self.convolutions = nn.ModuleList(convolution(*shape) for shape in shapes)
        changes = stride != 1 or inputs != outputs
        self.shortcut = convolution(inputs, outputs, 1, stride) if changes else nn.Identity()

    def forward(self, x_BCHW: Tensor) -> Tensor:
        y_BCHW = x_BCHW
        for apply in self.convolutions[:-1]:
            y_BCHW = F.relu(apply(y_BCHW))
        return F.relu(self.convolutions[-1](y_BCHW) + self.shortcut(x_BCHW))


class ResNet(nn.Module):
    """images ``[B, 3, height, width]`` to logits ``[B, classes]``; with labels ``[B]`` to the mean loss."""

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        self.stem = convolution(3, config.channels, 7, stride=2)
        layers: list[nn.Module] = []
        inputs = config.channels
        for group, count in enumerate(config.blocks):
            inner = config.channels << group
            for block in range(count):
                stride = 2 if group and block == 0 else 1
                outputs = inner * config.expansion
                layers.append(Residual(inputs, inner * config.widening, outputs, stride, config.expansion > 1))
                inputs = outputs
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(inputs, config.classes)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        x_BCHW = F.max_pool2d(F.relu(self.stem(images)), kernel_size=3, stride=2, padding=1)
        logits_BC = self.head(self.layers(x_BCHW).mean(dim=(2, 3)))
        return logits_BC if labels is None else F.cross_entropy(logits_BC, labels)


CONFIGS = {
    "resnet-tiny": ResNetConfig(blocks=(1, 1), expansion=4, channels=8, image=32, classes=10),
    "resnet-18": ResNetConfig(blocks=(2, 2, 2, 2), expansion=1),
    "resnet-50": ResNetConfig(blocks=(3, 4, 6, 3), expansion=4),
    "resnet-101": ResNetConfig(blocks=(3, 4, 23, 3), expansion=4),
    "resnet-152": ResNetConfig(blocks=(3, 8, 36, 3), expansion=4),
    "wide-resnet-50": ResNetConfig(blocks=(3, 4, 6, 3), expansion=4, widening=2),
    "wide-resnet-101": ResNetConfig(blocks=(3, 4, 23, 3), expansion=4, widening=2),
}
