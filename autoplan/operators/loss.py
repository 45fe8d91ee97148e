"""Cross entropy in parts that are exact over tokens and over classes.

With logits ``l`` [N, C, ...], targets ``t`` [N, ...] and ``m = max_c l``::

    loss = log(sum_c exp(l_c - m)) + m - l_t

The maximum, the sum and the picked logit each combine over ranges of classes by one reduction; what
follows is pointwise over tokens, a sum, and a division by the number of tokens that are not ignored.
Half precision logits are accumulated in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autoplan.operators.registry import local_operator

_HALF = (torch.bfloat16, torch.float16)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in _HALF else dtype


def _within(target: Tensor, start: int, classes: int) -> tuple[Tensor, Tensor]:
    """Local class numbers (any valid one where the target lies elsewhere), and whether they lie here."""
    local = target - start if start else target
    index = local.clamp(0, classes - 1)
    return index, index == local


@local_operator
def class_maximum(logits: Tensor, dim: int) -> Tensor:
    """``max_c l``: [.., C, ..] -> [.., ..], without gradient (the loss does not depend on it)."""
    return torch.amax(logits.detach(), dim)


class _ExpSumAndPick(torch.autograd.Function):
    """Keeps the logits only, and recomputes the exponentials in backward."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, maximum: Tensor, target: Tensor, start: int, dim: int
    ) -> tuple[Tensor, Tensor]:
        wide = _wide(logits.dtype)
        exponentials = torch.sub(logits, maximum.to(wide).unsqueeze(dim)).exp_()  # promotes to the wide type
        index, inside = _within(target, start, logits.shape[dim])
        picked = torch.gather(logits, dim, index.unsqueeze(dim)).squeeze(dim).to(wide)
        ctx.save_for_backward(logits, maximum, index, inside)
        ctx.dim = dim
        return exponentials.sum(dim), torch.where(inside, picked, 0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        logits, maximum, index, inside = ctx.saved_tensors
        dim = ctx.dim
        grad_sum, grad_picked = gradients
        grad = torch.sub(logits, maximum.to(grad_sum.dtype).unsqueeze(dim)).exp_()
        grad.mul_(grad_sum.unsqueeze(dim))
        grad.scatter_add_(dim, index.unsqueeze(dim), (grad_picked * inside).unsqueeze(dim))
        return grad.to(logits.dtype), None, None, None, None


@local_operator
def exp_sum_and_pick(logits: Tensor, maximum: Tensor, target: Tensor, start: int, dim: int) -> tuple[Tensor, Tensor]:
    """``sum_c exp(l_c - m)`` and ``l_t`` over the classes that begin at ``start``.

    ``logits`` [.., C, ..] with classes along ``dim``, ``maximum`` and ``target`` [.., ..] -> two of [.., ..].
    A target that lies elsewhere picks zero: both results sum over ranges of classes.  The gradient with
    respect to the maximum is left out: it cancels in the loss.
    """
    return _ExpSumAndPick.apply(logits, maximum, target, start, dim)


class _ExpSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, maximum: Tensor, dim: int) -> Tensor:
        ctx.save_for_backward(logits, maximum)
        ctx.dim = dim
        return torch.sub(logits, maximum.to(_wide(logits.dtype)).unsqueeze(dim)).exp_().sum(dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        logits, maximum = ctx.saved_tensors
        grad = torch.sub(logits, maximum.to(gradients[0].dtype).unsqueeze(ctx.dim)).exp_()
        return grad.mul_(gradients[0].unsqueeze(ctx.dim)).to(logits.dtype), None, None


@local_operator
def exp_sum(logits: Tensor, maximum: Tensor, dim: int) -> Tensor:
    """``sum_c exp(l_c - m)``: the first result of :func:`exp_sum_and_pick`."""
    return _ExpSum.apply(logits, maximum, dim)


@local_operator
def pick(values: Tensor, target: Tensor, start: int, dim: int) -> Tensor:
    """``v_t`` over the classes that begin at ``start``: [.., C, ..], [.., ..] -> [.., ..]; zero elsewhere."""
    index, inside = _within(target, start, values.shape[dim])
    picked = torch.gather(values, dim, index.unsqueeze(dim)).squeeze(dim)
    return torch.where(inside, picked, 0)


@local_operator
def log_sum(exp_sum: Tensor, maximum: Tensor) -> Tensor:
    """``log(sum_c exp(l_c - m)) + m``, the logarithm of the normaliser of each token."""
    return torch.log(exp_sum) + maximum.to(exp_sum.dtype)


@local_operator
def token_loss(exp_sum: Tensor, maximum: Tensor, picked: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    """``log(s) + m - l_t`` of each token, zero where the target is ``ignore_index``."""
    loss = torch.log(exp_sum) + (maximum.to(exp_sum.dtype) - picked)
    return torch.where(target == ignore_index, 0, loss)


@local_operator
def mask_ignored(values: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    """``values`` of each token, zero where the target is ``ignore_index``."""
    return torch.where(target == ignore_index, 0, values)


@local_operator
def count_valid(target: Tensor, ignore_index: int) -> Tensor:
    """How many targets are not ``ignore_index``: int64, a sum over parts of the tokens."""
    return (target != ignore_index).sum()
