"""Tensors made of their position."""

from __future__ import annotations

import torch
from torch import Tensor

from autoplan.operators.registry import local_operator


@local_operator
def arange(
    first: int, last: int, start: float, step: float, dtype: torch.dtype, device: torch.device | None = None
) -> Tensor:
    """``start + i * step`` for the positions ``first <= i < last`` -> [last - first]."""
    if dtype.is_floating_point:
        wide = torch.arange(first, last, dtype=torch.float64, device=device)
        return wide.mul_(step).add_(start).to(dtype)
    return torch.arange(first, last, dtype=dtype, device=device).mul_(int(step)).add_(int(start))


@local_operator
def triangle(x: Tensor, diagonal: int, upper: bool, row: int, column: int) -> Tensor:
    """``tril`` or ``triu`` of the block of [..., rows, columns] that begins at (``row``, ``column``)."""
    shifted = diagonal + row - column
    return torch.triu(x, shifted) if upper else torch.tril(x, shifted)
