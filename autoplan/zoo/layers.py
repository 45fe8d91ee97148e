"""Layers that several models of the zoo share.

Shapes: B batch, S sequence, D model width, H heads, E width of a head.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from autoplan.zoo.preset import IGNORED


class Attention(nn.Module):
    """Multi-head self-attention (arXiv 1706.03762, 3.2.2) with one projection each for query, key and value."""

    def __init__(self, width: int, heads: int, causal: bool, dropout: float = 0.0) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"expected a width that {heads} heads divide, got {width}")
        self.heads, self.causal, self.dropout = heads, causal, dropout
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x_BSD: Tensor, mask_B11S: Tensor | None = None) -> Tensor:
        q_BHSE, k_BHSE, v_BHSE = (
            project(x_BSD).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        y_BHSE = F.scaled_dot_product_attention(
            q_BHSE,
            k_BHSE,
            v_BHSE,
            attn_mask=mask_B11S,
            is_causal=self.causal,
            dropout_p=self.dropout if self.training else 0.0,
        )
        return self.out(y_BHSE.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """Two linear layers around GELU."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x_BSD)))


class PreNormBlock(nn.Module):
    """A transformer layer with the normalisation before each part (GPT-2, ViT)."""

    def __init__(self, width: int, heads: int, hidden: int, causal: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal, dropout)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward = FeedForward(width, hidden)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x_BSD: Tensor) -> Tensor:
        x_BSD = x_BSD + self.dropout(self.attention(self.attention_norm(x_BSD)))
        return x_BSD + self.dropout(self.feed_forward(self.feed_forward_norm(x_BSD)))


def token_loss(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    """Mean cross-entropy over the positions whose label is not ``IGNORED``."""
    return F.cross_entropy(logits_BSV.flatten(0, 1), labels_BS.flatten(), ignore_index=IGNORED)


def initialise(model: nn.Module, deviation: float = 0.02) -> None:
    """Weights of linear layers and embeddings normal with ``deviation``, biases zero (GPT-2, BERT)."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=deviation)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
