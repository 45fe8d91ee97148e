"""Which reshapes copy: a view operator shares storage unless its input's strides forbid it.

``reshape`` is a view of what lies contiguously, and copies what was transposed or expanded.  Strides are
not on the graph; three states of a tensor are enough to tell: contiguous, permuted or expanded, and as
fused attention returns its result: [batch, heads, sequence, features] with heads beside features, which
one transposition makes contiguous.
"""

from __future__ import annotations

from typing import Literal

from searchspace.graph import Graph, Operator

State = Literal["contiguous", "strided", "attention"]

RESHAPES = ("reshape", "flatten", "unflatten", "contiguous")
"""View operators that copy where they must."""
KEEPS_ORDER = ("view", "squeeze", "unsqueeze", "alias", "detach", "view_as_real", "view_as_complex", *RESHAPES)
"""View operators whose output lies as their input does."""


def copying_views(graph: Graph) -> frozenset[str]:
    """Names of operators of the view family that copy."""
    state: dict[str, State] = {}
    found: dict[str, None] = {}
    for op in graph.operators:
        if op.family == "attention":
            state.update(dict.fromkeys(op.outputs, "attention"))
        if op.family != "view" or not op.inputs:
            continue
        kind = _kind(op)
        before = state.get(op.inputs[0], "contiguous")
        if before == "strided" and kind in RESHAPES:
            found.setdefault(op.name)
            after: State = "contiguous"
        elif kind in KEEPS_ORDER:
            after = before
        else:
            after = "contiguous" if before == "attention" and kind in ("transpose", "permute") else "strided"
        state.update(dict.fromkeys(op.outputs, after))
    return frozenset(found)


def _kind(op: Operator) -> str:
    parts = op.target.split(".")
    return parts[1] if len(parts) > 1 else op.target
