"""Reductions over some dimensions."""

from __future__ import annotations

from autoplan.capture.call import Call, Traits, schema_arguments
from autoplan.capture.rules.building import dims_of, elements, letters, packet, traits, words
from searchspace.graph import Family, GlobalSize, TensorDim
from searchspace.layout import Reduction

REDUCTIONS = words(
    "sum mean amax amin max min prod any all argmax argmin var std var_mean std_mean norm linalg_vector_norm logsumexp "
    "median nanmedian mode count_nonzero nansum nanmean aminmax kthvalue"
)
_SUMS = words("sum nansum count_nonzero")
_SAVES_OUTPUT = words("amax amin logsumexp norm linalg_vector_norm prod")
_SAVES_INPUT = _SAVES_OUTPUT | words("var std var_mean std_mean nansum")


def reduction(call: Call) -> Traits | None:
    """``a b+ -> a`` for sums, ``a b+max -> a`` for maxima without gradient, ``a b^ -> a`` for the others."""
    x = call.inputs[0]
    names = [name for name, _ in schema_arguments(call.target)]
    given = call.argument("dim") if "dim" in names else None
    reduced = dims_of(given, len(x.shape)) if x.shape else ()
    kept = len(call.outputs[0].shape) == len(x.shape)
    name = packet(call.target)
    how: Reduction | None = None
    if name in _SUMS:
        how = "sum"
    elif (name == "amax" or (name == "max" and len(call.outputs) == 1)) and not x.requires_grad:
        how = "max"  # the parts' gradients do not combine: each part has a maximum of its own
    marks = letters(len(x.shape))
    inputs = [mark if how or d not in reduced else None for d, mark in enumerate(marks)]
    output = [None if d in reduced else mark for d, mark in enumerate(marks) if kept or d not in reduced]
    return traits(
        call, {0: inputs}, [output] * len(call.outputs), family="reduction",
        reductions={marks[d]: how for d in reduced} if how else {},
        linear=((0,),) if name in ("sum", "mean") else (),
        flops=elements(x), saves=(0,) if name in _SAVES_INPUT else (),
        saves_outputs=(0,) if name in _SAVES_OUTPUT else (1,) if len(call.outputs) == 2 else (),
    )  # fmt: skip


def mean_parts(call: Call) -> Traits | None:
    """autoplan.mean: ``a b+ -> a``, divided by the whole extents."""
    x = call.inputs[0]
    reduced = dims_of(call.argument("dim"), len(x.shape)) if x.shape else ()
    marks = letters(len(x.shape))
    keep = call.argument("keepdim")
    output = [None if d in reduced else mark for d, mark in enumerate(marks) if keep or d not in reduced]
    return traits(
        call, {0: marks}, [output], family="reduction", reductions=dict.fromkeys([marks[d] for d in reduced], "sum"),
        linear=((0,),), replace={"sizes": tuple(GlobalSize(TensorDim(0, d)) for d in reduced)}, flops=elements(x),
    )  # fmt: skip


def histogram(call: Call) -> Traits | None:
    """histc between given limits: ``a+ b+ -> 10``; without limits those of the whole tensor are needed."""
    x = call.inputs[0]
    limits = call.argument("min"), call.argument("max")
    marks = letters(len(x.shape)) if limits[0] != limits[1] else []
    inputs = {0: marks} if marks else {}
    return traits(call, inputs, [[None]], family="reduction", reductions=dict.fromkeys(marks, "sum"), flops=elements(x))


def along(call: Call) -> Traits | None:
    """Operators that work along ``dim`` and treat all other dimensions alike: ``a b^ -> a b^``."""
    x = call.inputs[0]
    names = [name for name, _ in schema_arguments(call.target)]
    touched = dims_of(call.argument("dims" if "dims" in names else "dim"), len(x.shape)) if x.shape else ()
    if packet(call.target) == "roll" and not call.argument("dims"):
        touched = tuple(range(len(x.shape)))
    marks = [None if d in touched else mark for d, mark in enumerate(letters(len(x.shape)))]
    name = packet(call.target)
    softmax = "softmax" in name
    family: Family = "normalisation" if softmax else "data" if name in ("flip", "roll") else "reduction"
    return traits(
        call, dict.fromkeys(range(len(call.inputs)), marks), [marks] * len(call.outputs), family=family,
        linear=((0,),) if name in ("cumsum", "flip", "roll") else (), flops=elements(x) * (5 if softmax else 1),
        saves_outputs=(0,) if softmax else (1,) if len(call.outputs) == 2 else (),
        saves=(0,) if name in ("cumprod", "logcumsumexp") else (),
    )  # fmt: skip


ALONG = words(
    "softmax log_softmax _softmax _log_softmax softmin cumsum cumprod cummax cummin logcumsumexp sort argsort topk "
    "flip roll msort"
)
