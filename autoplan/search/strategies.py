"""The strategies of one operator on one mesh: a choice of its rule for each axis, legal at this size."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

from costmodel.shards import largest_shard
from searchspace.graph import Family, Graph, Operator
from searchspace.layout import Layout, Shape
from searchspace.mesh import Mesh
from searchspace.microbatch import TimeAxis
from searchspace.resolve import split_problem
from searchspace.rule import Choice

Strategy = tuple[Choice, ...]
"""One choice for each mesh axis."""

Allow = Callable[[Operator, str, str], bool]
"""Whether an operator may take the choice (label) on the axis (name)."""

CHEAP: tuple[Family, ...] = ("pointwise", "view", "data", "reduction", "creation", "loss", "embedding")
"""Families that may run on partial sums: repeating them undivided costs little."""


def everything(op: Operator, axis: str, label: str) -> bool:
    """Every choice, but partial sums through expensive operators (which would repeat all their work)."""
    return not label.startswith("+") or op.family in CHEAP


def strategies(
    graph: Graph, op: Operator, mesh: Mesh, time: TimeAxis, allow: Allow = everything
) -> tuple[Strategy, ...]:
    """All legal strategies of ``op``, replication first; axes of size 1 are replicated."""
    per_axis = []
    for name, size in mesh.axes:
        labels = [label for label in op.rule.choices if size > 1 and label and allow(op, name, label)]
        replicated = op.rule.choices[""]
        choices = [op.rule.choices[label] for label in labels]
        per_axis.append([replicated, *choices] if size == 1 or allow(op, name, "") or not choices else choices)
    found = [chosen for chosen in product(*per_axis) if split_problem(graph, op, chosen, mesh, time) is None]
    if not found:
        found = [(op.rule.choices[""],) * len(mesh.axes)]
    distinct: dict[tuple[tuple[Layout, ...], tuple[Layout, ...]], Strategy] = {}
    for chosen in found:
        distinct.setdefault((input_layouts(chosen), output_layouts(chosen)), chosen)
    return tuple(distinct.values())


def input_layouts(strategy: Strategy) -> tuple[Layout, ...]:
    return tuple(zip(*(choice.inputs for choice in strategy), strict=True))


def output_layouts(strategy: Strategy) -> tuple[Layout, ...]:
    return tuple(zip(*(choice.outputs for choice in strategy), strict=True))


def local_shapes(graph: Graph, op: Operator, strategy: Strategy, mesh: Mesh, time: TimeAxis) -> tuple[Shape, ...]:
    """Shapes of inputs, then outputs, on the fullest device in the fullest micro-batch."""
    shapes, count = graph.shapes(op), time.micro_batches
    inputs = (
        largest_shard(shapes[i], layout, mesh.shape, time.consumed(op, i), count)
        for i, layout in enumerate(input_layouts(strategy))
    )
    outputs = (
        largest_shard(graph.tensor[name].shape, layout, mesh.shape, time.placement[name], count)
        for name, layout in zip(op.outputs, output_layouts(strategy), strict=True)
    )
    return (*inputs, *outputs)
