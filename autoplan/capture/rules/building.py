"""What the families' rules share: from identifiers per dimension to :class:`Traits`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from autoplan.capture.call import Call, TensorMeta, Traits, schema_arguments
from searchspace.errors import CaptureError
from searchspace.graph import DTYPE_BYTES, Argument, Family, InputRef, LocalOffset, LocalSize, TensorDim
from searchspace.layout import Reduction, Shape
from searchspace.notation import format_rule
from searchspace.rule import DimUse, DimUses, Identifier, Rule

Mark = str | tuple[str, int] | None
"""The identifier of a dimension, with its unit where that is not 1; None: never split."""
Marks = Sequence[Mark]

_LETTERS = "abcdefghijlmopqrstuvwxyz"  # without k and n, which the matrix products use


def letters(count: int, skip: str = "") -> list[str]:
    """Identifiers for ``count`` dimensions."""
    free = [letter for letter in _LETTERS if letter not in skip]
    return [free[i] if i < len(free) else f"d{i}" for i in range(count)]


def words(text: str) -> frozenset[str]:
    """A set of operator names, written as a line of text."""
    return frozenset(text.split())


def packet(target: str) -> str:
    """``"aten.add.Tensor"`` -> ``"add"``."""
    return target.split(".")[1]


def input_index(call: Call, name: str) -> int | None:
    """Which input the argument ``name`` is, or None when it is no tensor."""
    value = call.argument(name)
    return value.index if isinstance(value, InputRef) else None


def meta(call: Call, name: str) -> TensorMeta | None:
    """The tensor that is given as argument ``name``, or None."""
    index = input_index(call, name)
    return None if index is None else call.inputs[index]


def integers(value: Any) -> tuple[int, ...]:
    """A dim or a list of dims, as a tuple; None is the empty list."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, tuple) else (int(value),)


def dims_of(value: Any, rank: int) -> tuple[int, ...]:
    """Dims as numbers >= 0; an empty list or None means all."""
    given = integers(value)
    return tuple(d % rank if rank else 0 for d in given) if given else tuple(range(rank))


def broadcast(marks: Marks, shape: Shape, whole: Shape) -> list[Mark]:
    """The marks of a tensor that broadcasts to one of shape ``whole`` with ``marks``, aligned at the right."""
    skip = len(whole) - len(shape)
    return [
        mark if extent == full else None for mark, extent, full in zip(marks[skip:], shape, whole[skip:], strict=True)
    ]


def frozen(tensor: TensorMeta) -> list[Mark]:
    return [None] * len(tensor.shape)


def needs_gradient(call: Call) -> bool:
    return any(output.requires_grad for output in call.outputs) and not call.context.no_grad


def traits(
    call: Call,
    inputs: Mapping[int, Marks],
    outputs: Sequence[Marks],
    *,
    family: Family,
    reductions: Mapping[Identifier, Reduction] | None = None,
    added: Sequence[int] = (),
    linear: Sequence[Sequence[int]] = (),
    sizes: Mapping[str, int] | None = None,
    starts: Mapping[str, TensorDim | Sequence[TensorDim]] | None = None,
    replace: Mapping[str, Argument] | None = None,
    flops: float = 0.0,
    saves: Sequence[int] = (),
    saves_outputs: Sequence[int] = (),
    saves_bytes: int = 0,
    random: bool = False,
) -> Traits:
    """Traits of ``call`` whose tensors' dimensions carry the given marks.

    Inputs that are not mentioned are never split.  A mark with fewer than two units, or that no output or
    reduction makes use of, is dropped.  ``sizes`` names arguments that hold the shape of an output: they follow
    the shard where it can be split; ``starts`` names arguments that hold where the shard of a dimension, or of
    several, begins.  What ``saves`` lists counts only where a gradient is needed.
    """
    given = [list(inputs.get(i, frozen(t))) for i, t in enumerate(call.inputs)]
    every = given + [list(marks) for marks in outputs]
    shapes = [t.shape for t in call.inputs + call.outputs]
    weak = _unsplittable(every, shapes)
    uses = [tuple(_use(mark, weak) for mark in marks) for marks in every]
    kept = {use.id for tensor in uses for use in tensor if use is not None}
    rule = Rule(
        inputs=tuple(uses[: len(given)]),
        outputs=tuple(uses[len(given) :]),
        reductions=tuple((i, r) for i, r in (reductions or {}).items() if i in kept),
        added=tuple(added),
        linear=tuple(t for t in map(tuple, linear) if not any(call.inputs[i].dtype == "bool" for i in t)),
    )
    rule.check(shapes)
    rule = Rule(rule.inputs, rule.outputs, rule.reductions, rule.added, rule.linear, format_rule(rule, shapes))
    changed: dict[str, Argument] = dict(replace or {})
    for name, output in (sizes or {}).items():
        changed[name] = local_shape(rule.outputs[output], call.outputs[output].shape, output)
    for name, where in (starts or {}).items():
        changed[name] = LocalOffset(where) if isinstance(where, TensorDim) else tuple(LocalOffset(dim) for dim in where)
    args, kwargs = _with_arguments(call, changed)
    keeps = needs_gradient(call)
    return Traits(
        args, kwargs, rule, family, float(flops),
        tuple(sorted(set(saves))) if keeps else (), tuple(saves_outputs) if keeps else (), saves_bytes if keeps else 0,
        random,
    )  # fmt: skip


