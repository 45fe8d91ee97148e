"""Views and reshapes: which dimension of the result is which dimension of the input."""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm, prod

from autoplan.capture.call import Call, Traits
from autoplan.capture.rules.building import (
    Mark,
    Marks,
    dims_of,
    integers,
    letters,
    packet,
    traits,
    words,
)
from searchspace.graph import Argument, LocalSize, TensorDim
from searchspace.layout import Shape

REGROUPS = words(
    "view reshape _unsafe_view flatten unflatten ravel squeeze unsqueeze view_as reshape_as _reshape_alias "
    "atleast_1d atleast_2d atleast_3d"
)
PERMUTES = words("permute transpose t numpy_T mT mH adjoint movedim moveaxis swapaxes swapdims")
_SIZES = {"view": "size", "_unsafe_view": "size", "reshape": "shape", "_reshape_alias": "size"}
EXPANDS = words("expand expand_as broadcast_to")


def groups(before: Shape, after: Shape) -> list[tuple[list[int], list[int]]]:
    """Smallest runs of dims with equal products, as (dims before, dims after); dims of extent 1 are left out."""
    left = [d for d, extent in enumerate(before) if extent != 1]
    right = [d for d, extent in enumerate(after) if extent != 1]
    found = []
    i = j = 0
    while i < len(left) or j < len(right):
        a, b = [left[i]], [right[j]]
        p, q = before[left[i]], after[right[j]]
        i, j = i + 1, j + 1
        while p != q:
            if p < q:
                a.append(left[i])
                p, i = p * before[left[i]], i + 1
            else:
                b.append(right[j])
                q, j = q * after[right[j]], j + 1
        found.append((a, b))
    return found


