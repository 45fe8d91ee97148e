"""Sizes that do not divide: 50,257 rows over 4 ranks, a batch of 7, 5 heads over 2, labels ignored unevenly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autoplan.api import parallelize
from autoplan.capture import capture
from autoplan.report.comparison import Outcome, compare
from autoplan.runtime.launch import WorkerPool
from autoplan.search.folding import fold
from autoplan.search.uniform import named_plan
from autoplan.verification import Trial, default_tolerance, outcome, single_device
from searchspace.graph import Graph
from searchspace.layout import parse_placement
from searchspace.plan import ClusterInfo, Plan, Recipe
from searchspace.resolve import resolve

TRIAL = Trial()
HEADS, SIZE, VOCABULARY = 5, 40, 50257


class Uneven(nn.Module):
    """One pre-norm layer with 5 heads between a tied embedding and head of ``vocabulary`` rows."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, SIZE)
        self.norm = nn.LayerNorm(SIZE)
        self.q, self.k, self.v, self.o = (nn.Linear(SIZE, SIZE) for _ in range(4))
        self.up, self.down = nn.Linear(SIZE, 13), nn.Linear(13, SIZE)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        batch, length = tokens.shape
        x = self.embedding(tokens)
        h = self.norm(x)
        q, k, v = (f(h).view(batch, length, HEADS, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(a.transpose(1, 2).reshape(batch, length, SIZE))
        x = x + self.down(F.gelu(self.up(x)))
        logits = F.linear(x, self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def example(vocabulary: int) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    model = Uneven(vocabulary).double()
    tokens = torch.randint(0, vocabulary, (7, 6))
    labels = torch.randint(0, vocabulary, (7, 6))
    # 0 to 5 of 6 tokens count, and one sample has none: every part has another number of valid tokens
    for sample, valid in enumerate((6, 1, 0, 4, 2, 5, 3)):
        labels[sample, valid:] = -100
    return model, (tokens, labels)


PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "batch 7 over 2": (2, {"dp": 2}),
    "batch 7 in 2 micro-batches": (1, {"micro_batches": 2}),
    "batch 7 in 3 micro-batches over 2 stages": (2, {"pp": 2, "micro_batches": 3, "stage_sizes": (1, -1)}),
    "batch 7 in 3 micro-batches over 2": (2, {"dp": 2, "micro_batches": 3}),
    "5 heads over 2": (2, {"tp": 2}),
    "5 heads over 3, by sequence": (3, {"tp": 3, "sequence": True}),
    "vocabulary over 4": (4, {"tp": 4}),
    "all of it": (4, {"dp": 2, "tp": 2, "micro_batches": 3, "zero": 3, "recompute": False}),
}


def plan_for(name: str, graph: Graph) -> Plan:
    ranks, settings = PLANS[name]
    settings = dict(settings)
    if "stage_sizes" in settings:
        settings["stage_sizes"] = (1, len(fold(graph).blocks) - 1)
    plan = named_plan(graph, ClusterInfo(name=f"cpu:1x{ranks}", devices=ranks), Recipe(), **settings)
    return by_vocabulary(graph, plan) if "vocabulary" in name else plan


def by_vocabulary(graph: Graph, plan: Plan) -> Plan:
    """The plan with every operator that sees the vocabulary split along it."""
    operators = dict(plan.transformation.operators)
    for op in graph.operators:
        for uses, shape in zip(op.rule.inputs + op.rule.outputs, graph.shapes(op), strict=True):
            for use, extent in zip(uses, shape, strict=True):
                if extent == VOCABULARY and use is not None:
                    operators[op.name] = {"tp": use.id}
    changed = plan.transformation.model_copy(update={"operators": operators, "parameters": {}})
    return plan.replace(transformation=changed)


@pytest.mark.parametrize("name", PLANS)
def test_uneven_plans_are_exact(name: str) -> None:
    model, args = example(VOCABULARY if "vocabulary" in name else 23)
    captured = capture(model, args)
    found = outcome(parallelize(captured, plan=plan_for(name, captured.graph)), args, {}, TRIAL, ())
    comparison = compare(single_device(model, args, {}, TRIAL), found, default_tolerance(captured))
    assert comparison.agrees, [comparison.worst(q) for q in ("loss", "gradient", "parameter")]


def test_the_vocabulary_is_really_cut_unevenly() -> None:
    model, args = example(VOCABULARY)
    captured = capture(model, args)
    resolution = resolve(captured.graph, plan_for("vocabulary over 4", captured.graph))
    weight = next(t for t in captured.graph.parameters if t.source == "embedding.weight")
    stored = resolution.parameters[weight.name].sites[0].stored.layout
    assert stored == (parse_placement("S(0)"),)


def train(name: str, text: str) -> Outcome:
    model, args = example(VOCABULARY if "vocabulary" in name else 23)
    return outcome(parallelize(model, args, plan=Plan.from_json(text)), args, {}, TRIAL, ())


@pytest.mark.parametrize("name", ["vocabulary over 4", "all of it", "5 heads over 3, by sequence"])
def test_uneven_plans_are_exact_in_processes(name: str, pool: WorkerPool) -> None:
    model, args = example(VOCABULARY if "vocabulary" in name else 23)
    captured = capture(model, args)
    plan = plan_for(name, captured.graph)
    wanted = single_device(model, args, {}, TRIAL)
    for found in pool.run(train, name, plan.to_json(), ranks=PLANS[name][0]):
        comparison = compare(wanted, found, default_tolerance(captured))
        assert comparison.agrees, [comparison.worst(q) for q in ("loss", "gradient", "parameter")]
