"""Uniform plans: data x tensor (and sequence) x pipeline parallelism, ZeRO and recomputation, as a person writes them.

Nothing here knows a model.  Data parallelism splits every operator along the batch.  Tensor
parallelism is a strategy selection in which the batch may not be split and holding parameters is
expensive, so that every parameter that can be split is, at the least communication; without
``sequence`` no dimension of the model's inputs may be split either (Megatron-LM, arXiv 1909.08053),
with it activations between the split regions are split along the sequence (arXiv 2205.05198).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from autoplan.search.assembly import RegionNames, StageDraft, assemble, gathering_blocks, stage_operators
from autoplan.search.conversions import Conversions
from autoplan.search.figures import Figures, ParameterLayouts, Terms
from autoplan.search.folding import Folding, fold
from autoplan.search.lineage import batch_labels, data_identifiers
from autoplan.search.selection import Selection
from autoplan.search.solver import SolverOptions, solve
from autoplan.search.strategies import CHEAP, Strategy, local_shapes
from autoplan.search.wiring import Wiring, with_gradient
from searchspace.conversion import ElementCount
from searchspace.errors import IllegalPlanError
from searchspace.graph import Graph, Operator, Tensor
from searchspace.layout import Layout, P, R, Split, delivered_gradient
from searchspace.mesh import Mesh
from searchspace.microbatch import TimeAxis, time_axis
from searchspace.plan import ClusterInfo, Plan, Recipe
from searchspace.resolve import layout_problem

PARAMETER_PRICE = 1e6
"""Price of holding one element of a parameter, in elements moved: tensor parallelism splits what it can."""


def named_plan(
    graph: Graph,
    cluster: ClusterInfo,
    recipe: Recipe,
    *,
    dp: int = 1,
    tp: int = 1,
    pp: int = 1,
    sequence: bool = False,
    zero: int = 0,
    recompute: bool = False,
    micro_batches: int = 1,
    schedule: str = "1f1b",
    stage_sizes: Sequence[int] | None = None,
    folding: Folding | None = None,
) -> Plan:
    """The uniform plan with these degrees, on devices ``0 .. dp * tp * pp - 1``, tensor parallelism innermost.

    ``zero``: 1 splits the optimizer's copy over the data-parallel devices, 2 also the accumulated
    gradient, 3 also the stored weight.  ``recompute`` recomputes every repeated layer in backward.
    ``stage_sizes``: repeated layers per stage (or, where they do not add up to that, blocks of the
    folding).  Raises IllegalPlanError with the numbers when the model or the batch is too small.
    """
    for name, value in (("dp", dp), ("tp", tp), ("pp", pp), ("micro_batches", micro_batches)):
        if value < 1:
            raise IllegalPlanError(f"expected {name} >= 1, got {value}")
    if dp * tp * pp > cluster.devices:
        raise IllegalPlanError(
            f"dp {dp} x tp {tp} x pp {pp} = {dp * tp * pp} devices; the cluster has {cluster.devices}"
        )
    if zero not in (0, 1, 2, 3):
        raise IllegalPlanError(f"expected a ZeRO level of 0, 1, 2 or 3, got {zero}")
    if schedule not in ("1f1b", "gpipe"):
        raise IllegalPlanError(f"expected a schedule '1f1b' or 'gpipe', got {schedule!r}")
    if dp * micro_batches > 1 and (graph.batch or 0) < dp * micro_batches:
        raise IllegalPlanError(
            f"a batch of {graph.batch or 'no samples'} cannot be cut into {micro_batches} micro-batches "
            f"for {dp} data-parallel devices"
        )
    folding = folding or fold(graph)
    axes = {name: size for name, size in (("dp", dp), ("tp", tp)) if size > 1} or {"dp": 1}
    labels: dict[str, dict[str, str]] = {op.name: {} for op in graph.operators}
    if dp > 1:
        for name, label in batch_labels(graph).items():
            labels[name].update({"dp": label} if label else {})
    if tp > 1:
        for name, label in tensor_labels(graph, folding, tp, sequence).items():
            labels[name].update({"tp": label} if label else {})
    blocks = stage_blocks(graph, folding, pp, stage_sizes)
    regions = RegionNames(graph)
    drafts = []
    for index, names in enumerate(stage_operators(graph, folding, blocks)):
        devices = tuple(range(index * dp * tp, (index + 1) * dp * tp))
        mesh = Mesh(tuple(axes.items()), devices)
        parameters = uniform_parameters(graph, names, labels, mesh, zero) if zero and dp > 1 else {}
        again = _recomputed(graph, folding, blocks[index]) if recompute and recipe.mode == "train" else ()
        own = [[name for name in block.operators if name in names] for block in folding.blocks]
        gathering = gathering_blocks(graph, [block for block in own if block], parameters)
        apart = tuple(p for p in map(regions.pattern, gathering) if p not in again)
        drafts.append(StageDraft(axes, devices, names, labels, parameters, again, apart))
    return assemble(graph, cluster, recipe, drafts, micro_batches, schedule)


# -- tensor parallelism ------------------------------------------------------------------------------


def tensor_labels(graph: Graph, folding: Folding, parts: int, sequence: bool = False) -> dict[str, str]:
    """For each operator its choice on a tensor-parallel axis of ``parts`` devices ("": replicated)."""
    batch = {
        op.name: _identifiers(op, label)
        for op, label in zip(graph.operators, batch_labels(graph).values(), strict=True)
    }
    data = data_identifiers(graph)

    def allow(op: Operator, axis: str, label: str) -> bool:
        if label.startswith("+"):
            return op.family in CHEAP
        return label not in batch[op.name] and (sequence or label not in data[op.name])

    mesh = Mesh.line(parts, "tp")
    wiring = Wiring(
        graph, folding, mesh, time_axis(graph, 1), _HoldLess(graph, 0.01 if sequence else 0.0),
        Conversions(mesh, ElementCount(element_bytes=1)), with_gradient(graph), allow,
    )  # fmt: skip
    selection = Selection(wiring)
    problem = selection.problem(Terms(micro_batches=1 << 40, price_resident=PARAMETER_PRICE))  # steps do not count
    chosen = selection.labels(solve(problem, SolverOptions(gap=1e-6)).assignment)
    return {op.name: chosen[folding.groups[op.name]].get("tp", "") for op in graph.operators}


def _identifiers(op: Operator, label: str) -> frozenset[str]:
    return frozenset((label,)) if label and not label.startswith("+") else frozenset()


@dataclass(frozen=True)
class _HoldLess:
    """Figures that count elements: of matrices as operators use them, and (times ``activity``) of results.

    Vectors do not count: the bias of a row-parallel product is whole on every device.
    """

    graph: Graph
    activity: float

    def operator(self, op: Operator, strategy: Strategy, mesh: Mesh, time: TimeAxis) -> Figures:
        sizes = [prod(shape) for shape in local_shapes(self.graph, op, strategy, mesh, time)]
        used = sum(
            size
            for name, size in zip(op.inputs, sizes, strict=False)
            if self.graph.tensor[name].kind == "parameter" and len(self.graph.tensor[name].shape) > 1
        )
        return Figures(forward=self.activity * sum(sizes[len(op.inputs) :]), resident=float(used))

    def parameter(self, tensor: Tensor, layouts: ParameterLayouts, mesh: Mesh) -> Figures:
        return Figures()

    def shard_bytes(self, tensor: Tensor, layout: Layout, mesh: Mesh, time: TimeAxis) -> float:
        return 0.0

    def saved_by_maker(self, tensor: Tensor) -> bool:
        return True

    def accumulate(self, tensor: Tensor, held: Layout, mesh: Mesh) -> float:
        return 0.0


# -- stages ------------------------------------------------------------------------------------------


def stage_blocks(
    graph: Graph, folding: Folding, stages: int, sizes: Sequence[int] | None = None
) -> list[tuple[str, ...]]:
    """Operators (those outside of blocks left out) of each of ``stages`` stages, in order.

    Layers (repeated blocks) are shared out evenly, what comes before them goes to the first stage and
    what comes after to the last; models with too few layers are cut by floating point operations.
    """
    blocks = folding.blocks
    layers = [i for i, block in enumerate(blocks) if folding.counts[block.kind] > 1]
    if sizes is not None:
        if len(sizes) != stages or min(sizes) < 1 or sum(sizes) not in (len(layers), len(blocks)):
            raise IllegalPlanError(
                f"expected {stages} stage sizes >= 1 that add up to {len(layers)} layers or {len(blocks)} blocks, "
                f"got {list(sizes)}"
            )
        units = layers if sum(sizes) == len(layers) else list(range(len(blocks)))
        ends = np.cumsum(sizes).tolist()
    elif len(layers) >= stages:
        units = layers
        ends = [(s + 1) * len(layers) // stages for s in range(stages)]
    elif len(blocks) >= stages:
        units = list(range(len(blocks)))
        ends = balanced([_flops(graph, block.operators) for block in blocks], stages)
    else:
        names = [name for block in blocks for name in block.operators]
        if len(names) < stages:
            raise IllegalPlanError(f"{graph.name} has {len(names)} operators, too few for {stages} pipeline stages")
        ends = balanced([_flops(graph, (name,)) for name in names], stages)
        return [tuple(names[a:b]) for a, b in zip([0, *ends[:-1]], ends, strict=True)]
    starts = [0, *(units[end] for end in ends[:-1]), len(blocks)]
    return [tuple(name for block in blocks[a:b] for name in block.operators) for a, b in itertools.pairwise(starts)]


def _flops(graph: Graph, names: Sequence[str]) -> float:
    return sum(graph.operator[name].flops for name in names)


def balanced(weights: Sequence[float], parts: int) -> list[int]:
    """Ends of ``parts`` non-empty consecutive runs of ``weights`` whose heaviest is as light as possible."""
    count = len(weights)
    total = np.append(0.0, np.cumsum(weights))
    best = np.full((parts + 1, count + 1), np.inf)
    best[0, 0] = 0.0
    back = np.zeros((parts + 1, count + 1), dtype=int)
    for p in range(1, parts + 1):
        for end in range(p, count - (parts - p) + 1):
            worst = np.maximum(best[p - 1, :end], total[end] - total[:end])
            back[p, end] = int(worst.argmin())
            best[p, end] = worst[back[p, end]]
    ends, end = [], count
    for p in range(parts, 0, -1):
        ends.append(end)
        end = int(back[p, end])
    return ends[::-1]


# -- ZeRO and recomputation --------------------------------------------------------------------------


def uniform_parameters(
    graph: Graph, names: Sequence[str], labels: Mapping[str, Mapping[str, str]], mesh: Mesh, zero: int
) -> dict[str, ParameterLayouts]:
    """Layouts of the parameters of a stage at one ZeRO level over axis ``dp``; small ones stay whole."""
    inside = set(names)
    found = {}
    for tensor in graph.parameters:
        uses = [(op, i) for op, i in graph.consumers[tensor.name] if op.name in inside]
        if not uses or not tensor.requires_grad:
            continue
        read, delivered = [], []
        for op, i in uses:
            chosen = [op.rule.choices[labels[op.name].get(axis, "")] for axis in mesh.axis_names]
            read.append(tuple(choice.inputs[i] for choice in chosen))
            delivered.append(tuple(delivered_gradient(c.inputs, c.outputs)[i] for c in chosen))
        stored = tuple(p if isinstance(p, Split) and all(u[a] == p for u in read) else R for a, p in enumerate(read[0]))
        gradient = tuple(
            d[0] if all(p == d[0] for p in d) else P if P in d else R for d in zip(*delivered, strict=True)
        )
        axis = mesh.axis_index("dp")
        for dim in _by_size(tensor, stored):
            sharded: Layout = (*stored[:axis], Split(dim), *stored[axis + 1 :])
            if stored[axis] == R and layout_problem(tensor.shape, sharded, mesh) is None:
                reduced = (*gradient[:axis], Split(dim), *gradient[axis + 1 :]) if gradient[axis] == P else gradient
                found[tensor.name] = ParameterLayouts(
                    (read[0], delivered[0]),
                    sharded if zero == 3 else stored,
                    reduced if zero >= 2 else gradient,
                    sharded,
                )
                break
    return found


def _by_size(tensor: Tensor, stored: Layout) -> list[int]:
    """Dimensions, those that no axis splits yet first."""
    taken = {p.dim for p in stored if isinstance(p, Split)}
    return sorted(range(len(tensor.shape)), key=lambda d: (d in taken, d))


def _recomputed(graph: Graph, folding: Folding, names: Sequence[str]) -> tuple[str, ...]:
    """One region for each repeated layer among ``names``; for a model without layers, one for each block."""
    inside, regions = set(names), RegionNames(graph)
    repeated = [b for b in folding.blocks if folding.counts[b.kind] > 1]
    found = []
    for block in repeated or folding.blocks:
        members = [name for name in block.operators if name in inside]
        if any(graph.tensor[out].requires_grad for name in members for out in graph.operator[name].outputs):
            found.append(regions.pattern(members))
    return tuple(found)
