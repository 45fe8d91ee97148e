"""The interface between capture (lowering) and the meaning of operators (rules and rewrites).

Lowering meets a :class:`Call`, asks ``autoplan.capture.rules.describe(call)`` for its :class:`Traits`,
or, where ``autoplan.capture.rewrites.REWRITES`` has the target, lets the rewrite emit other calls::

    def rewrite(emit: Emit, *args, **kwargs) -> Handle | tuple[Handle, ...] | NotImplemented

``args`` are the call's positional arguments in the order of the operator's schema (trailing defaults may
be missing), ``kwargs`` its keyword-only ones.  Tensors arrive as :class:`Handle`, lists of them as tuples;
dtypes, devices, layouts and memory formats as :class:`~searchspace.graph.Symbol`, numbers as they are.
``emit(target, *args, **kwargs)`` takes the same and returns one handle, or a tuple of them for an operator
with several outputs.  A rewrite returns as many handles as the original has outputs (also for operators that
return a list), or ``NotImplemented`` to keep the call as it is; it may return handles that it was given.
Calls that it emits are folded and rewritten in turn, but not by itself.

In-place operators arrive as their out-of-place forms.  One operator writes without saying so in its schema:
``aten.batch_norm.default`` in training with running statistics; its rewrite returns
``(output, new_running_mean, new_running_var)``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch

from searchspace.errors import CaptureError
from searchspace.graph import Argument, Context, Family, Symbol
from searchspace.layout import Shape
from searchspace.rule import Rule


@dataclass(frozen=True)
class TensorMeta:
    """What is known of a tensor without data; ``dtype`` without the prefix, as in graph.Tensor."""

    shape: Shape
    dtype: str
    requires_grad: bool = False


@dataclass(frozen=True)
class Call:
    """One call of an operator at whole shapes.

    Fields
        target: qualified name, ``"aten.linear.default"`` or ``"autoplan.embedding.default"``.
        args, kwargs: plain values, :class:`Symbol` and :class:`~searchspace.graph.InputRef`; sequences are tuples.
        inputs: metas of the tensors, in order of their InputRefs' indices.
        outputs: metas of the results.  An operator that returns a list has one output per element.
    """

    target: str
    args: tuple[Argument, ...]
    kwargs: tuple[tuple[str, Argument], ...]
    inputs: tuple[TensorMeta, ...]
    outputs: tuple[TensorMeta, ...]
    context: Context = Context()

    def argument(self, name: str) -> Argument:
        """The value of the argument that the schema calls ``name``, its default where it was not given."""
        for index, (known, default) in enumerate(schema_arguments(self.target)):
            if known == name:
                given = self.args[index] if index < len(self.args) else dict(self.kwargs).get(name, default)
                return given
        raise CaptureError(f"operator {self.target} has no argument {name!r}")


@dataclass(frozen=True)
class Traits:
    """What an operator means; becomes fields of :class:`~searchspace.graph.Operator`.

    Fields
        args, kwargs: the call's, with LocalSize, LocalOffset, LocalEnd and GlobalSize where an integer follows
            a shard or the batch.
        saved_inputs, saved_outputs: indices of those that autograd keeps for backward.
        saved_extra_bytes: what autograd keeps besides, whole tensor.
    """

    args: tuple[Argument, ...]
    kwargs: tuple[tuple[str, Argument], ...]
    rule: Rule
    family: Family = "pointwise"
    flops: float = 0.0
    saved_inputs: tuple[int, ...] = ()
    saved_outputs: tuple[int, ...] = ()
    saved_extra_bytes: int = 0
    random: bool = False


class Handle(Protocol):
    """A tensor of the graph under construction."""

    @property
    def shape(self) -> Shape: ...

    @property
    def dtype(self) -> str: ...

    @property
    def requires_grad(self) -> bool: ...


class Emit(Protocol):
    """Appends one operator and returns its output, or outputs."""

    def __call__(self, target: str, *args: Any, **kwargs: Any) -> Any: ...

    def again(self, made: Any, *args: Any) -> Any:
        """The call that made a value (its ``origin``) with other tensors, in the same module and context.

        None where it draws random numbers or a keyword is a tensor.
        """


Rewrite = Callable[..., Any]


@cache
def overload(target: str) -> Callable[..., Any]:
    """The torch operator that a qualified name means; CaptureError when there is none."""
    try:
        namespace, packet, name = target.split(".")
        found = getattr(getattr(getattr(torch.ops, namespace), packet), name)
    except (AttributeError, ValueError) as error:
        raise CaptureError(f"no torch operator is called {target!r}") from error
    return found


def schema(target: str) -> Any:
    """The operator's schema (a torch.FunctionSchema)."""
    return overload(target)._schema  # type: ignore[attr-defined]


@cache
def schema_arguments(target: str) -> tuple[tuple[str, Any], ...]:
    """(name, default) of each argument of the operator's schema, positional ones first; dtypes as Symbol."""
    arguments = schema(target).arguments
    return tuple((a.name, symbolic(a.default_value) if a.has_default_value() else None) for a in arguments)


def symbolic(value: Any) -> Any:
    """Plain argument values: torch dtypes, devices, layouts and formats as Symbol, sequences as tuples."""
    if isinstance(value, torch.device):
        return Symbol("device")
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        return Symbol(str(value))
    if isinstance(value, list | tuple):
        return tuple(symbolic(item) for item in value)
    return value
