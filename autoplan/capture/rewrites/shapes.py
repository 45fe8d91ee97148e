"""Operators whose shapes or positions would depend on the shard are written so that they do not."""

from __future__ import annotations

from math import ceil, prod
from typing import Any

import torch

from autoplan.capture.call import Emit, Handle, Rewrite
from autoplan.capture.rewrites.arrangement import Arrangement
from autoplan.capture.rules.pointwise import is_pointwise
from searchspace.graph import Symbol


def squeeze(emit: Emit, x: Handle, dim: Any = None) -> Any:
    """By shape: squeezing would also drop a dimension of which a shard holds one element."""
    rank = len(x.shape)
    given = range(rank) if dim is None else [d % rank for d in ((dim,) if isinstance(dim, int) else dim) if rank]
    return emit("aten.reshape.default", x, tuple(e for d, e in enumerate(x.shape) if e != 1 or d not in given))


def repeat(emit: Emit, x: Handle, repeats: Any) -> Any:
    """``[a] -> [r, a] -> [r a]`` in each dimension."""
    counts = tuple(repeats)
    shape = (1,) * (len(counts) - len(x.shape)) + tuple(x.shape)
    apart = tuple(
        e for count, extent in zip(counts, shape, strict=True) for e in ((1, extent) if count != 1 else (extent,))
    )
    wide = tuple(
        e for count, extent in zip(counts, shape, strict=True) for e in ((count, extent) if count != 1 else (extent,))
    )
    return _spread(emit, x, apart, wide, tuple(c * e for c, e in zip(counts, shape, strict=True)))


def tile(emit: Emit, x: Handle, dims: Any) -> Any:
    return repeat(emit, x, (1,) * (len(x.shape) - len(dims)) + tuple(dims))


def repeat_interleave(emit: Emit, x: Handle, repeats: int, dim: int | None = None, **kwargs: Any) -> Any:
    """``[a] -> [a, r] -> [a r]``."""
    if dim is None:
        x, dim = emit("aten.reshape.default", x, (prod(x.shape),)), 0
    dim %= len(x.shape)
    before, after = tuple(x.shape[: dim + 1]), tuple(x.shape[dim + 1 :])
    result = (*x.shape[:dim], x.shape[dim] * repeats, *after)
    return _spread(emit, x, (*before, 1, *after), (*before, repeats, *after), result)


def _spread(emit: Emit, x: Handle, apart: Any, wide: Any, result: Any) -> Any:
    found = emit("aten.expand.default", emit("aten.reshape.default", x, apart), wide)
    return emit("aten.reshape.default", found, result)


def reshape(emit: Emit, x: Handle, shape: Any) -> Any:
    """Without detours: operators on flattened rows, and dims that are merged only to be taken apart again."""
    if -1 in shape:
        return NotImplemented
    shape = tuple(shape)
    if shape[-1:] == x.shape[-1:] and getattr(x, "origin", None) is not None and prod(shape):
        unflattened = _of_rows(emit, x, shape[:-1])
        if unflattened is not None:
            return unflattened
    before = Arrangement.of(x)
    if before.merged and before.regroup(shape) and not before.mixed:
        return before.emit(emit)
    return NotImplemented


def _of_rows(emit: Emit, x: Any, lead: tuple[int, ...]) -> Any:
    """Flattened rows ``x[r, n]`` as ``[*lead, n]``, computed there if they come from rows that were flattened, or None.

    Linear layers and element-wise operators do the same to rows however those are arranged; rows of
    ``[sequence, batch]`` could not be cut along the batch.
    """
    made = x.origin
    if made is None:
        return None
    if made.target == "aten.reshape.default":
        wanted = (*lead, x.shape[-1])
        before = made.given[0]
        if tuple(before.shape[: len(lead)]) == lead:
            return before if tuple(before.shape) == wanted else emit("aten.reshape.default", before, wanted)
        found = Arrangement.of(x)
        return found.emit(emit) if len(wanted) > len(x.shape) and found.regroup(wanted) else None
    if made.target == "aten.linear.default":
        rows = _of_rows(emit, made.given[0], lead)
        return None if rows is None else emit.again(made, rows, *made.given[1:])
    if made.target.startswith("autoplan.") or not is_pointwise(made.target) or len(made.outputs) != 1:
        return None
    given = [_operand(emit, arg, x, lead) for arg in made.given]
    return None if any(arg is _FLAT for arg in given) else emit.again(made, *given)


_FLAT = object()


def _operand(emit: Emit, arg: Any, x: Any, lead: tuple[int, ...]) -> Any:
    """An operand of an element-wise operator that makes ``x``: numbers and features as they are, rows arranged."""
    rank = len(getattr(arg, "shape", ()))
    if rank <= 1 and not isinstance(arg, tuple) and (rank == 0 or len(x.shape) > 1):
        return arg
    rows = _of_rows(emit, arg, lead) if not isinstance(arg, tuple) and tuple(arg.shape) == tuple(x.shape) else None
    return _FLAT if rows is None else rows