def local_shape(uses: DimUses, shape: Shape, output: int) -> tuple[Argument, ...]:
    """A shape argument: the shard's extent where the dimension can be split, else the number."""
    return tuple(
        extent if use is None else LocalSize(TensorDim(output, dim, output=True))
        for dim, (use, extent) in enumerate(zip(uses, shape, strict=True))
    )


def opaque(call: Call, family: Family = "composite", random: bool = False) -> Traits:
    """Traits of a call that is replicated only, and keeps all it reads and writes."""
    return traits(
        call, {}, [frozen(t) for t in call.outputs], family=family, random=random,
        saves=range(len(call.inputs)), saves_outputs=range(len(call.outputs)),
    )  # fmt: skip


def elements(tensor: TensorMeta) -> int:
    return prod(tensor.shape)


def size_bytes(tensor: TensorMeta) -> int:
    return elements(tensor) * DTYPE_BYTES[tensor.dtype]


def _unsplittable(every: Sequence[Marks], shapes: Sequence[Shape]) -> frozenset[str]:
    weak = set()
    for marks, shape in zip(every, shapes, strict=True):
        if len(marks) != len(shape):
            raise CaptureError(f"a rule gives {len(marks)} marks to a tensor of shape {list(shape)}")
        for mark, extent in zip(marks, shape, strict=True):
            if mark is not None:
                name, unit = mark if isinstance(mark, tuple) else (mark, 1)
                if unit < 1 or extent < 2 * unit:
                    weak.add(name)
    return frozenset(weak)


def _use(mark: Mark, weak: frozenset[str]) -> DimUse | None:
    if mark is None:
        return None
    name, unit = mark if isinstance(mark, tuple) else (mark, 1)
    return None if name in weak else DimUse(name, unit)


def _with_arguments(
    call: Call, changed: Mapping[str, Argument]
) -> tuple[tuple[Argument, ...], tuple[tuple[str, Argument], ...]]:
    """The call's arguments with some replaced, by the schema's names."""
    if not changed:
        return call.args, call.kwargs
    schema = schema_arguments(call.target)
    names = [name for name, _ in schema]
    args, kwargs = list(call.args), dict(call.kwargs)
    for name, value in changed.items():
        index = names.index(name)
        if name in kwargs or keyword_only(call.target, name):
            kwargs[name] = value
            continue
        while len(args) <= index:
            args.append(schema[len(args)][1])
        args[index] = value
    return tuple(args), tuple(kwargs.items())


def keyword_only(target: str, name: str) -> bool:
    """Whether the operator's schema takes the argument ``name`` by keyword only."""
    from autoplan.capture.call import overload

    return any(a.name == name and a.kwarg_only for a in overload(target)._schema.arguments)  # type: ignore[attr-defined]
