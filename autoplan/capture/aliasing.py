"""Writes through views: in-place operators of the traced program become new values.

Several traced tensors may share memory.  A :class:`Memory` holds the present value of the whole of it, an
:class:`Alias` is a tensor that shows the memory through a chain of views.  A write to an alias is carried
back through the chain into the memory; other aliases are derived again when they are read next.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from autoplan.capture.builder import Value
from autoplan.capture.call import Emit
from searchspace.errors import CaptureError

SELF = object()
"""Stands for the viewed tensor among a view's arguments."""


@dataclass(eq=False)
class Memory:
    """The present value of a piece of memory, and how often it was written.

    ``fixed`` says why it must not be written, where that is so.
    """

    value: Value
    version: int = 0
    fixed: str = ""


@dataclass(frozen=True)
class View:
    """One view operator; ``index`` picks an output of those that return several."""

    target: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()
    index: int | None = None

    def apply(self, emit: Emit, value: Value) -> Value:
        args = [value if arg is SELF else arg for arg in self.args]
        result = emit(self.target, *args, **dict(self.kwargs))
        return result if self.index is None else result[self.index]

    def scatter(self, emit: Emit, whole: Value, part: Value) -> Value:
        """``whole`` with the viewed part replaced; CaptureError when that is not known."""
        invert = _INVERSES.get(self.target)
        if invert is None:
            raise CaptureError(f"an in-place write through a view made by {self.target}; write out of place instead")
        return invert(emit, self, whole, part)


@dataclass(eq=False)
class Alias:
    """A traced tensor: what ``views`` show of ``memory``; ``value`` is right while ``version`` is current."""

    memory: Memory
    views: tuple[View, ...]
    value: Value
    version: int

    @classmethod
    def fresh(cls, value: Value, fixed: str = "") -> Alias:
        return cls(Memory(value, fixed=fixed), (), value, 0)

    def viewed(self, view: View, value: Value) -> Alias:
        """A further view of the same memory, whose present value is ``value``."""
        return Alias(self.memory, (*self.views, view), value, self.memory.version)

    def read(self, emit: Emit) -> Value:
        """The present value."""
        if self.version != self.memory.version:
            self.value = self._derived(emit)[-1]
            self.version = self.memory.version
        return self.value

    def write(self, emit: Emit, value: Value) -> None:
        """Let the tensor take ``value``, and all others that share memory see it; or CaptureError."""
        new = value
        for view, whole in reversed(list(zip(self.views, self._derived(emit), strict=False))):
            new = view.scatter(emit, whole, new)
        self.memory.value = new
        self.memory.version += 1
        self.value, self.version = value, self.memory.version

    def _derived(self, emit: Emit) -> list[Value]:
        """The memory's value, and what each further view shows."""
        values = [self.memory.value]
        for view in self.views:
            values.append(view.apply(emit, values[-1]))
        return values


Inverse = Callable[[Emit, View, Value, Value], Value]


def _identity(emit: Emit, view: View, whole: Value, part: Value) -> Value:
    return part


def _detached(emit: Emit, view: View, whole: Value, part: Value) -> Value:
    if whole.requires_grad:
        raise CaptureError("an in-place write to a detached tensor changes the one that has a gradient; clone it first")
    return part


def _reshaped(emit: Emit, view: View, whole: Value, part: Value) -> Value:
    return emit("aten.reshape.default", part, whole.shape)


def _transposed(emit: Emit, view: View, whole: Value, part: Value) -> Value:
    return emit(view.target, part, *view.args[1:])


def _permuted(emit: Emit, view: View, whole: Value, part: Value) -> Value:
    dims = [d % len(whole.shape) for d in view.args[1]]
    return emit("aten.permute.default", part, tuple(dims.index(d) for d in range(len(dims))))


def _sliced(emit: Emit, view: View, whole: Value, part: Value) -> Value:
    given = view.args[1:]
    dim, start, end, step = given + (0, None, None, 1)[len(given) :]
    return emit("aten.slice_scatter.default", whole, part, dim, start, end, step)


def _narrowed(emit: Emit, view: View, whole: Value, part: Value) -> Value:
    dim, start, length = view.args[1:]
    start %= whole.shape[dim]
    return emit("aten.slice_scatter.default", whole, part, dim, start, start + length, 1)


def _selected(emit: Emit, view: View, whole: Value, part: Value) -> Value:
    return emit("aten.select_scatter.default", whole, part, *view.args[1:])


def _diagonal(emit: Emit, view: View, whole: Value, part: Value) -> Value:
    return emit("aten.diagonal_scatter.default", whole, part, *view.args[1:])


def _one_of(emit: Emit, view: View, whole: Value, part: Value) -> Value:
    """An element of split, chunk, tensor_split: a slice that begins where the elements before it end."""
    dim = view.args[2] if len(view.args) > 2 else dict(view.kwargs).get("dim", 0)
    pieces = emit(view.target, whole, *view.args[1:], **dict(view.kwargs))
    start = sum(piece.shape[dim] for piece in pieces[: view.index])
    return emit("aten.slice_scatter.default", whole, part, dim, start, start + part.shape[dim], 1)


def _unbound(emit: Emit, view: View, whole: Value, part: Value) -> Value:
    dim = view.args[1] if len(view.args) > 1 else 0
    return emit("aten.select_scatter.default", whole, part, dim, view.index)


_INVERSES: dict[str, Inverse] = {
    "aten.alias.default": _identity,
    "aten.contiguous.default": _identity,
    "aten.to.dtype": _identity,
    "aten.to.device": _identity,
    "aten.to.dtype_layout": _identity,
    "aten.detach.default": _detached,
    "aten.view.default": _reshaped,
    "aten.reshape.default": _reshaped,
    "aten._unsafe_view.default": _reshaped,
    "aten.flatten.using_ints": _reshaped,
    "aten.unflatten.int": _reshaped,
    "aten.view_as.default": _reshaped,
    "aten.squeeze.default": _reshaped,
    "aten.squeeze.dim": _reshaped,
    "aten.squeeze.dims": _reshaped,
    "aten.unsqueeze.default": _reshaped,
    "aten.transpose.int": _transposed,
    "aten.t.default": _transposed,
    "aten.permute.default": _permuted,
    "aten.slice.Tensor": _sliced,
    "aten.narrow.default": _narrowed,
    "aten.select.int": _selected,
    "aten.diagonal.default": _diagonal,
    "aten.split.Tensor": _one_of,
    "aten.split_with_sizes.default": _one_of,
    "aten.chunk.default": _one_of,
    "aten.unbind.int": _unbound,
}


def picked(view: View, index: int) -> View:
    """The view that is output ``index`` of an operator that returns several."""
    return replace(view, index=index)