def select(emit: Emit, x: Handle, dim: int, index: int) -> Any:
    """One of several projections that a linear layer makes at once, as a part of it that can be split."""
    found = Arrangement.of(x)
    made = getattr(found.base, "origin", None)
    group = found.groups[dim % len(x.shape)]
    last = len(found.base.shape) - 1
    if made is None or made.target != "aten.linear.default" or len(group) != 1 or found.from_dim[group[0]] != last:
        return NotImplemented
    features = [atom for atom in found.order if found.from_dim[atom] == last]
    if len(features) < 2 or features[0] != group[0]:
        return NotImplemented
    count = found.sizes[group[0]]
    parts = _linear_parts(emit, made, [found.base.shape[-1] // count] * count)
    return found.without(dim % len(x.shape), parts[index % count]).emit(emit)


def split(emit: Emit, x: Handle, size: Any, dim: int = 0) -> Any:
    """split and split_with_sizes: a slice for each part."""
    extent = x.shape[dim]
    if isinstance(size, int):
        full, rest = divmod(extent, size) if size else (1, 0)
        return _parts(emit, x, [size] * full + [rest] * bool(rest), dim)
    return _parts(emit, x, list(size), dim)


def chunk(emit: Emit, x: Handle, chunks: int, dim: int = 0) -> Any:
    return split(emit, x, max(ceil(x.shape[dim] / chunks), 1), dim)


def sections(emit: Emit, x: Handle, count: int, dim: int = 0) -> Any:
    """tensor_split by number: the first parts get one more."""
    share, extra = divmod(x.shape[dim], count)
    return _parts(emit, x, [share + (i < extra) for i in range(count)], dim)


def unbind(emit: Emit, x: Handle, dim: int = 0) -> Any:
    return tuple(emit("aten.select.int", x, dim, i) for i in range(x.shape[dim]))


def _parts(emit: Emit, x: Handle, widths: list[int], dim: int) -> Any:
    """Consecutive slices; of a linear layer's features, by a linear layer whose parts can each be split."""
    made = getattr(x, "origin", None)
    last = dim % len(x.shape) == len(x.shape) - 1
    if made is not None and made.target == "aten.linear.default" and last and len(widths) > 1 and min(widths) > 0:
        return _linear_parts(emit, made, widths)
    ends = [sum(widths[: i + 1]) for i in range(len(widths))]
    return tuple(emit("aten.slice.Tensor", x, dim, end - width, end) for width, end in zip(widths, ends, strict=True))


def concatenate(emit: Emit, tensors: Any, dim: int = 0) -> Any:
    """Without the empty operands that caches begin with."""
    kept = [x for x in tensors if prod(x.shape)]
    if len(kept) == len(tensors) or not kept or len({x.dtype for x in tensors}) > 1:
        return NotImplemented
    return kept[0] if len(kept) == 1 else emit("aten.cat.default", tuple(kept), dim)


def _linear_parts(emit: Emit, made: Any, widths: list[int]) -> Any:
    """The parts of the result of the linear layer ``made``."""
    source, weight, *rest = made.given
    bias = rest[0] if rest else None
    return emit("autoplan.fused_linear.default", source, weight, bias, tuple(widths), (0,) * len(widths), tuple(widths))


def arange(emit: Emit, end: Any, *, dtype: Symbol | None = None, **kwargs: Any) -> Any:
    return arange_step(emit, 0, end, 1, dtype=dtype)


def arange_start(emit: Emit, start: Any, end: Any, *, dtype: Symbol | None = None, **kwargs: Any) -> Any:
    return arange_step(emit, start, end, 1, dtype=dtype)


def arange_step(emit: Emit, start: Any, end: Any, step: Any = 1, *, dtype: Symbol | None = None, **kwargs: Any) -> Any:
    """Numbers by position, so that a shard makes its own."""
    whole = all(isinstance(number, int) for number in (start, end, step))
    kind = dtype or Symbol("torch.int64" if whole else str(torch.get_default_dtype()))
    count = max(ceil((end - start) / step), 0)
    return emit("autoplan.arange.default", 0, count, float(start), float(step), kind, Symbol("device"))


def triangle(upper: bool) -> Rewrite:
    """tril and triu: the diagonal moves with the block."""

    def rewrite(emit: Emit, x: Handle, diagonal: int = 0) -> Any:
        return emit("autoplan.triangle.default", x, diagonal, upper, 0, 0)

    return rewrite


def embedding(
    emit: Emit, weight: Handle, indices: Handle, padding_idx: int = -1, by_frequency: bool = False, sparse: bool = False
) -> Any:
    """A table that can be split by rows; its gradient is dense, also where a sparse one was asked for."""
    if by_frequency:
        return emit("aten.embedding.default", weight, indices, padding_idx, True, False) if sparse else NotImplemented
    return emit("autoplan.embedding.default", weight, indices, 0, weight.shape[0], padding_idx)


REWRITES: dict[str, Rewrite] = {
    **dict.fromkeys(("aten.squeeze.default", "aten.squeeze.dim", "aten.squeeze.dims"), squeeze),
    "aten.reshape.default": reshape,
    "aten.select.int": select,
    "aten.repeat.default": repeat,
    "aten.tile.default": tile,
    "aten.repeat_interleave.self_int": repeat_interleave,
    **dict.fromkeys(
        (
            "aten.split.Tensor", "aten.split.sizes", "aten.split_with_sizes.default", "aten.unsafe_split.Tensor",
            "aten.unsafe_split_with_sizes.default",
        ),
        split,
    ),
    **dict.fromkeys(("aten.chunk.default", "aten.unsafe_chunk.default"), chunk),
    "aten.tensor_split.sections": sections,
    "aten.unbind.int": unbind,
    "aten.cat.default": concatenate,
    "aten.arange.default": arange,
    "aten.arange.start": arange_start,
    "aten.arange.start_step": arange_step,
    "aten.tril.default": triangle(upper=False),
    "aten.triu.default": triangle(upper=True),
    "aten.embedding.default": embedding,
}  # fmt: skip
