"""Canonical forms: many ways to write a call become one, and calls that do nothing disappear.

A fold takes ``(emit, *args, **kwargs)`` like a rewrite (see :mod:`autoplan.capture.call`).  It returns the
result, or NotImplemented to keep the call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

from autoplan.capture.builder import Value, torch_dtype
from autoplan.capture.call import Emit, schema
from searchspace.errors import CaptureError
from searchspace.graph import Symbol

DEVICE = Symbol("device")


def fold_nothing(emit: Emit, x: Value, *args: Any, **kwargs: Any) -> Any:
    """Calls that only concern autograd's or the allocator's bookkeeping."""
    return x


def fold_detach(emit: Emit, x: Value) -> Any:
    return NotImplemented if x.requires_grad else x


def fold_copy(emit: Emit, x: Value, memory_format: Any = None, **kwargs: Any) -> Any:
    """``clone`` and ``contiguous`` change no value; a copy that changes the strides is kept as contiguous."""
    memory_format = kwargs.get("memory_format", memory_format)
    wanted = memory_format is not None and memory_format != Symbol("torch.preserve_format")
    if wanted and memory_format == Symbol("torch.contiguous_format") and not x.contiguous:
        return emit("aten.contiguous.default", x)
    return x


def fold_contiguous(emit: Emit, x: Value, memory_format: Any = None, **kwargs: Any) -> Any:
    memory_format = kwargs.get("memory_format", memory_format)
    if memory_format in (None, Symbol("torch.contiguous_format")):
        return x if x.contiguous else NotImplemented
    return x


def fold_dropout(emit: Emit, x: Value, p: float, train: bool) -> Any:
    return x if not train or p == 0 else NotImplemented


def _cast(emit: Emit, x: Value, dtype: Any) -> Any:
    if dtype is None or str(dtype.name) == f"torch.{x.dtype}":
        return x
    return emit("aten.to.dtype", x, dtype)


def fold_to_dtype(emit: Emit, x: Value, dtype: Any, *args: Any, **kwargs: Any) -> Any:
    if args or kwargs or str(dtype.name) == f"torch.{x.dtype}":
        return _cast(emit, x, dtype)
    return NotImplemented


def fold_to_device(emit: Emit, x: Value, device: Any, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
    return _cast(emit, x, dtype)


def fold_to_keywords(emit: Emit, x: Value, *args: Any, **kwargs: Any) -> Any:
    return _cast(emit, x, kwargs.get("dtype", args[0] if args else None))


def fold_to_other(emit: Emit, x: Value, other: Value, *args: Any, **kwargs: Any) -> Any:
    return _cast(emit, x, Symbol(f"torch.{other.dtype}"))


def fold_reshape(emit: Emit, x: Value, shape: tuple[int, ...]) -> Any:
    """Sizes are made explicit; nothing is done when they are the tensor's own."""
    sizes = _sizes(x, shape)
    if sizes == x.shape:
        return x
    linear = _linear_of(emit, x, sizes)
    if linear is not None:
        return linear
    return NotImplemented if sizes == shape else emit("aten.reshape.default", x, sizes)


