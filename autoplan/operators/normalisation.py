"""Batch normalisation in parts that are exact over batch and channels, and group normalisation by group size.

Statistics take two passes: the mean, then the mean of squared distances from it, each a sum over parts
of the batch.  Running statistics are new values, not updates in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autoplan.operators.registry import local_operator


def _over_channels(vector: Tensor, like: Tensor) -> Tensor:
    """[C] as [1, C, 1, ...] in the type of ``like``."""
    return vector.reshape(1, -1, *[1] * (like.dim() - 2))


def _others(x: Tensor) -> list[int]:
    return [d for d in range(x.dim()) if d != 1]


def _wide(x: Tensor) -> torch.dtype:
    return torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else x.dtype


@local_operator
def channel_mean(x: Tensor, sizes: Sequence[int]) -> Tensor:
    """Summand of the mean of each channel: [N, C, ...] -> [C]; ``sizes`` are the whole extents but C's."""
    return torch.sum(x, _others(x), dtype=_wide(x)) / prod(sizes)


class _ChannelVariance(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mean: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(x, mean)
        ctx.count = count
        distance = x - _over_channels(mean, x)
        return distance.square_().sum(_others(x)).div_(count)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, mean = ctx.saved_tensors
        distance = x - _over_channels(mean, x)
        distance.mul_(_over_channels(gradients[0] * (2 / ctx.count), x))
        return distance.to(x.dtype), None, None


@local_operator
def channel_variance(x: Tensor, mean: Tensor, sizes: Sequence[int]) -> Tensor:
    """Summand of the unbiased variance of each channel around ``mean``: [N, C, ...], [C] -> [C].

    ``mean`` must be the mean over the whole batch: the gradient with respect to it, then zero, is left out.
    """
    return _ChannelVariance.apply(x, mean, max(prod(sizes) - 1, 1))


class _Normalise(torch.autograd.Function):
    """The kernel of evaluation mode, with gradients of mean and variance added."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        mean: Tensor,
        unbiased: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        count: int,
    ) -> Tensor:
        ctx.factor = (count - 1) / count
        variance = unbiased * ctx.factor
        ctx.save_for_backward(x, mean, variance, weight)
        ctx.eps, ctx.bias = eps, None if bias is None else bias.dtype
        scale, shift = _as(weight, mean.dtype), _as(bias, mean.dtype)
        return torch.batch_norm(x, scale, shift, mean, variance, False, 0.0, eps, False)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, variance, weight = ctx.saved_tensors
        empty = torch.empty(0, dtype=mean.dtype, device=x.device)
        scale = torch.ones_like(mean) if weight is None else weight.to(mean.dtype)
        grad_x, grad_weight, grad_bias = torch.ops.aten.native_batch_norm_backward(
            gradients[0].contiguous(), x, scale, mean, variance, empty, empty, False, ctx.eps, [True, True, True]
        )
        inverse = torch.rsqrt(variance + ctx.eps)
        grad_mean = -inverse * scale * grad_bias
        grad_variance = (-0.5 * ctx.factor) * inverse.square() * scale * grad_weight
        return (
            grad_x,
            grad_mean,
            grad_variance,
            None if weight is None else grad_weight.to(weight.dtype),
            None if ctx.bias is None else grad_bias.to(ctx.bias),
            None,
            None,
        )


def _as(vector: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if vector is None else vector.to(dtype)


@local_operator
def channel_normalise(
    x: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    sizes: Sequence[int],
) -> Tensor:
    """``(x - mean) / sqrt(biased variance + eps) * weight + bias``: [N, C, ...], [C]... -> [N, C, ...].

    ``variance`` is the unbiased one, over elements of whole extents ``sizes``.
    """
    return _Normalise.apply(x, mean, variance, weight, bias, eps, prod(sizes))


@local_operator
def running_average(running: Tensor, value: Tensor, momentum: float) -> Tensor:
    """The running mean or variance after a step: [C], [C] -> [C], without gradient."""
    return torch.lerp(running, value.detach().to(running.dtype), momentum)


@local_operator
def group_norm(x: Tensor, group: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Group normalisation with groups of ``group`` channels: [N, C, ...] -> [N, C, ...]."""
    return F.group_norm(x, x.shape[1] // group, weight, bias, eps)
