"""Convolution whose number of groups follows from the shard."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from autoplan.operators.registry import local_operator


@local_operator
def grouped_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """Convolution of [N, G*i, ...] with [G*o, i, ...] in ``G`` groups, where ``G`` is what the shard holds."""
    groups = x.shape[1] // weight.shape[1]
    zeros = [0] * (x.dim() - 2)
    return torch.convolution(x, weight, bias, list(stride), list(padding), list(dilation), False, zeros, groups)
