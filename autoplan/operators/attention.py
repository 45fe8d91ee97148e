"""Causal attention of a part of the queries."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from autoplan.operators.registry import local_operator


@local_operator
def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, start: int, scale: float | None = None, enable_gqa: bool = False
) -> Tensor:
    """Attention of the queries at ``start`` and after to the keys at or before each of them.

    [..., H, s, e], [..., Hkv, t, e], [..., Hkv, t, f] -> [..., H, s, f].  Keys that no query sees are left out.
    """
    count, keys = query.shape[-2], key.shape[-2]
    seen = min(start + count, keys)
    if seen < keys:
        key, value = key[..., :seen, :], value[..., :seen, :]
    mask = torch.ones(count, seen, dtype=torch.bool, device=query.device).tril(start) if start else None
    return F.scaled_dot_product_attention(
        query, key, value, mask, is_causal=mask is None, scale=scale, enable_gqa=enable_gqa
    )
