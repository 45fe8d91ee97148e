"""A small model with what is hard about parallel training, and its plans."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoplan.capture import Captured, capture
from autoplan.runtime.bound import Programs
from autoplan.runtime.parallel import Parallel, RuntimeOptions
from autoplan.runtime.transport import Transport
from autoplan.search.uniform import named_plan
from searchspace.conversion import ElementCount
from searchspace.materialize import evaluation_program, forward_program, refresh_program, train_program
from searchspace.plan import ClusterInfo, Recipe

RECIPE = Recipe()
OPTIONS = RuntimeOptions()


class Block(nn.Module):
    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        b, s, d = x.shape
        q, k, v = (y.view(b, s, self.heads, -1).transpose(1, 2) for y in self.qkv(self.ln_1(x)).split(d, -1))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, d)
        x = x + self.out(a)
        return x + self.down(F.gelu(self.up(self.ln_2(x))))


class GPT(nn.Module):
    """Odd everywhere: 5 heads, 23 words, inner width 33; tied embedding, a buffer that forward does not save."""

    def __init__(self, words: int = 23, width: int = 10, heads: int = 5, layers: int = 2, length: int = 6) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(words, width), nn.Embedding(length, width)
        self.h = nn.ModuleList(Block(width, heads, 3 * width + 3) for _ in range(layers))
        self.ln = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.wte.weight
        self.register_buffer("scale", torch.tensor(0.5), persistent=False)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.h:
            x = block(x)
        logits = self.head(self.ln(x)) * self.scale
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        return {"logits": logits, "loss": loss}


def gpt(dtype: torch.dtype = torch.float64, batch: int = 7) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model, and a batch whose rows have different numbers of ignored labels."""
    torch.manual_seed(0)
    model = GPT().to(dtype)
    ids, labels = torch.randint(0, 23, (2, batch, 6))
    labels[0, :5] = -100
    labels[3] = -100
    return model, {"ids": ids, "labels": labels}


@cache
def captured_gpt() -> Captured:
    """Captured once in each process."""
    model, batch = gpt()
    return capture(model, (), batch)


PLANS: dict[str, dict[str, Any]] = {
    "one": {},
    "one, micro-batches": {"micro_batches": 3},
    "dp": {"dp": 2},
    "tp": {"tp": 2},
    "tp, sequence": {"tp": 2, "sequence": True},
    "pp 1f1b": {"pp": 2, "micro_batches": 3},
    "pp gpipe": {"pp": 2, "micro_batches": 2, "schedule": "gpipe"},
    "dp x tp": {"dp": 2, "tp": 2},
    "dp x pp": {"dp": 2, "pp": 2, "micro_batches": 2},
    "tp x pp": {"tp": 2, "pp": 2, "micro_batches": 2},
    "zero 1": {"dp": 2, "zero": 1},
    "zero 2": {"dp": 2, "zero": 2, "micro_batches": 2},
    "zero 3": {"dp": 2, "zero": 3, "micro_batches": 2},
    "zero 3 x tp": {"dp": 2, "tp": 2, "zero": 3},
    "recompute": {"dp": 2, "recompute": True, "micro_batches": 2},
}


def programs(captured: Captured, recipe: Recipe = RECIPE, **degrees: Any) -> Programs:
    """The programs of a uniform plan."""
    plan = named_plan(captured.graph, ClusterInfo(name="cpu:1x4", devices=4), recipe, **degrees)
    prices = ElementCount()
    train = train_program(captured.graph, plan, prices) if recipe.mode == "train" else None
    return Programs(
        train,
        partial(forward_program, captured.graph, plan, prices),
        partial(evaluation_program, captured.graph, plan, prices),
        refresh_program(captured.graph, plan, prices),
    )


def parallel_gpt(transport: Transport, options: RuntimeOptions = OPTIONS, **degrees: Any) -> Parallel:
    captured = captured_gpt()
    return Parallel(captured, programs(captured, **degrees), transport, options)


def ranks_of(degrees: dict[str, Any]) -> int:
    return degrees.get("dp", 1) * degrees.get("tp", 1) * degrees.get("pp", 1)