def _sizes(x: Value, shape: tuple[int, ...]) -> tuple[int, ...]:
    if -1 not in shape:
        return tuple(shape)
    known = -prod(shape)
    return tuple(prod(x.shape) // known if size == -1 and known else size for size in shape)


def _linear_of(emit: Emit, x: Value, shape: tuple[int, ...]) -> Value | None:
    """``reshape(addmm(bias, reshape(y, [-1, k]), w), [..., n])`` is a linear of the n-dimensional ``y``.

    (transformers' Conv1D.)  In this form the leading dimensions of ``y`` can be split one by one.
    """
    addmm = x.origin
    if addmm is None or addmm.target != "aten.addmm.default" or addmm.call.kwargs:
        return None
    bias, flat, weight = addmm.given
    made = flat.origin
    if made is None or made.target != "aten.reshape.default" or len(bias.shape) != 1:
        return None
    y = made.given[0]
    if (*y.shape[:-1], weight.shape[1]) != shape or y.shape[-1] != weight.shape[0]:
        return None
    return emit("aten.linear.default", y, emit("aten.t.default", weight), bias)


def fold_view(emit: Emit, x: Value, shape: Any) -> Any:
    """A view is a reshape; shards may have strides that a view refuses."""
    return emit("aten.reshape.default", x, shape)


def fold_view_as(emit: Emit, x: Value, other: Value) -> Any:
    return emit("aten.reshape.default", x, other.shape)


def fold_flatten(emit: Emit, x: Value, start: int = 0, end: int = -1) -> Any:
    rank = len(x.shape)
    if rank == 0:
        return emit("aten.reshape.default", x, (1,))
    start, end = start % rank, end % rank
    return emit("aten.reshape.default", x, (*x.shape[:start], prod(x.shape[start : end + 1]), *x.shape[end + 1 :]))


def fold_unflatten(emit: Emit, x: Value, dim: int, sizes: tuple[int, ...]) -> Any:
    dim %= len(x.shape)
    known = -prod(sizes)
    sizes = tuple(x.shape[dim] // known if size == -1 else size for size in sizes)
    return emit("aten.reshape.default", x, (*x.shape[:dim], *sizes, *x.shape[dim + 1 :]))


def fold_expand(emit: Emit, x: Value, size: tuple[int, ...], **kwargs: Any) -> Any:
    new = len(size) - len(x.shape)
    sizes = tuple(x.shape[i - new] if extent == -1 else extent for i, extent in enumerate(size))
    if sizes == x.shape:
        return x
    return NotImplemented if sizes == size and not kwargs else emit("aten.expand.default", x, sizes)


def fold_expand_as(emit: Emit, x: Value, other: Value) -> Any:
    return emit("aten.expand.default", x, other.shape)


def _full(emit: Emit, shape: Any, value: Any, dtype: str) -> Any:
    return emit("aten.full.default", tuple(shape), value, dtype=Symbol(f"torch.{dtype}"), device=DEVICE)


def _filled(value: Any) -> Callable[..., Any]:
    """Creation at given sizes: ``zeros(size)``, ``ones(size)``, ``empty(size)``."""

    def fold(emit: Emit, size: Any, *args: Any, dtype: Any = None, **kwargs: Any) -> Any:
        return _full(emit, size, value, _named(dtype))

    return fold


def _filled_like(value: Any) -> Callable[..., Any]:
    def fold(emit: Emit, x: Value, *args: Any, dtype: Any = None, **kwargs: Any) -> Any:
        return _full(emit, x.shape, value, _named(dtype, x.dtype))

    return fold


def _filled_new(value: Any) -> Callable[..., Any]:
    def fold(emit: Emit, x: Value, size: Any, *args: Any, dtype: Any = None, **kwargs: Any) -> Any:
        return _full(emit, size, value, _named(dtype, x.dtype))

    return fold


def fold_full(emit: Emit, size: Any, value: Any, dtype: Any = None, device: Any = None, **kwargs: Any) -> Any:
    if dtype is not None and device is not None and not kwargs:
        return NotImplemented
    default = torch.full((), value).dtype
    return _full(emit, size, value, _named(dtype, str(default).removeprefix("torch.")))


def fold_full_like(emit: Emit, x: Value, value: Any, dtype: Any = None, **kwargs: Any) -> Any:
    return _full(emit, x.shape, value, _named(dtype, x.dtype))


def fold_new_full(emit: Emit, x: Value, size: Any, value: Any, dtype: Any = None, **kwargs: Any) -> Any:
    return _full(emit, size, value, _named(dtype, x.dtype))


def fold_scalar_tensor(emit: Emit, value: Any, dtype: Any = None, **kwargs: Any) -> Any:
    return _full(emit, (), value, _named(dtype))


def fold_fill(emit: Emit, x: Value, value: Any) -> Any:
    """A tensor filled with a number, or with the one element of a tensor."""
    if not isinstance(value, Value):
        return _full(emit, x.shape, value, x.dtype)
    made = value.origin
    if made is not None and made.target == "aten.full.default":
        return _full(emit, x.shape, torch.full((), made.given[1], dtype=torch_dtype(x.dtype)).item(), x.dtype)
    return emit("aten.expand.default", _cast(emit, value, Symbol(f"torch.{x.dtype}")), x.shape)


def fold_zero(emit: Emit, x: Value) -> Any:
    return _full(emit, x.shape, 0, x.dtype)


def fold_overwrite(emit: Emit, x: Value, source: Value, *args: Any) -> Any:
    """``copy`` over the whole of a tensor: the source in the tensor's dtype and shape."""
    return emit("aten.expand.default", _cast(emit, source, Symbol(f"torch.{x.dtype}")), x.shape)


def fold_broadcast(emit: Emit, tensors: Sequence[Value]) -> Any:
    """Each tensor by itself: one that has the shape already does not depend on the others."""
    shape = tuple(torch.broadcast_shapes(*(tensor.shape for tensor in tensors)))
    return [emit("aten.expand.default", tensor, shape) for tensor in tensors]


def _named(dtype: Any, default: str | None = None) -> str:
    if dtype is not None:
        return str(dtype.name).removeprefix("torch.")
    return default or str(torch.get_default_dtype()).removeprefix("torch.")


FOLDS: dict[str, Callable[..., Any]] = {
    "aten.alias.default": fold_nothing,
    "aten.lift.default": fold_nothing,
    "aten.lift_fresh.default": fold_nothing,
    "aten.lift_fresh_copy.default": fold_nothing,
    "aten.positive.default": fold_nothing,
    "aten.detach.default": fold_detach,
    "aten.clone.default": fold_copy,
    "aten.contiguous.default": fold_contiguous,
    "aten.dropout.default": fold_dropout,
    "aten.feature_dropout.default": fold_dropout,
    "aten.alpha_dropout.default": fold_dropout,
    "aten.feature_alpha_dropout.default": fold_dropout,
    "aten.to.dtype": fold_to_dtype,
    "aten.to.device": fold_to_device,
    "aten.to.dtype_layout": fold_to_keywords,
    "aten.to.other": fold_to_other,
    "aten.type_as.default": fold_to_other,
    "aten._to_copy.default": fold_to_keywords,
    "aten.reshape.default": fold_reshape,
    "aten.view.default": fold_view,
    "aten._unsafe_view.default": fold_view,
    "aten.view_as.default": fold_view_as,
    "aten.reshape_as.default": fold_view_as,
    "aten.flatten.using_ints": fold_flatten,
    "aten.unflatten.int": fold_unflatten,
    "aten.expand.default": fold_expand,
    "aten.expand_as.default": fold_expand_as,
    "aten.broadcast_tensors.default": fold_broadcast,
    "aten.full.default": fold_full,
    "aten.full_like.default": fold_full_like,
    "aten.new_full.default": fold_new_full,
    "aten.zeros.default": _filled(0),
    "aten.ones.default": _filled(1),
    "aten.empty.memory_format": _filled(0),
    "aten.zeros_like.default": _filled_like(0),
    "aten.ones_like.default": _filled_like(1),
    "aten.empty_like.default": _filled_like(0),
    "aten.new_zeros.default": _filled_new(0),
    "aten.new_ones.default": _filled_new(1),
    "aten.new_empty.default": _filled_new(0),
    "aten.scalar_tensor.default": fold_scalar_tensor,
    "aten.fill.Scalar": fold_fill,
    "aten.fill.Tensor": fold_fill,
    "aten.zero.default": fold_zero,
    "aten.copy.default": fold_overwrite,
}


DROPPED = frozenset({
    "aten._assert_tensor_metadata.default", "aten._assert_async.default", "aten._assert_async.msg",
    "aten._assert_scalar.default", "aten.sym_constrain_range.default", "aten.sym_constrain_range_for_size.default",
})  # fmt: skip
"""Operators that only check something."""


def writes(target: str) -> tuple[str, ...]:
    """Names of the arguments that the operator's schema says it writes to."""
    arguments = schema(target).arguments
    return tuple(a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write)


def out_of_place(target: str) -> str:
    """The operator that computes what the in-place ``target`` writes; or CaptureError.

    What is written is the first argument or, for operators with an ``out`` argument, that one.
    """
    namespace, packet, name = target.split(".")
    operators, arguments, types = getattr(torch.ops, namespace), schema(target).arguments, _types(target)
    if writes(target) == ("out",) and arguments[-1].name == "out":
        plain, types = packet, types[:-1]
    elif writes(target) == (arguments[0].name,) and types[0] == "Tensor":
        plain = packet.replace("__i", "__") if packet.startswith("__i") else packet.removesuffix("_")
        plain = {"normal": "normal_functional", "set": ""}.get(plain, plain)  # set_ exchanges memory
    else:
        plain = ""
    if hasattr(operators, plain):
        overloads = getattr(operators, plain).overloads()
        for candidate in sorted(overloads, key=lambda other: other != name):  # the same name first
            found = f"{namespace}.{plain}.{candidate}"
            if not writes(found) and _types(found)[: len(types)] == types:
                return found
    raise CaptureError(f"the in-place operator {target} has no out-of-place form; write it out of place")


def _types(target: str) -> list[str]:
    return [str(argument.type) for argument in schema(target).arguments]
