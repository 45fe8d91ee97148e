"""From choices to a plan: stages, labels and parameter layouts written in a plan's own terms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autoplan.search.figures import ParameterLayouts
from autoplan.search.folding import Folding
from searchspace.graph import Graph
from searchspace.layout import Layout, Partial, R
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
from searchspace.schedule import gpipe, one_f_one_b, tasks_text


@dataclass(frozen=True)
class StageDraft:
    """One stage before it is written down.

    Fields
        axes, devices: the mesh.
        operators: names, repeatable ones included.
        labels: by operator and axis; what is left out is replicated.
        parameters: layouts by parameter tensor; what is left out follows its readers.
        recompute, separate: patterns of regions.
    """

    axes: Mapping[str, int]
    devices: tuple[int, ...]
    operators: tuple[str, ...]
    labels: Mapping[str, Mapping[str, str]]
    parameters: Mapping[str, ParameterLayouts] = field(default_factory=dict)
    recompute: tuple[str, ...] = ()
    separate: tuple[str, ...] = ()


def assemble(
    graph: Graph,
    cluster: ClusterInfo,
    recipe: Recipe,
    drafts: Sequence[StageDraft],
    micro_batches: int,
    schedule: str = "1f1b",
) -> Plan:
    """The plan of ``drafts`` in forward order; ``schedule`` is ``"1f1b"`` or ``"gpipe"``."""
    labels: dict[str, dict[str, str]] = {}
    position = {op.name: i for i, op in enumerate(graph.operators)}
    for draft in drafts:
        for name in draft.operators:
            if draft.labels.get(name):
                labels.setdefault(name, {}).update(draft.labels[name])
    stages = tuple(
        Stage(
            axes=dict(draft.axes),
            devices=draft.devices,
            operators=tuple(sorted(draft.operators, key=position.__getitem__)),
        )
        for draft in drafts
    )
    transformation = Transformation(
        micro_batches=micro_batches,
        operators={name: labels[name] for name in sorted(labels, key=position.__getitem__)},
        parameters=_parameters(graph, drafts),
        recompute=tuple(dict.fromkeys(pattern for draft in drafts for pattern in draft.recompute)),
        separate=tuple(dict.fromkeys(pattern for draft in drafts for pattern in draft.separate)),
    )
    order = Order(lanes=_lanes(drafts, micro_batches, schedule, recipe.mode == "train"))
    model = ModelInfo(name=graph.name, fingerprint=graph.fingerprint, signature=graph.signature)
    return Plan(
        model=model,
        cluster=cluster,
        recipe=recipe.model_copy(update={"global_batch": graph.batch}) if recipe.global_batch is None else recipe,
        transformation=transformation,
        placement=Placement(stages=stages),
        order=order,
    )


def _lanes(drafts: Sequence[StageDraft], micro_batches: int, schedule: str, training: bool) -> tuple[Lane, ...]:
    if training and schedule == "1f1b":
        orders = one_f_one_b(len(drafts), micro_batches)
    else:
        orders = gpipe(len(drafts), micro_batches, backward=training)
    return tuple(
        Lane(devices=draft.devices, tasks=tasks_text(tasks)) for draft, tasks in zip(drafts, orders, strict=True)
    )


def _parameters(graph: Graph, drafts: Sequence[StageDraft]) -> dict[str, ParameterPlan]:
    """Entries of the parameters whose layouts differ from what their readers imply."""
    readers = [set(draft.operators) for draft in drafts]
    found = {}
    for tensor in graph.parameters:
        homes = [
            (index, draft.parameters[tensor.name])
            for index, draft in enumerate(drafts)
            if tensor.name in draft.parameters
            and any(op.name in readers[index] for op, _ in graph.consumers[tensor.name])
        ]
        if not homes:
            continue
        sites = {}
        for index, layouts in homes:
            names = tuple(drafts[index].axes)
            single = sum(op.name in readers[index] for op, _ in graph.consumers[tensor.name]) == 1
            implied = tuple(R if isinstance(p, Partial) else p for p in layouts.used[0])
            site = SiteLayouts(
                stored={} if single and layouts.stored == implied else _entries(names, layouts.stored),
                gradient={}
                if layouts.gradient is None or (single and layouts.gradient == layouts.used[1])
                else _entries(names, layouts.gradient),
            )
            if site.stored or site.gradient:
                sites[index] = site
        home, layouts = homes[0]
        optimizer = {
            axis: entry
            for axis, entry in _entries(tuple(drafts[home].axes), layouts.optimizer).items()
            if layouts.optimizer != layouts.stored
        }
        if sites or optimizer:
            found[tensor.source] = ParameterPlan(optimizer=optimizer, sites=sites)
    return found


def _entries(names: Sequence[str], layout: Layout) -> dict[str, str]:
    return {name: str(placement) for name, placement in zip(names, layout, strict=True)}


def gathers(layouts: ParameterLayouts) -> bool:
    """Whether a parameter is stored in parts and gathered for each use (ZeRO-3)."""
    return any(s != u and not isinstance(u, Partial) for s, u in zip(layouts.stored, layouts.used[0], strict=True))


def gathering_blocks(
    graph: Graph, blocks: Sequence[Sequence[str]], parameters: Mapping[str, ParameterLayouts]
) -> list[Sequence[str]]:
    """The blocks that gather parameters: as segments of their own they hold one block's at a time."""
    names = {name for name, layouts in parameters.items() if gathers(layouts)}
    return [b for b in blocks if any(i in names for name in b for i in graph.operator[name].inputs)]


def stage_operators(graph: Graph, folding: Folding, cuts: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """The operators of each stage: its own (``cuts``), and the repeatable ones that it needs.

    What no stage needs belongs to the first.
    """
    repeatable = set(folding.repeatable)
    stages = []
    used: set[str] = set()
    for own in cuts:
        needed: dict[str, None] = {}
        pending = list(own)
        while pending:
            for name in graph.operator[pending.pop()].inputs:
                producer = graph.producer.get(name)
                if producer is not None and producer.name in repeatable and producer.name not in needed:
                    needed[producer.name] = None
                    pending.append(producer.name)
        used.update(needed)
        stages.append([*own, *needed])
    if stages:
        stages[0] += [name for name in folding.repeatable if name not in used]
    return [tuple(names) for names in stages]


class RegionNames:
    """How a plan writes the recompute region of consecutive operators: a module if it is one, else a range."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._owned: dict[str, int] = {}
        for op in graph.operators:
            for path in _prefixes(op.module):
                self._owned[path] = self._owned.get(path, 0) + 1

    def pattern(self, names: Sequence[str]) -> str:
        """The module that holds exactly ``names``, or ``first..last``."""
        modules = [self._graph.operator[name].module for name in names]
        for path in _prefixes(modules[0]):
            if self._owned[path] == len(names) and all(m == path or m.startswith(path + ".") for m in modules):
                return path
        return names[0] if len(names) == 1 else f"{names[0]}..{names[-1]}"


def _prefixes(path: str) -> list[str]:
    """``"a.b.c"`` as ``["a", "a.b", "a.b.c"]``."""
    parts = path.split(".") if path else []
    return [".".join(parts[: i + 1]) for i in range(len(parts))]
