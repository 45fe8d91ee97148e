"""Llama 3: RMS normalisation, rotary positions, SwiGLU, grouped-query attention, untied embeddings.

Sizes: Llama Team, "The Llama 3 Herd of Models", arXiv 2407.21783, table 3; vocabulary 128,256
(128,000 tokens and 256 special ones), rotary base 500,000, pre-training sequence 8,192.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoplan.zoo.layers import initialise, token_loss
from autoplan.zoo.preset import Inputs


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a Llama; ``groups`` is the number of key/value heads, each shared by ``heads / groups`` queries."""

    layers: int
    width: int
    heads: int
    groups: int
    hidden: int
    vocabulary: int = 128_256
    sequence: int = 8192
    rotary_base: float = 500_000.0
    epsilon: float = 1e-5

    def model(self) -> nn.Module:
        return Llama(self)

    def inputs(self, make: Inputs) -> dict[str, Tensor]:
        tokens = make.integers(self.vocabulary, self.sequence)
        return {"tokens": tokens} | ({"labels": make.next_tokens(tokens)} if make.labels else {})


def rotary_angles(length: int, width: int, base: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``[S, E]`` of the rotary embedding (RoFormer, arXiv 2104.09864, eq. 34)."""
    frequencies = base ** (-torch.arange(0, width, 2, device=like.device, dtype=torch.float32) / width)
    angles = torch.outer(torch.arange(length, device=like.device, dtype=torch.float32), frequencies)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotate(x_BHSE: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the pairs (i, i + E/2) of each head by its position's angles."""
    cosine_SE, sine_SE = angles
    first, second = x_BHSE.chunk(2, dim=-1)
    return x_BHSE * cosine_SE + torch.cat([-second, first], dim=-1) * sine_SE


class GroupedAttention(nn.Module):
    """Causal attention in which several query heads share a key/value head (GQA, arXiv 2305.13245)."""

    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        if width % heads or heads % groups:
            raise ValueError(f"expected width / heads and heads / groups whole, got {width}, {heads}, {groups}")
        self.heads, self.groups = heads, groups
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width // heads * groups, bias=False)
        self.value = nn.Linear(width, width // heads * groups, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x_BSD: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        q_BHSE = rotate(self.query(x_BSD).unflatten(-1, (self.heads, -1)).transpose(1, 2), angles)
        k_BGSE = rotate(self.key(x_BSD).unflatten(-1, (self.groups, -1)).transpose(1, 2), angles)
        v_BGSE = self.value(x_BSD).unflatten(-1, (self.groups, -1)).transpose(1, 2)
        y_BHSE = F.scaled_dot_product_attention(
            q_BHSE, k_BGSE, v_BGSE, is_causal=True, enable_gqa=self.groups != self.heads
        )
        return self.out(y_BHSE.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    """Gated feed-forward (arXiv 2002.05202)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x_BSD)) * self.up(x_BSD))


class LlamaLayer(nn.Module):
    """A transformer layer of Llama."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, config.epsilon)
        self.attention = GroupedAttention(config.width, config.heads, config.groups)
        self.feed_forward_norm = nn.RMSNorm(config.width, config.epsilon)
        self.feed_forward = SwiGLU(config.width, config.hidden)

    def forward(self, x_BSD: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), angles)
        return x_BSD + self.feed_forward(self.feed_forward_norm(x_BSD))


class Llama(nn.Module):
    """tokens ``[B, S]`` to logits ``[B, S, V]``; with labels ``[B, S]`` to the mean loss over valid tokens."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.token = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList(LlamaLayer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, config.epsilon)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        initialise(self)

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        x_BSD = self.token(tokens)
        head_width = self.config.width // self.config.heads
        angles = rotary_angles(tokens.shape[1], head_width, self.config.rotary_base, x_BSD)
        for layer in self.layers:
            x_BSD = layer(x_BSD, angles)
        logits_BSV = self.head(self.norm(x_BSD))
        return logits_BSV if labels is None else token_loss(logits_BSV, labels)


CONFIGS = {
    "llama-tiny": LlamaConfig(layers=2, width=64, heads=4, groups=2, hidden=160, vocabulary=256, sequence=64),
    "llama3-8b": LlamaConfig(layers=32, width=4096, heads=32, groups=8, hidden=14336),
    "llama3-70b": LlamaConfig(layers=80, width=8192, heads=64, groups=8, hidden=28672),
    "llama3-405b": LlamaConfig(layers=126, width=16384, heads=128, groups=8, hidden=53248),
}
