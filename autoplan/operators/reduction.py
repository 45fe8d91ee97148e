"""Means over dimensions of which a rank holds a part."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from autoplan.operators.registry import local_operator


@local_operator
def mean(x: Tensor, dim: Sequence[int], sizes: Sequence[int], keepdim: bool = False) -> Tensor:
    """This rank's summand of the mean over ``dim``, whose whole extents are ``sizes``.

    [..., d, ...] -> [..., ...] or [..., 1, ...].  The summands of all parts add up to the mean.  Half
    precision is summed in float32, like torch does.
    """
    count = prod(sizes)
    if prod(x.shape[d] for d in dim) == count:
        return torch.mean(x, list(dim), keepdim)
    wide = torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else x.dtype
    return (torch.sum(x, list(dim), keepdim, dtype=wide) / count).to(x.dtype)
