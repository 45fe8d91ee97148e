"""Which gradients exist, and in which layouts operators deliver them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from searchspace.graph import Graph, Operator
from searchspace.layout import Layout, P, delivered_gradient
from searchspace.resolve.resolution import StageIndex
from searchspace.rule import Choice

Choices = Mapping[tuple[StageIndex, str], tuple[Choice, ...]]


def with_gradient(graph: Graph) -> frozenset[str]:
    """Tensors whose gradient with respect to the loss is computed."""
    found = {graph.loss} if graph.loss and graph.tensor[graph.loss].requires_grad else set()
    for op in reversed(graph.operators):
        if any(name in found for name in op.outputs):
            found.update(name for name in op.inputs if graph.tensor[name].requires_grad)
    return frozenset(name for name in found if name is not None)


def delivered(choices: Sequence[Choice], op: Operator, partial: Sequence[bool] | None = None) -> list[Layout]:
    """The gradient layout that ``op`` delivers for each input; ``partial``: axes on which it passes sums on."""
    by_axis = [
        (P,) * len(op.inputs) if passed else delivered_gradient(choice.inputs, choice.outputs)
        for choice, passed in zip(choices, partial or (False,) * len(choices), strict=True)
    ]
    return [tuple(axis[i] for axis in by_axis) for i in range(len(op.inputs))]


def deferred_axes(
    graph: Graph, choices: Choices, gradients: frozenset[str]
) -> dict[tuple[StageIndex, str], tuple[bool, ...]]:
    """Axes on which the gradient of a tensor stays partial until it reaches the parameters.

    Backward is linear in the gradient, so an operator that is replicated may pass partial sums
    on.  Worth it where only parameters lie behind it (a position embedding): they are
    synchronised once a step anyway.
    """
    data = {tensor.name for tensor in graph.of_kind("input")}
    derived: set[str] = set()
    for op in graph.operators:
        if op.random or any(name in data for name in op.inputs):
            data.update(op.outputs)
        else:
            derived.update(name for name in op.outputs if name in gradients)
    found: dict[tuple[StageIndex, str], tuple[bool, ...]] = {}
    for (stage, name), chosen in reversed(tuple(choices.items())):
        op = graph.operator[name]
        if len(op.outputs) != 1 or op.outputs[0] not in derived:
            continue
        readers = [
            (reader, i)
            for reader, i in graph.consumers[op.outputs[0]]
            if any(name in gradients for name in reader.outputs)
        ]
        if all((stage, reader.name) in choices for reader, _ in readers):
            partial = [
                delivered(choices[stage, reader.name], reader, found.get((stage, reader.outputs[0])))[i]
                for reader, i in readers
            ]
            found[stage, op.outputs[0]] = tuple(
                not choice.label and any(layout[axis] == P for layout in partial) for axis, choice in enumerate(chosen)
            )
    return found
