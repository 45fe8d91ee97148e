"""The time axis: how cutting the batch into micro-batches splits every tensor.

Micro-batches are an op-trans like any other, along an axis that one device walks through in time.
On that axis a tensor is split (each micro-batch holds its samples), replicated (the same for all)
or partial (micro-batches hold summands: a loss).  Unlike on a mesh, nothing can be gathered from
micro-batches that have not run yet, so conversions are restricted:

    R -> S   a slice                             always
    R -> P   the value in micro-batch 0, zero elsewhere   always
    P -> R   only where the value depends on data alone (a count of valid tokens): a *prologue*
             computes it for all micro-batches before the first forward
    S -> R   never: the operator couples samples, and is refused by name

Gradients of replicated tensors are partial on this axis; they accumulate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd

from searchspace.errors import IllegalPlanError
from searchspace.graph import Graph, Operator
from searchspace.layout import P, Partial, Placement, R, Region, Split, refine, whole
from searchspace.rule import Choice


@dataclass(frozen=True)
class TimeAxis:
    """How a graph is cut into ``micro_batches``.

    Fields
        labels: the choice of each operator on the time axis.
        placement: of each tensor where it is produced.
        once: operators that are the same for all micro-batches and need no gradient.
        prologue: operators that run for all micro-batches before the first forward.
        granule: samples that must stay together.
    """

    graph: Graph
    micro_batches: int
    labels: Mapping[str, str]
    placement: Mapping[str, Placement]
    once: frozenset[str]
    prologue: frozenset[str]
    granule: int = 1

    def base(self, tensor: str, placement: Placement, micro_batch: int) -> Region:
        """The region that ``micro_batch`` covers of a tensor placed so on the time axis."""
        region = whole(self.graph.tensor[tensor].shape)
        return refine(region, placement, self.micro_batches, max(micro_batch, 0))

    def consumed(self, op: Operator, index: int) -> Placement:
        """The placement in which ``op`` reads its input ``index``."""
        wanted = op.rule.choices[self.labels[op.name]].inputs[index]
        if isinstance(wanted, Split):
            return self._split(op.inputs[index], wanted.dim)
        return wanted

    def _split(self, tensor: str, dim: int) -> Split:
        assert self.graph.batch is not None
        return Split(dim, self.graph.tensor[tensor].shape[dim] * self.granule // self.graph.batch)


def time_axis(graph: Graph, micro_batches: int) -> TimeAxis:
    """Propagate the cut of the batch through ``graph``.

    Raises IllegalPlanError naming the operator that couples samples, or stating batch and number
    of micro-batches when the batch is too small.
    """
    if micro_batches == 1:
        free = {t.name: R for t in graph.tensors}
        return TimeAxis(graph, 1, {op.name: "" for op in graph.operators}, free, frozenset(), frozenset())
    batch = graph.batch
    if batch is None:
        raise IllegalPlanError(f"{graph.name} has no batch dimension to cut into {micro_batches} micro-batches")
    if batch < micro_batches:
        raise IllegalPlanError(f"a batch of {batch} is smaller than {micro_batches} micro-batches")

    labels, dims, prologue, granule = _propagate(graph, batch, strict=True)
    if batch // granule < micro_batches or batch % granule:
        raise IllegalPlanError(
            f"a batch of {batch} whose samples stay together in groups of {granule} "
            f"cannot be cut into {micro_batches} micro-batches"
        )
    for buffer, new in graph.buffer_updates:
        if dims[new] != R:
            raise _coupled(graph.producer[new], f"the new value of buffer {graph.tensor[buffer].source!r} needs all")
    placement_of = {
        name: Split(p.dim, graph.tensor[name].shape[p.dim] * granule // batch) if isinstance(p, Split) else p
        for name, p in dims.items()
    }
    once = frozenset(
        op.name
        for op in graph.operators
        if all(dims[n] == R for n in op.outputs)
        and labels[op.name] == ""
        and not any(graph.tensor[n].requires_grad for n in op.outputs)
        and not op.random
    )
    return TimeAxis(graph, micro_batches, labels, placement_of, once, frozenset(prologue) - once, granule)


def batch_dims(graph: Graph) -> dict[str, int]:
    """The dimension that carries the batch, for each tensor that has one.

    Unlike :func:`time_axis` this does not ask whether the batch can be cut: batch statistics are
    tensors without a batch dimension.  Raises IllegalPlanError when the model has no batch
    dimension or an operator hides it.
    """
    if graph.batch is None:
        raise IllegalPlanError(f"{graph.name} has no batch dimension")
    labels, dims, _, _ = _propagate(graph, graph.batch, strict=False)
    # What is made from nothing at the size of the batch (a mask) carries it where its readers say so.
    for op in reversed(graph.operators):
        choice = op.rule.choices[labels[op.name]]
        for name, placement in zip(op.outputs, choice.outputs, strict=True):
            if isinstance(dims[name], Split) and placement == R:
                wanted = dims[name]
                choice = next((c for c in op.rule.choices.values() if _same_dim(c.outputs[0], wanted)), choice)
        for name, placement in zip(op.inputs, choice.inputs, strict=True):
            if isinstance(placement, Split) and dims[name] == R and graph.tensor[name].kind == "activation":
                dims[name] = Split(placement.dim)
    return {name: placement.dim for name, placement in dims.items() if isinstance(placement, Split)}


def _propagate(
    graph: Graph, batch: int, strict: bool
) -> tuple[dict[str, str], dict[str, Placement], dict[str, None], int]:
    """Labels of operators, placements of tensors (units not set), prologue operators, granule."""
    dims: dict[str, Placement] = {}
    for tensor in graph.tensors:
        if tensor.kind != "activation":
            split = tensor.kind == "input" and tensor.batch_dim is not None
            dims[tensor.name] = Split(tensor.batch_dim or 0) if split else R
    labels: dict[str, str] = {}
    prologue: dict[str, None] = {}
    granule = 1
    for op in graph.operators:
        choice = _choose(graph, op, [dims[name] for name in op.inputs], prologue, strict)
        labels[op.name] = choice.label
        for name, placement in zip(op.inputs + op.outputs, choice.inputs + choice.outputs, strict=True):
            if isinstance(placement, Split):
                # extent * granule / batch must be whole units
                wanted = batch * placement.unit
                granule = _lcm(granule, wanted // gcd(wanted, graph.tensor[name].shape[placement.dim]))
        for name, placement in zip(op.outputs, choice.outputs, strict=True):
            dims[name] = Split(placement.dim) if isinstance(placement, Split) else placement
    return labels, dims, prologue, granule


def _choose(graph: Graph, op: Operator, have: list[Placement], prologue: dict[str, None], strict: bool) -> Choice:
    """The choice on the time axis; what it needs summed over micro-batches beforehand joins ``prologue``."""
    cut = [i for i, p in enumerate(have) if isinstance(p, Split)]
    partial = [i for i, p in enumerate(have) if isinstance(p, Partial)]
    if not cut and not partial:
        return op.rule.choices[""]
    best: tuple[int, Choice, dict[str, None]] | None = None
    reasons = []
    for choice in op.rule.choices.values():
        if not all(_same_dim(choice.inputs[i], have[i]) for i in cut):
            continue
        if not all(choice.inputs[i] in (R, have[i]) for i in partial):
            continue
        if not cut and not all(p in (R, P) for p in choice.inputs):
            continue
        early = [op.inputs[i] for i in partial if choice.inputs[i] == R]
        found: dict[str, None] = {}
        blocked = [name for name in early if strict and not _depends_on_data_alone(graph, name, found)]
        if blocked:
            reasons.append(f"it needs the sum of {blocked[0]} over all micro-batches, which depends on the forward")
        elif best is None or len(early) < best[0]:
            best = (len(early), choice, found)
    if best is None:
        split = have[cut[0]] if cut else None
        where = (
            f"input {op.inputs[cut[0]]} cannot be cut along its dimension {split.dim}"
            if isinstance(split, Split)
            else ""
        )
        raise _coupled(op, reasons[0] if reasons else where)
    prologue.update(best[2])
    return best[1]


def _same_dim(wanted: Placement, have: Placement) -> bool:
    return isinstance(wanted, Split) and isinstance(have, Split) and wanted.dim == have.dim


def _depends_on_data_alone(graph: Graph, name: str, found: dict[str, None]) -> bool:
    """Whether ``name`` needs no parameter, gradient or random numbers; its operators join ``found``."""
    pending = [name]
    while pending:
        tensor = graph.tensor[pending.pop()]
        op = graph.producer.get(tensor.name)
        if tensor.kind == "parameter" or tensor.requires_grad or (op is not None and op.random):
            return False
        if op is not None and op.name not in found:
            found[op.name] = None
            pending.extend(op.inputs)
    return True


def _coupled(op: Operator, why: str) -> IllegalPlanError:
    return IllegalPlanError(
        f"operator {op.name!r} ({op.target}) couples the samples of a batch: {why}; "
        "micro_batches must be 1 for this model"
    )


def _lcm(a: int, b: int) -> int:
    return a // gcd(a, b) * b
