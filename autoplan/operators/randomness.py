"""Random numbers that depend on where an element lies in the whole tensor, not on who computes it.

The number at global position ``(i_0, ..., i_n)`` is a hash of (seed, step, operator, i_0, ..., i_n):
replicas agree, shards differ, every plan draws the same mask, a recomputed segment draws it again,
and a run is repeated by its seed.  The hash is the finaliser of SplitMix64 (Steele, Lea, Flood,
OOPSLA 2014), applied once per dimension.

The runtime sets seed and step with :func:`set_step`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autoplan.operators.registry import local_operator

_GOLDEN = 0x9E3779B97F4A7C15
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, None))
_WORD = (1 << 64) - 1
_PACKED = 4
"""Sixteen-bit numbers in one hash."""

_state = {"seed": 0, "step": 0}


def set_step(seed: int, step: int) -> None:
    """Let all following random operators draw for this ``seed`` and ``step``."""
    _state.update(seed=seed, step=step)


def current_step() -> tuple[int, int]:
    """The (seed, step) that random operators draw for."""
    return _state["seed"], _state["step"]


def _signed(word: int) -> int:
    word &= _WORD
    return word - (1 << 64) if word >> 63 else word


def _mix_number(word: int) -> int:
    for shift, factor in _ROUNDS:
        word ^= word >> shift
        word = word * (factor or 1) & _WORD
    return word


def _mix(words: Tensor) -> Tensor:
    """The finaliser on int64 words, in place; torch shifts arithmetically, hence the masks."""
    for shift, factor in _ROUNDS:
        words ^= (words >> shift).bitwise_and_((1 << (64 - shift)) - 1)
        if factor is not None:
            words *= _signed(factor)
    return words


def _key(operator: int) -> int:
    word = 0
    for part in (*current_step(), operator):
        word = _mix_number(word + part + _GOLDEN)
    return _signed(word)


def _hashes(operator: int, starts: Sequence[int], shape: Sequence[int], device: torch.device) -> Tensor:
    """One int64 word for each position of the block of ``shape`` that begins at ``starts``."""
    words = torch.full((), _key(operator), dtype=torch.int64, device=device)
    for start, extent in zip(starts, shape, strict=True):
        positions = torch.arange(start + 1, start + extent + 1, dtype=torch.int64, device=device)
        words = _mix(words.unsqueeze(-1) + positions * _signed(_GOLDEN))
    return words


@torch.compiler.disable  # the step is no constant
def keep_mask(p: float, operator: int, starts: Sequence[int], shape: Sequence[int], device: torch.device) -> Tensor:
    """True with probability ``1 - p`` (rounded to a multiple of 2^-16), for the block at ``starts``."""
    if not shape:
        return keep_mask(p, operator, (0,), (1,), device).squeeze(0)
    low, extent = starts[-1], shape[-1]
    first = low // _PACKED
    blocks = (low + extent + _PACKED - 1) // _PACKED - first
    words = _hashes(operator, (*starts[:-1], first), (*shape[:-1], blocks), device)
    drawn = words.view(torch.int16).narrow(-1, low - first * _PACKED, extent)
    return drawn >= round(p * 65536) - 32768


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, operator: int, starts: Sequence[int]) -> Tensor:
        if x.device.type == "meta":
            mask = torch.empty(x.shape, dtype=torch.bool, device="meta")
        else:
            mask = keep_mask(p, operator, starts, x.shape, x.device)
        kept = 65536 - round(p * 65536)
        ctx.save_for_backward(mask)
        ctx.scale = 65536 / kept if kept else 0.0
        return torch.mul(x, mask).mul_(ctx.scale)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (mask,) = ctx.saved_tensors
        return torch.mul(gradients[0], mask).mul_(ctx.scale), None, None, None


@local_operator
def dropout(x: Tensor, p: float, operator: int, starts: Sequence[int]) -> Tensor:
    """Zeroes elements with probability ``p`` and scales the others; the block begins at ``starts``.

    Keeps a mask of one byte per element for backward.
    """
    return _Dropout.apply(x, p, operator, starts)


@torch.compiler.disable
def _uniform(operator: int, starts: Sequence[int], shape: Sequence[int], device: torch.device) -> Tensor:
    """float64 in (0, 1), multiples of 2^-53 shifted by half of one."""
    words = _hashes(operator, starts, shape, device)
    return (words >> 11).bitwise_and_((1 << 53) - 1).double().add_(0.5).mul_(2.0**-53)


def _device(device: torch.device | None) -> torch.device:
    return device if device is not None else torch.device("cpu")


@local_operator
def uniform(
    size: Sequence[int], operator: int, starts: Sequence[int], dtype: torch.dtype, device: torch.device | None = None
) -> Tensor:
    """Uniform numbers in [0, 1) for the block of ``size`` at ``starts``."""
    if _device(device).type == "meta":
        return torch.empty(tuple(size), dtype=dtype, device=device)
    wide = _uniform(operator, starts, size, _device(device))
    return wide.clamp_(max=1 - torch.finfo(dtype).eps / 2).to(dtype)


@local_operator
def normal(
    size: Sequence[int], operator: int, starts: Sequence[int], dtype: torch.dtype, device: torch.device | None = None
) -> Tensor:
    """Standard normal numbers for the block of ``size`` at ``starts`` (inverse distribution function)."""
    if _device(device).type == "meta":
        return torch.empty(tuple(size), dtype=dtype, device=device)
    return torch.special.ndtri(_uniform(operator, starts, size, _device(device))).to(dtype)


@local_operator
def bernoulli(probability: Tensor, operator: int, starts: Sequence[int]) -> Tensor:
    """One with each element's ``probability``, else zero; the block begins at ``starts``."""
    if probability.device.type == "meta":
        return torch.empty_like(probability)
    drawn = _uniform(operator, starts, probability.shape, probability.device)
    return (drawn < probability.detach()).to(probability.dtype)
