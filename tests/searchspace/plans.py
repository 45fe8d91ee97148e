"""Hand-made plans for the hand-made GPT: what a person would write, without any search."""

from __future__ import annotations

import itertools
from typing import Any

from searchspace.graph import Graph, Operator
from searchspace.plan import ClusterInfo, Lane, ModelInfo, Order, Placement, Plan, Recipe, Stage, Transformation
from searchspace.schedule import SCHEDULES, tasks_text


def megatron(
    graph: Graph,
    *,
    dp: int = 1,
    tp: int = 1,
    pp: int = 1,
    micro_batches: int = 1,
    schedule: str = "1f1b",
    recompute: tuple[str, ...] = (),
    parameters: dict[str, Any] | None = None,
    recipe: Recipe | None = None,
) -> Plan:
    """Batch over dp, heads and inner features over tp, operators in equal runs over pp."""
    axes = {name: size for name, size in (("dp", dp), ("tp", tp)) if size > 1} or {"x": 1}
    names = [op.name for op in graph.operators]
    bounds = [round(i * len(names) / pp) for i in range(pp + 1)]
    size = dp * tp
    stages = tuple(
        Stage(axes=axes, devices=tuple(range(i * size, (i + 1) * size)), operators=tuple(names[a:b]))
        for i, (a, b) in enumerate(itertools.pairwise(bounds))
    )
    orders = SCHEDULES[schedule](pp, micro_batches)
    labels = {op.name: _labels(graph, op, dp > 1, tp > 1) for op in graph.operators}
    return Plan(
        model=ModelInfo(name=graph.name, fingerprint=graph.fingerprint),
        cluster=ClusterInfo(name=f"cpu:1x{dp * tp * pp}", devices=dp * tp * pp),
        recipe=recipe or Recipe(),
        transformation=Transformation(
            micro_batches=micro_batches,
            operators={name: found for name, found in labels.items() if found},
            parameters=parameters or {},
            recompute=recompute,
        ),
        placement=Placement(stages=stages),
        order=Order(
            lanes=tuple(
                Lane(devices=stage.devices, tasks=tasks_text(order))
                for stage, order in zip(stages, orders, strict=True)
            )
        ),
    )


def _labels(graph: Graph, op: Operator, dp: bool, tp: bool) -> dict[str, str]:
    found = {}
    output = graph.tensor[op.outputs[0]].shape
    if dp and output[:1] == (graph.batch,):
        use = op.rule.outputs[0][0]
        if use is not None:
            found["dp"] = use.id
    if tp and (".attn" in op.module or ".mlp" in op.module):
        if op.target == "aten.linear.default":
            found["tp"] = "k" if op.module.endswith((".out", ".down")) else "n"
        elif "h" in op.rule.identifiers:
            found["tp"] = "h"
        elif op.target == "aten.gelu.default":
            found["tp"] = "c"
    return found
