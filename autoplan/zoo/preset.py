"""What a zoo entry is: a configuration that makes its model and example inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

IGNORED = -100
"""The label of a position that takes no part in the loss (``ignore_index`` of ``cross_entropy``)."""


class Example(NamedTuple):
    """A model and one call of it: ``model(*args, **kwargs)`` is the loss, or the prediction without labels."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class Inputs:
    """Makes example inputs of a batch, all on one device.

    On ``meta`` no number is drawn; elsewhere the global generator is used, which the caller seeds.
    """

    batch: int
    device: torch.device
    dtype: torch.dtype
    labels: bool = True

    def integers(self, high: int, *sizes: int) -> Tensor:
        """``[batch, *sizes]`` of int64 in ``[0, high)``."""
        return torch.randint(high, (self.batch, *sizes), device=self.device)

    def floats(self, *sizes: int) -> Tensor:
        """``[batch, *sizes]`` of the model's dtype, standard normal."""
        return torch.randn(self.batch, *sizes, device=self.device, dtype=self.dtype)

    def next_tokens(self, tokens: Tensor) -> Tensor:
        """Labels of a language model: each position's next token; the last position has none."""
        return torch.cat([tokens[:, 1:], torch.full_like(tokens[:, :1], IGNORED)], dim=1)


class Preset(Protocol):
    """A configuration of the zoo, a frozen dataclass.

    ``sequence`` is the default sequence length, or None for models without one.
    """

    @property
    def sequence(self) -> int | None: ...

    def model(self) -> nn.Module:
        """The model, on the device and in the dtype that are the defaults at the time of the call."""
        ...

    def inputs(self, make: Inputs) -> dict[str, Tensor]:
        """Keyword arguments of one call, in the order of ``forward``'s parameters."""
        ...
