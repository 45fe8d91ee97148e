"""BERT: an encoder with post-normalisation, trained to fill in masked tokens.

Sizes: Devlin et al., arXiv 1810.04805, section 3; vocabulary 30,522 and sequence 512 of the published
uncased models.  Without next-sentence prediction.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoplan.zoo.layers import Attention, FeedForward, initialise, token_loss
from autoplan.zoo.preset import IGNORED, Inputs


@dataclass(frozen=True)
class BERTConfig:
    """Sizes of a BERT."""

    layers: int
    width: int
    heads: int
    vocabulary: int = 30_522
    sequence: int = 512
    segments: int = 2
    epsilon: float = 1e-12

    def model(self) -> nn.Module:
        return BERT(self)

    def inputs(self, make: Inputs) -> dict[str, Tensor]:
        tokens = make.integers(self.vocabulary, self.sequence)
        found = {
            "tokens": tokens,
            "segments": make.integers(self.segments, self.sequence),
            "attention_mask": torch.ones_like(tokens, dtype=torch.bool),
        }
        if make.labels:  # one token in seven is to be predicted, about BERT's 15 %
            chosen = make.integers(7, self.sequence) == 0
            found["labels"] = torch.where(chosen, tokens, torch.full_like(tokens, IGNORED))
        return found


class BERTLayer(nn.Module):
    """A transformer layer with the normalisation after each part."""

    def __init__(self, config: BERTConfig) -> None:
        super().__init__()
        self.attention = Attention(config.width, config.heads, causal=False)
        self.attention_norm = nn.LayerNorm(config.width, config.epsilon)
        self.feed_forward = FeedForward(config.width, 4 * config.width)
        self.feed_forward_norm = nn.LayerNorm(config.width, config.epsilon)

    def forward(self, x_BSD: Tensor, mask_B11S: Tensor) -> Tensor:
        x_BSD = self.attention_norm(x_BSD + self.attention(x_BSD, mask_B11S))
        return self.feed_forward_norm(x_BSD + self.feed_forward(x_BSD))


class BERT(nn.Module):
    """tokens, segments, mask ``[B, S]`` to logits ``[B, S, V]``; with labels to the mean loss over masked tokens."""

    def __init__(self, config: BERTConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.sequence, config.width)
        self.segment = nn.Embedding(config.segments, config.width)
        self.embedding_norm = nn.LayerNorm(config.width, config.epsilon)
        self.layers = nn.ModuleList(BERTLayer(config) for _ in range(config.layers))
        self.transform = nn.Linear(config.width, config.width)
        self.transform_norm = nn.LayerNorm(config.width, config.epsilon)
        self.head = nn.Linear(config.width, config.vocabulary)
        initialise(self)
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor, segments: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> Tensor:
        positions_S = torch.arange(tokens.shape[1], device=tokens.device)
        x_BSD = self.embedding_norm(self.token(tokens) + self.position(positions_S) + self.segment(segments))
        mask_B11S = attention_mask[:, None, None, :]
        for layer in self.layers:
            x_BSD = layer(x_BSD, mask_B11S)
        logits_BSV = self.head(self.transform_norm(F.gelu(self.transform(x_BSD))))
        return logits_BSV if labels is None else token_loss(logits_BSV, labels)


CONFIGS = {
    "bert-tiny": BERTConfig(layers=2, width=64, heads=4, vocabulary=256, sequence=64),
    "bert-base": BERTConfig(layers=12, width=768, heads=12),
    "bert-large": BERTConfig(layers=24, width=1024, heads=16),
}
