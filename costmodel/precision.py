"""Precision recipes: which data type each tensor and each operator's arithmetic has.

float32    everything as captured
bf16       the graph's own (half precision) types; master weights and gradient sums in float32
autocast   parameters as captured; products, convolutions and attention in bfloat16, their operands
           are cast for each use; reductions, norms and losses in float32 (torch.autocast's lists)
"""

from __future__ import annotations

from collections.abc import Mapping

from searchspace.graph import Family, Graph, Operator

LOWERED: tuple[Family, ...] = ("matmul", "convolution", "attention", "recurrent")
"""Families that torch.autocast runs in the lower precision."""
RAISED: tuple[Family, ...] = ("normalisation", "loss")
"""Families that torch.autocast runs in float32."""
FLOATS = ("float64", "float32", "float16", "bfloat16")


def arithmetic_dtype(op: Operator, precision: str) -> str | None:
    """The data type that autocast forces on ``op``; None when it computes in its inputs' own."""
    lower = op.context.autocast or ("bfloat16" if precision == "autocast" else None)
    if lower is not None and op.family in LOWERED:
        return lower
    inferred = op.context.autocast is None and precision == "autocast"
    return "float32" if inferred and op.family in RAISED else None


def tensor_dtypes(graph: Graph, precision: str) -> Mapping[str, str]:
    """The data type in which each tensor really is, under ``precision``.

    What was captured under autocast has its types already; those of other operators are inferred.
    """
    found = {t.name: t.dtype for t in graph.tensors}
    if precision != "autocast":
        return found
    for op in graph.operators:
        if op.context.autocast is not None or op.family == "creation":
            continue
        forced = arithmetic_dtype(op, precision)
        inputs = [found[name] for name in op.inputs if found[name] in FLOATS]
        for name in op.outputs:
            if found[name] in FLOATS and found[name] != "float64" and (forced or inputs):
                found[name] = forced or min(inputs, key=FLOATS.index)
    return found
