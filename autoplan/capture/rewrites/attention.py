"""Attention: causal with a part of the queries, and with dropout by position."""

from __future__ import annotations

from math import sqrt
from typing import Any

from autoplan.capture.call import Emit, Handle, Rewrite
from autoplan.capture.rewrites.drawing import dropout
from autoplan.capture.rewrites.shapes import repeat_interleave
from searchspace.graph import Symbol


def attention(
    emit: Emit,
    query: Handle,
    key: Handle,
    value: Handle,
    mask: Handle | None = None,
    p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Kernels where one fits; with dropout by matrix products and softmax, since kernels draw their own mask."""
    if p > 0:
        return _decomposed(emit, query, key, value, mask, p, is_causal, scale, enable_gqa)
    if is_causal and mask is None:
        return emit("autoplan.causal_attention.default", query, key, value, 0, scale, enable_gqa)
    return NotImplemented


def _decomposed(
    emit: Emit,
    query: Handle,
    key: Handle,
    value: Handle,
    mask: Handle | None,
    p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Any:
    if enable_gqa and key.shape[-3] != query.shape[-3]:
        key, value = (repeat_interleave(emit, x, query.shape[-3] // key.shape[-3], -3) for x in (key, value))
    factor = 1 / sqrt(query.shape[-1]) if scale is None else scale
    scores = emit(
        "aten.matmul.default", emit("aten.mul.Tensor", query, factor), emit("aten.transpose.int", key, -2, -1)
    )
    if is_causal:
        shape = (query.shape[-2], key.shape[-2])
        ones = emit("aten.full.default", shape, True, dtype=Symbol("torch.bool"), device=Symbol("device"))
        mask = emit("autoplan.triangle.default", ones, 0, False, 0, 0)
    if mask is not None and mask.dtype == "bool":
        scores = emit("aten.where.ScalarOther", mask, scores, float("-inf"))
    elif mask is not None:
        scores = emit("aten.add.Tensor", scores, mask)
    weights = dropout(emit, emit("aten.softmax.int", scores, -1), p, True)
    return emit("aten.matmul.default", weights, value)


REWRITES: dict[str, Rewrite] = {"aten.scaled_dot_product_attention.default": attention}
