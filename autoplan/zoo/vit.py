"""Vision transformers for image classification.

Sizes: Dosovitskiy et al., arXiv 2010.11929, table 1 (B, L, H); Zhai et al., arXiv 2106.04560, table 2 (g, G).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoplan.zoo.layers import PreNormBlock, initialise
from autoplan.zoo.preset import Inputs


@dataclass(frozen=True)
class ViTConfig:
    """Sizes of a ViT: square images of ``image`` pixels a side, cut into patches of ``patch``."""

    layers: int
    width: int
    heads: int
    hidden: int
    patch: int
    image: int = 224
    classes: int = 1000

    @property
    def sequence(self) -> None:
        return None

    def model(self) -> nn.Module:
        return ViT(self)

    def inputs(self, make: Inputs) -> dict[str, Tensor]:
        images = make.floats(3, self.image, self.image)
        return {"images": images} | ({"labels": make.integers(self.classes)} if make.labels else {})


class ViT(nn.Module):
    """images ``[B, 3, height, width]`` to logits ``[B, classes]``; with labels ``[B]`` to the mean loss."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        if config.image % config.patch:
            raise ValueError(f"expected an image that patches of {config.patch} divide, got {config.image}")
        patches = (config.image // config.patch) ** 2
        self.patch = nn.Conv2d(3, config.width, config.patch, stride=config.patch)
        self.token = nn.Parameter(torch.zeros(1, 1, config.width))
        self.position = nn.Parameter(torch.zeros(1, patches + 1, config.width))
        self.layers = nn.ModuleList(
            PreNormBlock(config.width, config.heads, config.hidden, causal=False) for _ in range(config.layers)
        )
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.classes)
        initialise(self)
        nn.init.normal_(self.position, std=0.02)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        x_BSD = self.patch(images).flatten(2).transpose(1, 2)
        x_BSD = torch.cat([self.token.expand(x_BSD.shape[0], -1, -1), x_BSD], dim=1) + self.position
        for layer in self.layers:
            x_BSD = layer(x_BSD)
        logits_BC = self.head(self.norm(x_BSD)[:, 0])
        return logits_BC if labels is None else F.cross_entropy(logits_BC, labels)


CONFIGS = {
    "vit-tiny": ViTConfig(layers=2, width=64, heads=4, hidden=128, patch=8, image=32, classes=10),
    "vit-base-16": ViTConfig(layers=12, width=768, heads=12, hidden=3072, patch=16),
    "vit-large-16": ViTConfig(layers=24, width=1024, heads=16, hidden=4096, patch=16),
    "vit-huge-14": ViTConfig(layers=32, width=1280, heads=16, hidden=5120, patch=14),
    "vit-g-14": ViTConfig(layers=40, width=1408, heads=16, hidden=6144, patch=14),
    "vit-gigantic-14": ViTConfig(layers=48, width=1664, heads=16, hidden=8192, patch=14),
}
