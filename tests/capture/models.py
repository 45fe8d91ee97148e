"""Tiny models of the kinds that capture must take, in float64; nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Call = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, d = x.shape
        q, k, v = (t.view(b, s, self.heads, -1).transpose(1, 2) for t in self.qkv(self.ln_1(x)).split(d, -1))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, d)
        x = x + self.out(a)
        return x + self.down(F.gelu(self.up(self.ln_2(x))))


class GPT(nn.Module):
    """Tied embedding; returns the loss when it gets labels, else logits."""

    def __init__(
        self, vocabulary: int = 23, width: int = 20, heads: int = 5, layers: int = 2, length: int = 16
    ) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.h = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.h:
            x = block(x)
        logits = self.head(self.ln(x))
        return logits if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class ResNet(nn.Module):
    """Two residual blocks with batch norm, and a cross-entropy loss."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.a, self.na = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.b, self.nb = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(self.stem(x), 2)
        y = self.nb(self.b(F.relu_(self.na(self.a(x)))))
        y += x
        return F.cross_entropy(self.fc(self.pool(F.relu(y)).flatten(1)), labels)


def tokens(batch: int = 4, length: int = 8, vocabulary: int = 23) -> torch.Tensor:
    return torch.randint(0, vocabulary, (batch, length))


def gpt() -> Call:
    return GPT(), (tokens(), tokens()), {}


def resnet() -> Call:
    return ResNet(), (torch.randn(4, 3, 8, 8).double(), torch.randint(0, 5, (4,))), {}


def hf_llama() -> Call:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=23, hidden_size=32, intermediate_size=44, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    ids = tokens()
    return LlamaForCausalLM(config), (), {"input_ids": ids, "labels": ids.clone()}


def hf_gpt2() -> Call:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=23, n_positions=32, n_embd=24, n_layer=2, n_head=3, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    ids = tokens()
    return GPT2LMHeadModel(config), (), {"input_ids": ids, "labels": ids.clone()}


def hf_bert() -> Call:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=23, hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=44,
        max_position_embeddings=32,
    )  # fmt: skip
    ids = tokens()
    mask = (torch.arange(8)[None] < torch.tensor([8, 5, 6, 8])[:, None]).long()
    return BertForMaskedLM(config).eval(), (), {"input_ids": ids, "attention_mask": mask, "labels": ids.clone()}


def hf_vit() -> Call:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=44, image_size=16, patch_size=4,
        num_labels=5,
    )  # fmt: skip
    images, labels = torch.randn(4, 3, 16, 16).double(), torch.randint(0, 5, (4,))
    return ViTForImageClassification(config).eval(), (), {"pixel_values": images, "labels": labels}


MODELS: dict[str, Callable[[], Call]] = {
    "gpt": gpt, "resnet": resnet, "hf_llama": hf_llama, "hf_gpt2": hf_gpt2, "hf_bert": hf_bert, "hf_vit": hf_vit,
}  # fmt: skip


def build(name: str) -> Call:
    """A seeded model in float64 with the arguments of its call."""
    torch.manual_seed(0)
    model, args, kwargs = MODELS[name]()
    return model.double(), args, kwargs
