"""Where dimensions come from: which choice of an operator runs along the batch, which along the inputs at all."""

from __future__ import annotations

from collections.abc import Sequence

from searchspace.graph import Graph, Operator
from searchspace.layout import P, Partial, Placement, R, Split
from searchspace.rule import Choice


def batch_labels(graph: Graph) -> dict[str, str]:
    """For each operator the choice that splits it along the batch ("" where it cannot be).

    Sums over the batch are passed on as partial sums through linear operators.
    """
    placed: dict[str, Placement] = {
        t.name: Split(t.batch_dim) if t.kind == "input" and t.batch_dim is not None else R for t in graph.tensors
    }
    found = {}
    for op in graph.operators:
        choice = _batch_choice(op, [placed[name] for name in op.inputs])
        found[op.name] = choice.label
        for name, placement in zip(op.outputs, choice.outputs, strict=True):
            placed[name] = Split(placement.dim) if isinstance(placement, Split) else placement
    return found


def _batch_choice(op: Operator, have: Sequence[Placement]) -> Choice:
    cut = {i: p.dim for i, p in enumerate(have) if isinstance(p, Split)}
    partial = [i for i, p in enumerate(have) if isinstance(p, Partial)]
    for choice in op.rule.choices.values() if cut else ():
        wanted = [choice.inputs[i] for i in cut]
        if all(isinstance(w, Split) and w.dim == dim for w, dim in zip(wanted, cut.values(), strict=True)):
            return choice
    passing = [c for c in op.rule.choices.values() if c.label.startswith("+")] if partial and not cut else []
    for choice in passing:
        if any(choice.inputs[i] == have[i] for i in partial) and all(
            choice.inputs[i] != P or have[i] == P for i in range(len(have))
        ):
            return choice
    return op.rule.choices[""]


def data_identifiers(graph: Graph) -> dict[str, frozenset[str]]:
    """For each operator the identifiers that run along dimensions of the model's inputs (batch, sequence...)."""
    marked: dict[str, frozenset[int]] = {t.name: frozenset(range(len(t.shape))) for t in graph.of_kind("input")}
    found = {}
    for op in graph.operators:
        along = frozenset(
            use.id
            for name, uses in zip(op.inputs, op.rule.inputs, strict=True)
            for dim, use in enumerate(uses)
            if use is not None and dim in marked.get(name, ())
        )
        found[op.name] = along
        for name, uses in zip(op.outputs, op.rule.outputs, strict=True):
            marked[name] = frozenset(dim for dim, use in enumerate(uses) if use is not None and use.id in along)
    return found
