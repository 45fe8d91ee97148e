"""The time axis: how cutting the batch into micro-batches splits every tensor.

Micro-batches are an op-trans like any other, along an axis that one device walks through in time.
On that axis a tensor is split (each micro-batch holds its samples), replicated (the same for all)
or partial (micro-batches hold summands: a loss).  Unlike on a mesh, nothing can be gathered from
micro-batches that have not run yet, so conversions are restricted:

    R -> S   a slice                             always
    R -> P   the value in micro-batch 0, zero elsewhere   always
    P -> R, S -> R   never: the operator couples samples

An operator that couples samples is refused by name, unless it depends on data alone (a count of
valid tokens, a mask): the whole batch is there when a step starts, so it and what leads to it run
*once*, on the whole.  Gradients of replicated tensors are partial on this axis; they accumulate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import gcd

from searchspace.errors import IllegalPlanError
from searchspace.graph import Graph, Operator
from searchspace.layout import Partial, Placement, R, Region, Split, refine, whole
from searchspace.rule import Choice


@dataclass(frozen=True)
class TimeAxis:
    """How a graph is cut into ``micro_batches``.

    Fields
        labels: the choice of each operator on the time axis.
        placement: of each tensor where it is produced.
        once: operators that run once for all micro-batches: they need no gradient, and either do not
            depend on the batch or must see the whole of it.
        granule: samples that must stay together.
    """

    graph: Graph
    micro_batches: int
    labels: Mapping[str, str]
    placement: Mapping[str, Placement]
    once: frozenset[str]
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
        return TimeAxis(graph, 1, {op.name: "" for op in graph.operators}, free, frozenset())
    batch = graph.batch
    if batch is None:
        raise IllegalPlanError(f"{graph.name} has no batch dimension to cut into {micro_batches} micro-batches")
    if batch < micro_batches:
        raise IllegalPlanError(f"a batch of {batch} is smaller than {micro_batches} micro-batches")

    labels, dims, granule = _propagate(graph, batch, strict=True)
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
    once: dict[str, None] = {}
    for op in graph.operators:
        same = labels[op.name] == "" and all(dims[name] == R for name in op.outputs)
        early = all(graph.producer[name].name in once for name in op.inputs if name in graph.producer)
        if same and early and not op.random and not any(graph.tensor[name].requires_grad for name in op.outputs):
            once[op.name] = None
    return TimeAxis(graph, micro_batches, labels, placement_of, frozenset(once), granule)


def batch_dims(graph: Graph) -> dict[str, int]:
    """The dimension that carries the batch, for each tensor that has one.

    Unlike :func:`time_axis` this does not ask whether the batch can be cut: batch statistics are
    tensors without a batch dimension.  Raises IllegalPlanError when the model has no batch
    dimension or an operator hides it.
    """
    if graph.batch is None:
        raise IllegalPlanError(f"{graph.name} has no batch dimension")
    labels, dims, _ = _propagate(graph, graph.batch, strict=False)
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


def _propagate(graph: Graph, batch: int, strict: bool) -> tuple[dict[str, str], dict[str, Placement], int]:
    """Labels of operators, placements of tensors (units not set), granule.

    Not ``strict``: sums over the batch are whole, and an operator that couples samples sees the
    whole batch, whatever it depends on.
    """
    whole_batch: dict[str, None] = {}
    while True:
        found = _Propagation(graph, batch, whole_batch, strict)
        coupled = found.run()
        if coupled is None:
            return found.labels, found.dims, found.granule
        op, why = coupled
        producers = [graph.producer[name] for name in op.inputs if name in graph.producer]
        added = [_add_ancestors(graph, candidate, whole_batch) for candidate in (op, *producers)]
        if not any(added):
            if strict:
                raise _coupled(op, why)
            whole_batch[op.name] = None


@dataclass
class _Propagation:
    """One pass over the operators; those in ``whole_batch`` see the whole batch."""

    graph: Graph
    batch: int
    whole_batch: Mapping[str, None]
    strict: bool
    labels: dict[str, str] = field(default_factory=dict)
    dims: dict[str, Placement] = field(default_factory=dict)
    granule: int = 1

    def run(self) -> tuple[Operator, str] | None:
        """The first operator that couples samples, and why; None when the pass succeeds."""
        graph, dims = self.graph, self.dims
        for tensor in graph.tensors:
            if tensor.kind != "activation":
                split = tensor.kind == "input" and tensor.batch_dim is not None
                dims[tensor.name] = Split(tensor.batch_dim or 0) if split else R
        for op in graph.operators:
            choice = op.rule.choices[""] if op.name in self.whole_batch else self._choose(op)
            if isinstance(choice, str):
                return op, choice
            self.labels[op.name] = choice.label
            for name, placement in zip(op.inputs + op.outputs, choice.inputs + choice.outputs, strict=True):
                if isinstance(placement, Split):
                    # extent * granule / batch must be whole units
                    wanted = self.batch * placement.unit
                    self.granule = _lcm(self.granule, wanted // gcd(wanted, graph.tensor[name].shape[placement.dim]))
            for name, placement in zip(op.outputs, choice.outputs, strict=True):
                summed = isinstance(placement, Partial) and not self.strict
                dims[name] = Split(placement.dim) if isinstance(placement, Split) else R if summed else placement
        return None

    def _choose(self, op: Operator) -> Choice | str:
        """The choice on the time axis, or why there is none."""
        have = [self.dims[name] for name in op.inputs]
        fixed = [i for i, p in enumerate(have) if p != R]
        if not fixed:
            return op.rule.choices[""]
        for choice in op.rule.choices.values():
            if all(_fits(choice.inputs[i], have[i]) for i in fixed):
                return choice
        for i in fixed:
            where = have[i]
            if isinstance(where, Split) and not any(_fits(c.inputs[i], where) for c in op.rule.choices.values()):
                return f"input {op.inputs[i]} cannot be cut along dimension {where.dim}"
        partial = [op.inputs[i] for i in fixed if isinstance(have[i], Partial)]
        if partial:
            return f"it needs the sum of {partial[0]} over all micro-batches"
        return f"inputs {[op.inputs[i] for i in fixed]} cannot be cut together"


def _fits(wanted: Placement, have: Placement) -> bool:
    return wanted == have or _same_dim(wanted, have)


def _same_dim(wanted: Placement, have: Placement) -> bool:
    return isinstance(wanted, Split) and isinstance(have, Split) and wanted.dim == have.dim


def _add_ancestors(graph: Graph, op: Operator, found: dict[str, None]) -> bool:
    """Add ``op`` and all that leads to it; false if that is nothing new, or more than data.

    Data alone: no parameter, no gradient, no random numbers.
    """
    reached: dict[str, None] = {}
    pending = [op]
    while pending:
        at = pending.pop()
        tensors = [graph.tensor[name] for name in at.inputs + at.outputs]
        if at.random or any(t.kind == "parameter" or t.requires_grad for t in tensors):
            return False
        if at.name not in reached:
            reached[at.name] = None
            pending.extend(graph.producer[name] for name in at.inputs if name in graph.producer)
    new = any(name not in found for name in reached)
    found.update(reached)
    return new


def _coupled(op: Operator, why: str) -> IllegalPlanError:
    return IllegalPlanError(
        f"operator {op.name!r} ({op.target}) couples the samples of a batch: {why}; "
        "micro_batches must be 1 for this model"
    )


def _lcm(a: int, b: int) -> int:
    return a // gcd(a, b) * b
