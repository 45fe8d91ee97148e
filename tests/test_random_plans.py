"""Any legal transformation gives the single device's loss and gradients.

Every operator takes a random choice of its rule on each axis of a mesh, with or without micro-batches: partial sums
pass through, layouts disagree on every edge, cuts are uneven.
"""

from __future__ import annotations

import copy
from functools import cache
from math import prod
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoplan.capture import Captured, capture
from autoplan.runtime.bound import Programs
from autoplan.runtime.in_process import InProcess
from autoplan.runtime.parallel import Parallel, RuntimeOptions
from autoplan.search.uniform import named_plan
from searchspace.conversion import ElementCount
from searchspace.graph import Graph
from searchspace.materialize import evaluation_program, forward_program, refresh_program, train_program
from searchspace.mesh import Mesh
from searchspace.plan import ClusterInfo, Lane, Order, Placement, Plan, Recipe, Stage
from searchspace.resolve import split_problem
from searchspace.schedule import one_f_one_b, tasks_text
from tests.capture.models import build

MESHES = ({"x": 2}, {"x": 3}, {"x": 2, "y": 2})
QUICK = ("gpt", "resnet", "encoder", "dropout")
SLOW = ("hf_llama", "hf_gpt2", "hf_bert", "hf_vit")


class Encoder(nn.Module):
    """torch's own encoder layer: packed projections, heads merged with the batch."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(12, 3, 20, dropout=dropout, batch_first=True)
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)).pow(2).mean()


@cache
def example(name: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any], Captured]:
    torch.manual_seed(0)
    if name in ("encoder", "dropout"):
        model: nn.Module = Encoder(0.3 if name == "dropout" else 0.0).double()
        args, kwargs = (torch.randn(7, 4, 12, dtype=torch.float64),), {}
    else:
        model, args, kwargs = build(name)
    return model, args, kwargs, capture(model, args, kwargs)


def random_plan(graph: Graph, random: Random) -> Plan:
    """One stage whose operators are split at random."""
    plan = named_plan(graph, ClusterInfo(name="cpu:1x4", devices=4), Recipe(), dp=1)
    axes = random.choice(MESHES)
    mesh = Mesh(tuple(axes.items()), tuple(range(prod(axes.values()))))
    share = random.choice([0.3, 0.7, 1.0])
    labels: dict[str, dict[str, str]] = {}
    for op in graph.operators:
        chosen: dict[str, str] = {}
        options = [label for label in op.rule.choices if label]
        for axis in axes:
            if options and random.random() < share:
                tried = chosen | {axis: random.choice(options)}
                if split_problem(graph, op, [op.rule.choices[tried.get(a, "")] for a in axes], mesh) is None:
                    chosen = tried
        labels[op.name] = chosen
    batch_norm = any("channel_mean" in op.target for op in graph.operators)
    micro_batches = 1 if batch_norm or mesh.size > 2 else random.choice([1, 2])
    lane = Lane(devices=mesh.devices, tasks=tasks_text(one_f_one_b(1, micro_batches)[0]))
    return plan.model_copy(
        update={
            "placement": Placement(
                stages=(Stage(axes=axes, devices=mesh.devices, operators=plan.placement.stages[0].operators),)
            ),
            "order": Order(lanes=(lane,)),
            "transformation": plan.transformation.model_copy(
                update={"operators": labels, "micro_batches": micro_batches, "parameters": {}}
            ),
        }
    )


def run(captured: Captured, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
    prices = ElementCount()
    programs = Programs(
        train_program(captured.graph, plan, prices),
        lambda: forward_program(captured.graph, plan, prices),
        lambda: evaluation_program(captured.graph, plan, prices),
        refresh_program(captured.graph, plan, prices),
    )
    parallel = Parallel(captured, programs, InProcess(len(plan.devices)), RuntimeOptions())
    return parallel.train_step(*args, **kwargs), parallel.full_gradients()


def expected(name: str) -> tuple[Tensor, dict[str, Any]]:
    """The eager model's loss and gradients; with dropout those of the captured model on one device."""
    model, args, kwargs, captured = example(name)
    if name == "dropout":
        plan = named_plan(captured.graph, ClusterInfo(name="cpu:1x4", devices=4), Recipe(), dp=1)
        return run(captured, plan, args, kwargs)
    model = copy.deepcopy(model)
    output = model(*args, **kwargs)
    loss = output if isinstance(output, Tensor) else output.loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_random_transformations_are_exact(name: str, seed: int) -> None:
    _, args, kwargs, captured = example(name)
    loss, gradients = expected(name)
    plan = random_plan(captured.graph, Random(f"{name} {seed}"))
    found_loss, found = run(captured, plan, args, kwargs)
    tolerance = 1e-6 if name.startswith("hf_") else 1e-9  # these compute in float32 inside
    assert (found_loss - loss).abs().item() <= tolerance * max(1.0, loss.abs().item())
    scale = max(g.abs().max().item() for g in gradients.values() if g is not None)
    for path, gradient in gradients.items():
        if gradient is not None:
            assert (found[path] - gradient).abs().max().item() <= tolerance * scale, path
