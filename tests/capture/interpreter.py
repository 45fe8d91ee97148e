"""An oracle: runs a captured graph's operators in order with plain torch, at whole shapes."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch

from autoplan.capture import Captured
from autoplan.operators import resolve
from searchspace.graph import (
    GlobalSize,
    Graph,
    InputRef,
    LocalEnd,
    LocalOffset,
    LocalSize,
    Operator,
    Symbol,
    TensorDim,
    operator_number,
)

Tensors = dict[str, torch.Tensor]


def run_graph(graph: Graph, tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """All tensors of the graph from its inputs, parameters, buffers and constants."""
    found = dict(tensors)
    for op in graph.operators:
        results = run_operator(graph, op, [found[name] for name in op.inputs])
        for name, result in zip(op.outputs, results, strict=True):
            expected = graph.tensor[name]
            assert (tuple(result.shape), str(result.dtype)) == (expected.shape, f"torch.{expected.dtype}"), (op, result)
            assert result.requires_grad == expected.requires_grad, (op.name, name, result.requires_grad)
            found[name] = result
    return found


def run_operator(graph: Graph, op: Operator, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    shapes = graph.shapes(op)

    def extent(of: TensorDim) -> int:
        return shapes[of.index + (len(op.inputs) if of.output else 0)][of.dim]

    def value(arg: Any) -> Any:
        match arg:
            case InputRef(index):
                return inputs[index]
            case LocalSize(of) | GlobalSize(of) | LocalEnd(of):
                return extent(of)
            case LocalOffset(_):
                return 0
            case Symbol("operator"):
                return operator_number(op.name)
            case Symbol("device"):
                return torch.device("cpu")
            case Symbol(name):
                return getattr(torch, name.removeprefix("torch."))
            case tuple():
                return [value(item) for item in arg]
        return arg

    with ExitStack() as stack:
        if op.context.no_grad:
            stack.enter_context(torch.no_grad())
        if op.context.autocast is not None:
            stack.enter_context(torch.autocast("cpu", dtype=getattr(torch, op.context.autocast), cache_enabled=False))
        returned = resolve(op.target)(*map(value, op.args), **{name: value(arg) for name, arg in op.kwargs})
    return list(returned) if isinstance(returned, list | tuple) else [returned]


def run_captured(captured: Captured, args: Any = (), kwargs: Any = None, loss_args: Any = ()) -> Tensors:
    """All tensors of a captured model for one call, with the module's present parameters and buffers."""
    tensors: Tensors = dict(captured.flatten_call(args, kwargs, loss_args))
    for name, parameter in captured.named_parameters().items():
        wanted = getattr(torch, captured.graph.tensor[name].dtype)
        needs = captured.graph.tensor[name].requires_grad
        tensors[name] = parameter.detach().to(wanted, copy=True).requires_grad_(needs)
    tensors.update({name: buffer.detach().clone() for name, buffer in captured.named_buffers().items()})
    tensors.update(captured.constants)
    with torch.set_grad_enabled(captured.mode == "train"):
        return run_graph(captured.graph, tensors)
