"""Plans a Megatron user would write for the hand-made GPT: DP x TP x PP, ZeRO, recompute."""

from __future__ import annotations

from searchspace.graph import Graph, Operator
from searchspace.plan import (
    ClusterInfo,
    Lane,
    ModelInfo,
    Order,
    ParameterPlan,
    Placement,
    Plan,
    Recipe,
    SiteLayouts,
    Stage,
    Transformation,
)
from searchspace.schedule import SCHEDULES, tasks_text


def uniform(
    graph: Graph,
    layers: int,
    dp: int = 1,
    tp: int = 1,
    pp: int = 1,
    micro_batches: int = 1,
    schedule: str = "1f1b",
    recompute: bool = False,
    zero: int = 0,
    recipe: Recipe | None = None,
) -> Plan:
    """``layers`` are dealt to ``pp`` stages; embeddings go first, norm, head and loss last."""
    stages: list[list[str]] = [[] for _ in range(pp)]
    for op in graph.operators:
        path = op.module.split(".")
        layer = int(path[1]) if path[0] == "h" else None
        first = path[0] in ("", "wte", "wpe") and op.name.split("_")[0] not in ("sum", "count", "div")
        index = layer * pp // layers if layer is not None else 0 if first else pp - 1
        stages[index].append(op.name)
    operators = {}
    for op in graph.operators:
        labels = {}
        if dp > 1 and (label := batch_label(graph, op)):
            labels["dp"] = label
        if tp > 1 and (label := tensor_label(op)):
            labels["tp"] = label
        if labels:
            operators[op.name] = labels
    per_stage = dp * tp
    parameters = {}
    if zero and dp > 1:
        for tensor in graph.parameters:
            if tensor.shape[0] % (dp * tp):
                continue
            split = {"dp": "S(0)"}
            site = SiteLayouts(stored=split, gradient=split) if zero == 3 else SiteLayouts()
            homes = [i for i, names in enumerate(stages)
                     if any(tensor.name in graph.operator[n].inputs for n in names)]  # fmt: skip
            parameters[tensor.source] = ParameterPlan(optimizer=split, sites=dict.fromkeys(homes, site))
    devices = [tuple(range(i * per_stage, (i + 1) * per_stage)) for i in range(pp)]
    orders = SCHEDULES[schedule](pp, micro_batches)
    return Plan(
        model=ModelInfo(name=graph.name, fingerprint=graph.fingerprint),
        cluster=ClusterInfo(name="test", devices=per_stage * pp),
        recipe=recipe or Recipe(),
        transformation=Transformation(
            micro_batches=micro_batches,
            operators=operators,
            parameters=parameters,
            recompute=tuple(f"h.{i}" for i in range(layers)) if recompute else (),
        ),
        placement=Placement(
            stages=tuple(
                Stage(axes={"dp": dp, "tp": tp}, devices=d, operators=tuple(names))
                for d, names in zip(devices, stages, strict=True)
            )
        ),
        order=Order(lanes=tuple(Lane(devices=d, tasks=tasks_text(o)) for d, o in zip(devices, orders, strict=True))),
    )


def batch_label(graph: Graph, op: Operator) -> str | None:
    """The identifier of the batch: the first dimension of inputs whose extent is the batch."""
    for uses, name in zip(op.rule.inputs + op.rule.outputs, op.inputs + op.outputs, strict=True):
        tensor = graph.tensor[name]
        if tensor.kind != "parameter" and tensor.shape[:1] == (graph.batch,) and uses[0] is not None:
            return uses[0].id
    return "+0" if "+0" in op.rule.choices and op.module == "loss" else None


def tensor_label(op: Operator) -> str | None:
    """Megatron's choice for an operator of a layer."""
    kind, last = op.name.rsplit("_", 1)[0], op.module.rsplit(".", 1)[-1]
    if kind == "linear":
        return "n" if last in ("q", "k", "v", "up", "head") else "k" if last in ("out", "down") else None
    if op.module in ("wte", "loss") and "v" in op.rule.choices:
        return "v"
    if op.module.endswith(".attn") or last in ("q", "k", "v"):
        return "h" if "h" in op.rule.choices else None
    return op.rule.outputs[0][-1].id if kind == "gelu" and op.rule.outputs[0][-1] else None


def whole(graph: Graph, recipe: Recipe | None = None) -> Plan:
    """Everything on one device, in one micro-batch."""
    return Plan(
        model=ModelInfo(name=graph.name, fingerprint=graph.fingerprint),
        cluster=ClusterInfo(name="test", devices=1),
        recipe=recipe or Recipe(),
        transformation=Transformation(),
        placement=Placement(
            stages=(Stage(axes={"x": 1}, devices=(0,), operators=tuple(op.name for op in graph.operators)),)
        ),
        order=Order(lanes=(Lane(devices=(0,), tasks="0F0 0B0"),)),
    )
