"""A linear layer whose result is taken apart: fused query, key and value, or gate and up projections."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from autoplan.operators.registry import local_operator


@local_operator
def fused_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, widths: Sequence[int], starts: Sequence[int], stops: Sequence[int]
) -> list[Tensor]:
    """``split(linear(x, weight, bias), widths)``, of each part only the features from its start to its stop.

    ``x`` [..., k], ``weight`` [sum(widths), k], ``bias`` [sum(widths)] -> for part i [..., stops[i] - starts[i]].
    """
    if all(stop - start == width for start, stop, width in zip(starts, stops, widths, strict=True)):
        return list(F.linear(x, weight, bias).split(list(widths), -1))
    ranges = []
    first = 0
    for width, start, stop in zip(widths, starts, stops, strict=True):
        ranges.append((first + start, first + stop))
        first += width
    rows = torch.cat([weight[low:high] for low, high in ranges])
    part = None if bias is None else torch.cat([bias[low:high] for low, high in ranges])
    return list(F.linear(x, rows, part).split([high - low for low, high in ranges], -1))
