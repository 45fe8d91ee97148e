"""Composite operators: the rule is the user's and is verified, the cost is counted."""

from __future__ import annotations

import warnings
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from autoplan.capture import discovery
from autoplan.capture.call import Call, TensorMeta, Traits
from autoplan.capture.rules.building import needs_gradient
from autoplan.capture.verification import Case, check
from autoplan.operators import resolve
from autoplan.operators.composite import Binding, binding
from searchspace.errors import AutoplanWarning, CaptureError, RuleError
from searchspace.graph import DTYPE_BYTES, Argument, LocalOffset, TensorDim
from searchspace.notation import parse
from searchspace.rule import Rule

_TOLERANCE = 1e-4  # in float64 data; the function may compute in float32 inside


def composite(call: Call) -> Traits:
    """Traits of a call ``(tensors, key, starts)``; CaptureError where the rule does not describe the tensors."""
    tensors, key, _ = call.args
    assert isinstance(key, int)
    bound = binding(key)
    rule = _rule(call, bound)
    starts = tuple(LocalOffset(_place(rule, identifier)) for identifier in bound.owner.offsets.values())
    _verify(call, (tensors, key, starts), rule, bound)
    flops, saved, extra = _cost(call, bound)
    keeps = needs_gradient(call)
    return Traits(
        (tensors, key, starts), (), rule, "composite", flops,
        saved if keeps else (), (), extra if keeps else 0,
    )  # fmt: skip


def _rule(call: Call, bound: Binding) -> Rule:
    owner = bound.owner
    shapes = [t.shape for t in call.inputs]
    try:
        notation = parse(owner.rule)
        for what, terms, given in (("input", notation.inputs, call.inputs), ("result", notation.outputs, call.outputs)):
            expected = sum(term is not None for term in terms)
            if len(given) != expected:
                raise RuleError(f"rule {owner.rule!r} describes {expected} {what} tensors, got {len(given)}")
        return notation.rule([*shapes, *(t.shape for t in call.outputs)], owner.linear, **owner.sizes)
    except RuleError as error:
        arguments = [f"argument {i} {list(shape)}" for i, shape in enumerate(shapes[: len(bound.places)])]
        state = [f"{name} {list(shape)}" for name, shape in zip(bound.names, shapes[len(bound.places) :], strict=True)]
        raise CaptureError(
            f"composite {owner.name}: {error}; its tensors are {', '.join(arguments + state)}"
        ) from error


def _verify(call: Call, args: tuple[Argument, ...], rule: Rule, bound: Binding) -> None:
    """Run the operator whole and split on small tensors; CaptureError where the parts do not make the whole."""
    if not rule.identifiers:
        return
    name = bound.owner.name
    for inputs in ([t.shape for t in call.inputs], discovery.small_shapes(call.inputs)):
        if any(prod(shape) > discovery.LARGEST for shape in inputs):
            continue
        generator = torch.Generator().manual_seed(0)
        metas = [TensorMeta(s, t.dtype, t.requires_grad) for s, t in zip(inputs, call.inputs, strict=True)]
        tensors = tuple(discovery.data(t, generator) for t in metas)
        try:
            with torch.enable_grad():
                outputs = bound.run(tensors, (0,) * len(bound.owner.offsets))
            shapes = tuple(tuple(t.shape) for t in outputs)
            small = parse(bound.owner.rule).rule([*inputs, *shapes], bound.owner.linear, **bound.owner.sizes)
        except Exception:  # the function may not work at these sizes or on these data: any error may come
            continue
        case = Case(name, resolve(call.target), args, (), tensors, shapes)
        try:
            check(case, small, (2, 3), _TOLERANCE)
        except RuleError as error:
            raise CaptureError(
                f"composite {error}; mark with ^ what cannot be split, and with + what is summed"
            ) from error
        return
    warnings.warn(
        f"the rule of composite {name} could not be verified at the small sizes that were tried; run "
        "autoplan.verify_rule on it with tensors that it accepts",
        AutoplanWarning,
        stacklevel=2,
    )


def _place(rule: Rule, identifier: str) -> TensorDim:
    """Where an identifier is found; a dimension that is never split starts at 0 wherever it is."""
    for index, uses in enumerate(rule.inputs):
        for dim, use in enumerate(uses):
            if use is not None and use.id == identifier:
                return TensorDim(index, dim)
    return next(TensorDim(i, d) for i, uses in enumerate(rule.inputs) for d, use in enumerate(uses) if use is None)


def _cost(call: Call, bound: Binding) -> tuple[float, tuple[int, ...], int]:
    """Floating point operations, inputs that autograd keeps, and the bytes that it keeps besides.

    Counted by running the function on ``meta``; where it cannot run there, all inputs are kept, and it computes what
    its declaration says, or one operation for each element.
    """
    inputs = [
        torch.empty(t.shape, dtype=getattr(torch, t.dtype), device="meta").requires_grad_(t.requires_grad)
        for t in call.inputs
    ]
    index = {id(t): i for i, t in enumerate(inputs)}
    kept: dict[int, None] = {}
    besides: dict[int, tuple[Tensor, int]] = {}

    def keep(tensor: Tensor) -> Any:
        place = index.get(id(tensor), index.get(id(tensor._base)))
        if place is not None:
            kept[place] = None
        else:
            besides[id(tensor)] = tensor, tensor.numel() * DTYPE_BYTES[str(tensor.dtype).removeprefix("torch.")]
        return tensor

    owner = bound.owner
    counter = FlopCounterMode(display=False)
    try:
        with counter, torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t), torch.enable_grad():
            bound.run(inputs, (0,) * len(owner.offsets))
        flops = float(counter.get_total_flops())
        saved, extra = tuple(sorted(kept)), sum(size for _, size in besides.values())
    except Exception:  # without data anything may happen in a user's function
        flops, saved, extra = 0.0, tuple(range(len(inputs))), 0
    flops = flops or float(sum(prod(t.shape) for t in call.inputs + call.outputs))
    return (owner.flops(*(t.shape for t in call.inputs)) if owner.flops else flops), saved, extra
