"""The same graph at another batch size, for planning: no second capture, no weight."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from searchspace.errors import IllegalPlanError
from searchspace.graph import Graph, Operator, Tensor
from searchspace.microbatch import batch_dims


def rebatch(graph: Graph, batch: int) -> Graph:
    """``graph`` with ``batch`` samples: every dimension that carries the batch is scaled.

    The result is for planning: sizes that the model's own Python code computed from the batch
    (``x / x.size(0)``) keep their captured value.  Raises IllegalPlanError when the model has no
    batch dimension or an operator couples samples in a way that hides it.
    """
    if graph.batch == batch:
        return graph
    if graph.batch is None:
        raise IllegalPlanError(f"{graph.name} has no batch dimension; it cannot be planned for a batch of {batch}")
    if batch < 1:
        raise IllegalPlanError(f"expected a batch of at least 1, got {batch}")
    if graph.batch == 1:
        raise IllegalPlanError(
            f"{graph.name} was captured with a batch of 1, where the batch dimension cannot be told from others; "
            "capture it with example inputs of batch 2 or more"
        )
    dims = batch_dims(graph)
    old = graph.batch
    sizes: dict[str, tuple[int, ...]] = {}
    tensors = []
    for tensor in graph.tensors:
        shape = list(tensor.shape)
        if tensor.name in dims:
            extent = shape[dims[tensor.name]]
            if extent * batch % old:
                raise IllegalPlanError(f"{tensor.name} keeps samples together; a batch of {batch} does not fit them")
            shape[dims[tensor.name]] = extent * batch // old
        sizes[tensor.name] = tuple(shape)
        tensors.append(replace(tensor, shape=tuple(shape)))
    before = {t.name: t for t in graph.tensors}
    operators = [_scaled(op, before, sizes) for op in graph.operators]
    return replace(graph, tensors=tuple(tensors), operators=tuple(operators), batch=batch)


def _scaled(op: Operator, before: dict[str, Tensor], sizes: dict[str, tuple[int, ...]]) -> Operator:
    """Work and saved bytes grow with the batch where any of the operator's tensors does."""
    for name in op.outputs + op.inputs:
        if sizes[name] != before[name].shape:
            ratio = prod(sizes[name]) / before[name].elements
            return replace(op, flops=op.flops * ratio, saved_extra_bytes=int(op.saved_extra_bytes * ratio))
    return op
