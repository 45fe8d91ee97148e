"""Predicates: what may be split, placed and replicated."""

from __future__ import annotations

from collections.abc import Sequence

from searchspace.graph import Graph, Operator
from searchspace.layout import Layout, Split
from searchspace.mesh import Mesh
from searchspace.microbatch import TimeAxis
from searchspace.rule import Choice


def can_replicate(graph: Graph, op: Operator) -> bool:
    """Whether several stages may each run ``op``: cheap to repeat, and the same everywhere."""
    return (
        not op.random
        and not any(graph.tensor[name].requires_grad for name in op.outputs)
        and not any(graph.tensor[name].kind == "parameter" for name in op.inputs)
    )


def split_problem(
    graph: Graph, op: Operator, choices: Sequence[Choice], mesh: Mesh, time: TimeAxis | None = None
) -> str | None:
    """Why ``op`` cannot be split by ``choices`` over ``mesh``, or None when it can.

    Every identifier needs at least as many whole units as parts, also in the smallest micro-batch.
    """
    parts: dict[str, int] = {}
    for choice, size in zip(choices, mesh.shape, strict=True):
        if choice.label and not choice.label.startswith("+") and size > 1:
            parts[choice.label] = parts.get(choice.label, 1) * size
    for identifier, count in parts.items():
        units = op.rule.units(identifier, graph.shapes(op))
        if time is not None and time.micro_batches > 1 and time.labels[op.name] == identifier:
            groups = (graph.batch or 1) // time.granule
            units = units * (groups // time.micro_batches) // groups
        if units < count:
            return (
                f"its rule {op.rule.text!r} has {units} units of {identifier!r}"
                f"{' in a micro-batch' if time is not None and time.labels.get(op.name) == identifier else ''}"
                f" for {count} parts (a part would be empty)"
            )
    return None


def layout_problem(shape: Sequence[int], layout: Layout, mesh: Mesh) -> str | None:
    """Why a tensor of ``shape`` cannot lie in ``layout`` on ``mesh``, or None when it can."""
    lengths: dict[int, set[int]] = {}
    for placement, size in zip(layout, mesh.shape, strict=True):
        if not isinstance(placement, Split):
            continue
        dim, unit = placement.dim, placement.unit
        if dim >= len(shape):
            return f"{placement} splits a dimension that shape {list(shape)} does not have"
        cut = set()
        for length in sorted(lengths.get(dim, {shape[dim]})):
            units, rest = divmod(length, unit)
            if rest:
                return f"{placement} cuts whole units of {unit} in an extent of {length}"
            if units < size:
                return f"{placement} cuts an extent of {length} into {size} parts (a part would be empty)"
            cut |= {units // size * unit, -(-units // size) * unit}
        lengths[dim] = cut
    return None