def regroup_marks(before: Shape, after: Shape) -> tuple[list[Mark], list[Mark]]:
    """Marks of a reshape: in each group the outermost dim splits, in units that both shapes have.

    A cut of the flat group is one of the dim before at multiples of the product of its inner dims, and
    likewise of the dim after: units are the least common multiple of both.
    """
    inputs: list[Mark] = [None] * len(before)
    outputs: list[Mark] = [None] * len(after)
    if prod(before) == 0:
        return inputs, outputs
    for (a, b), name in zip(groups(before, after), letters(len(before) + len(after)), strict=False):
        inner_before, inner_after = prod(before[d] for d in a[1:]), prod(after[d] for d in b[1:])
        step = lcm(inner_before, inner_after)
        if before[a[0]] * inner_before % step == 0:
            inputs[a[0]] = (name, step // inner_before)
            outputs[b[0]] = (name, step // inner_after)
    return inputs, outputs


def regroup(call: Call) -> Traits | None:
    """``(a s) c -> a s c`` and the like, from the two shapes."""
    x, y = call.inputs[0], call.outputs[0]
    if x.dtype != y.dtype:
        return None
    before, after = regroup_marks(x.shape, y.shape)
    name = packet(call.target)
    if name == "squeeze":  # would also drop a dimension of which the shard holds one element; a rewrite avoids it
        given = dims_of(call.argument("dim"), len(x.shape)) if not call.target.endswith(".default") else None
        risky = [d for d in range(len(x.shape)) if x.shape[d] > 1 and (given is None or d in given)]
        names = [mark[0] for d in risky if isinstance(mark := before[d], tuple)]
        before, after = ([None if m is None or m[0] in names else m for m in marks] for marks in (before, after))
    replace: dict[str, Argument] = {}
    if name == "unflatten":
        dim = dims_of(call.argument("dim"), len(x.shape))[0]
        count = len(integers(call.argument("sizes")))
        replace["sizes"] = tuple(_local_sizes(after, y.shape)[dim : dim + count])
    elif name in _SIZES:
        replace[_SIZES[name]] = tuple(_local_sizes(after, y.shape))
    return traits(call, {0: before}, [after], family="view", linear=((0,),), replace=replace)


def _local_sizes(marks: Marks, shape: Shape) -> list[Argument]:
    """The extents of the result, those that a shard changes as LocalSize."""
    found: list[Argument] = list(shape)
    for dim, mark in enumerate(marks):
        if isinstance(mark, tuple) and shape[dim] >= 2 * mark[1]:
            found[dim] = LocalSize(TensorDim(0, dim, output=True))
    return found


def permute(call: Call) -> Traits | None:
    """``a b c -> a c b``."""
    x = call.inputs[0]
    order = _permutation(call, len(x.shape))
    marks = letters(len(x.shape))
    return traits(call, {0: marks}, [[marks[d] for d in order]], family="view", linear=((0,),))


def _permutation(call: Call, rank: int) -> list[int]:
    name = packet(call.target)
    order = list(range(rank))
    if name == "permute":
        return [d % rank for d in integers(call.argument("dims"))]
    if name == "t":
        return order[::-1]
    if name == "numpy_T":
        return order[::-1]
    if name in ("mT", "mH", "adjoint"):
        return [*order[:-2], rank - 1, rank - 2]
    if name in ("movedim", "moveaxis"):
        source = [d % rank for d in integers(call.argument("source"))]
        target = [d % rank for d in integers(call.argument("destination"))]
        rest = iter([d for d in order if d not in source])
        moved = dict(zip(target, source, strict=True))
        return [moved[d] if d in moved else next(rest) for d in order]
    first, second = ("axis0", "axis1") if name == "swapaxes" else ("dim0", "dim1")
    if rank == 0:
        return order
    a, b = (int(call.argument(k)) % rank for k in (first, second))  # type: ignore[arg-type]
    order[a], order[b] = order[b], order[a]
    return order


def expand(call: Call) -> Traits | None:
    """``a 1 -> a b``: a new dimension is split at will."""
    x, y = call.inputs[0], call.outputs[0]
    marks = letters(len(y.shape))
    skip = len(y.shape) - len(x.shape)
    inputs = [mark if y.shape[skip + d] == x.shape[d] else None for d, mark in enumerate(marks[skip:])]
    sizes = {} if packet(call.target) == "expand_as" else {"size": 0}
    return traits(call, {0: inputs}, [marks], family="view", linear=((0,),), sizes=sizes)


def complex_parts(call: Call) -> Traits | None:
    """view_as_real and view_as_complex: the last dimension of the real side holds the two parts."""
    x, y = call.inputs[0], call.outputs[0]
    marks: list[Mark] = [*letters(min(len(x.shape), len(y.shape)))]
    return traits(
        call, {0: [*marks, None][: len(x.shape)]}, [[*marks, None][: len(y.shape)]], family="view", linear=((0,),)
    )


def diagonal(call: Call) -> Traits | None:
    """The two dims are used up, the diagonal comes last."""
    x = call.inputs[0]
    pair = [int(call.argument(k)) % len(x.shape) for k in ("dim1", "dim2")]  # type: ignore[arg-type]
    marks: Marks = [None if d in pair else mark for d, mark in enumerate(letters(len(x.shape)))]
    kept: Sequence[Mark] = [mark for d, mark in enumerate(marks) if d not in pair]
    return traits(call, {0: marks}, [[*kept, None]], family="view", linear=((0,),))


def meshgrid(call: Call) -> Traits | None:
    """Input i gives dimension i of each result (``xy`` swaps the first two)."""
    marks = letters(len(call.inputs))
    own: list[str] = list(marks)
    if call.target.endswith("indexing") and call.argument("indexing") == "xy" and len(own) > 1:
        marks = [marks[1], marks[0], *marks[2:]]
    inputs = {i: [own[i]] if tensor.shape else [] for i, tensor in enumerate(call.inputs)}
    return traits(call, inputs, [marks] * len(call.outputs), family="view")


def whole(call: Call) -> Traits | None:
    """as_strided: strides of the whole tensor mean nothing in a shard."""
    return traits(call, {}, [[None] * len(call.outputs[0].shape)], family="view", linear=((0,),))
