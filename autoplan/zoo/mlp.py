"""Stacks of linear layers: the smallest models on which parallelism can be studied."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from autoplan.zoo.preset import Inputs


@dataclass(frozen=True)
class MLPConfig:
    """``layers`` pairs of linear layers ``width -> hidden -> width``, then a classifier."""

    layers: int
    width: int
    hidden: int
    classes: int

    @property
    def sequence(self) -> None:
        return None

    def model(self) -> nn.Module:
        return MLP(self)

    def inputs(self, make: Inputs) -> dict[str, Tensor]:
        features = make.floats(self.width)
        return {"features": features} | ({"labels": make.integers(self.classes)} if make.labels else {})


class MLP(nn.Module):
    """features ``[B, width]`` to logits ``[B, classes]``; with labels ``[B]`` to the mean loss."""

    def __init__(self, config: MLPConfig) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(
                nn.Sequential(nn.Linear(config.width, config.hidden), nn.ReLU(), nn.Linear(config.hidden, config.width))
                for _ in range(config.layers)
            )
        )
        self.head = nn.Linear(config.width, config.classes)

    def forward(self, features: Tensor, labels: Tensor | None = None) -> Tensor:
        logits_BC = self.head(self.layers(features))
        return logits_BC if labels is None else F.cross_entropy(logits_BC, labels)


CONFIGS = {
    "mlp-tiny": MLPConfig(layers=2, width=16, hidden=32, classes=8),
    "mlp-100m": MLPConfig(layers=12, width=1024, hidden=4096, classes=1000),
    "mlp-1b": MLPConfig(layers=8, width=4096, hidden=16384, classes=1000),
}
