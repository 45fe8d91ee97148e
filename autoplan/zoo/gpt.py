"""GPT-2 and GPT-3: decoder-only transformers with learned positions and tied embeddings.

Sizes of the GPT-3 family: Brown et al., arXiv 2005.14165, table 2.1; vocabulary 51,200 (50,257 rounded
up, as planners' papers use it) and sequence 2,048.  760M has 16 heads of 96 as in the table.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from autoplan.zoo.layers import PreNormBlock, initialise, token_loss
from autoplan.zoo.preset import Inputs


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT; ``tied``: the output projection is the token embedding."""

    layers: int
    width: int
    heads: int
    vocabulary: int = 51_200
    sequence: int = 2048
    dropout: float = 0.0
    tied: bool = True

    def model(self) -> nn.Module:
        return GPT(self)

    def inputs(self, make: Inputs) -> dict[str, Tensor]:
        tokens = make.integers(self.vocabulary, self.sequence)
        return {"tokens": tokens} | ({"labels": make.next_tokens(tokens)} if make.labels else {})


class GPT(nn.Module):
    """tokens ``[B, S]`` to logits ``[B, S, V]``; with labels ``[B, S]`` to the mean loss over valid tokens."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.sequence, config.width)
        self.layers = nn.ModuleList(
            PreNormBlock(config.width, config.heads, 4 * config.width, causal=True, dropout=config.dropout)
            for _ in range(config.layers)
        )
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        initialise(self)
        if config.tied:
            self.head.weight = self.token.weight

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        positions_S = torch.arange(tokens.shape[1], device=tokens.device)
        x_BSD = self.token(tokens) + self.position(positions_S)
        for layer in self.layers:
            x_BSD = layer(x_BSD)
        logits_BSV = self.head(self.norm(x_BSD))
        return logits_BSV if labels is None else token_loss(logits_BSV, labels)


CONFIGS = {
    "gpt-tiny": GPTConfig(layers=2, width=64, heads=4, vocabulary=256, sequence=64),
    "gpt-small": GPTConfig(layers=4, width=256, heads=8, vocabulary=256, sequence=128),
    "gpt3-125m": GPTConfig(layers=12, width=768, heads=12),
    "gpt3-350m": GPTConfig(layers=24, width=1024, heads=16),
    "gpt3-760m": GPTConfig(layers=24, width=1536, heads=16),
    "gpt3-1.3b": GPTConfig(layers=24, width=2048, heads=32),
    "gpt3-2.7b": GPTConfig(layers=32, width=2560, heads=32),
    "gpt3-6.7b": GPTConfig(layers=32, width=4096, heads=32),
    "gpt3-13b": GPTConfig(layers=40, width=5120, heads=40),
    "gpt3-175b": GPTConfig(layers=96, width=12288, heads=96),
}
