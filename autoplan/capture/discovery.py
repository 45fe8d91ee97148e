"""Rules for operators of no known family, found by running them.

The operator is run whole and split on small stand-ins of its shapes, for each way of cutting one dimension of each
input (or none), and what :mod:`autoplan.capture.verification` accepts, forward and backward, becomes an identifier.
Only spatial splits are sought: partial sums that merely agree within rounding have been mistaken for linearity
(EasyDist's MetaSPMD, which this follows, has an allow-list too).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache
from math import lcm, prod
from typing import Any

import torch
from torch import Tensor

from autoplan.capture.call import Call, TensorMeta, Traits, overload
from autoplan.capture.verification import Case, check
from autoplan.operators import resolve
from searchspace.errors import RuleError
from searchspace.graph import InputRef
from searchspace.layout import Shape
from searchspace.rule import DimUse, Rule

_SMALLEST = 4  # two and three parts, uneven
LARGEST = 1 << 16  # elements of a stand-in
_CANDIDATES = 3000


def discover(call: Call) -> Traits | None:
    """Traits with the spatial rule that the operator obeys, or None where there is none to be found."""
    from autoplan.capture.rules.building import traits

    rule = _discover(_stand_in(call))
    if rule is None or not rule.identifiers:
        return None
    marks = [[None if use is None else use.id for use in uses] for uses in rule.inputs + rule.outputs]
    count = len(call.inputs)
    return traits(
        call, dict(enumerate(marks[:count])), marks[count:], family="composite",
        flops=sum(prod(t.shape) for t in call.inputs + call.outputs),
        saves=range(count), saves_outputs=range(len(call.outputs)),
    )  # fmt: skip


def _stand_in(call: Call) -> Call:
    """The same call at small extents.

    Equal extents stay equal and divisors stay divisors; integer arguments that equal an extent follow it.  The
    outputs' shapes are not known before the call is run, and left out.
    """
    small = _shrinking([t.shape for t in call.inputs])

    def shrink(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(shrink, value))
        return small.get(value, value) if isinstance(value, int) and not isinstance(value, bool) else value

    inputs = tuple(TensorMeta(tuple(small.get(e, e) for e in t.shape), t.dtype, t.requires_grad) for t in call.inputs)
    kwargs = tuple((name, shrink(value)) for name, value in call.kwargs)
    return Call(call.target, tuple(map(shrink, call.args)), kwargs, inputs, (), call.context)


def small_shapes(inputs: Sequence[TensorMeta]) -> list[Shape]:
    """Small extents for tensors: equal ones stay equal, and divisors stay divisors."""
    shapes = [t.shape for t in inputs]
    small = _shrinking(shapes)
    return [tuple(small.get(extent, extent) for extent in shape) for shape in shapes]


def _shrinking(shapes: Sequence[Shape]) -> dict[int, int]:
    """A small extent for each extent; itself where all are small, or where small ones do not exist."""
    if max((prod(shape) for shape in shapes), default=0) <= 512 and all(
        e == 1 or e >= _SMALLEST for s in shapes for e in s
    ):
        small = {e: e for shape in shapes for e in shape}
    else:
        small = {}
        for extent in sorted({e for shape in shapes for e in shape if e > 1}):
            base = lcm(1, *(new for old, new in small.items() if extent % old == 0))
            small[extent] = next(
                m for k in itertools.count(1) if (m := base * k) >= _SMALLEST and m not in small.values()
            )
    if any(prod(small.get(e, e) for e in shape) > LARGEST for shape in shapes):
        small = {e: e for e in small}
    return small


@lru_cache(maxsize=4096)
def _discover(call: Call) -> Rule | None:
    if torch.Tag.nondeterministic_seeded in overload(call.target).tags:  # type: ignore[attr-defined]
        return None
    if any(prod(t.shape) > LARGEST for t in call.inputs) or not call.inputs:
        return None
    generator = torch.Generator().manual_seed(0)
    tensors = tuple(data(t, generator) for t in call.inputs)
    case = Case(call.target, resolve(call.target), call.args, call.kwargs, tensors)
    shapes = [t.shape for t in call.inputs]
    empty = tuple((None,) * len(shape) for shape in shapes)
    try:
        outputs = _whole(case)
        if any(not torch.equal(a, b) for a, b in zip(outputs, _whole(case), strict=True) if not a.isnan().any()):
            return None
    except Exception:  # the stand-in is no valid input of an unknown operator: any error may come
        return None
    after = [tuple(t.shape) for t in outputs]
    found = Rule(empty, tuple((None,) * len(shape) for shape in after), text="discovered")
    for cut in itertools.islice(_cuts(shapes), _CANDIDATES):
        if any(d is not None and found.inputs[i][d] is not None for i, d in enumerate(cut)):
            continue
        extent = next(shapes[i][d] for i, d in enumerate(cut) if d is not None)
        found = _extended(case, found, cut, after, extent) or found
    return found


def _extended(case: Case, known: Rule, cut: Sequence[int | None], after: Sequence[Shape], extent: int) -> Rule | None:
    """``known`` with the identifier that ``cut`` makes, if some dimensions of the outputs follow it."""
    name = f"d{len(known.identifiers)}"
    options = [
        [d for d, e in enumerate(shape) if e % extent == 0 and e and known.outputs[i][d] is None]
        for i, shape in enumerate(after)
    ]
    for ends in itertools.product(*options):
        alone = Rule(
            tuple(_marked((None,) * t.dim(), d, name, 1) for t, d in zip(case.tensors, cut, strict=True)),
            tuple(
                _marked((None,) * len(shape), d, name, shape[d] // extent) for shape, d in zip(after, ends, strict=True)
            ),
        )
        if any(use is not None and use.unit > 1 for uses in alone.outputs for use in uses):
            continue
        try:
            check(case, alone, (2, 3), 1e-7)
        except RuleError:
            continue
        except Exception:  # an unknown operator may raise anything on a part
            continue
        inputs = tuple(_marked(uses, d, name, 1) for uses, d in zip(known.inputs, cut, strict=True))
        outputs = tuple(_marked(uses, d, name, 1) for uses, d in zip(known.outputs, ends, strict=True))
        return Rule(inputs, outputs, text="discovered")
    return None


def _marked(uses: Sequence[DimUse | None], dim: int | None, name: str, unit: int) -> tuple[DimUse | None, ...]:
    return tuple(DimUse(name, unit) if d == dim else use for d, use in enumerate(uses))


def _cuts(shapes: Sequence[Shape]) -> list[tuple[int | None, ...]]:
    """One dimension or none of each input, all of the same extent; those that cut most inputs come first."""
    options: list[list[int | None]] = [
        [*(d for d, extent in enumerate(shape) if extent >= _SMALLEST), None] for shape in shapes
    ]
    total = prod(map(len, options))
    if total > 200_000:
        return []
    found = [
        cut
        for cut in itertools.product(*options)
        if len({shapes[i][d] for i, d in enumerate(cut) if d is not None}) == 1
    ]
    return sorted(found, key=lambda cut: sum(d is None for d in cut))


def _whole(case: Case) -> list[Tensor]:
    def value(argument: Any) -> Any:
        if isinstance(argument, InputRef):
            return case.tensors[argument.index]
        if isinstance(argument, tuple):
            return [value(item) for item in argument]
        name = getattr(argument, "name", None)
        if name is not None:
            return torch.device("cpu") if name == "device" else getattr(torch, name.removeprefix("torch."))
        return argument

    returned = case.function(*map(value, case.args), **{name: value(a) for name, a in case.kwargs})
    return list(returned) if isinstance(returned, list | tuple) else [returned]


def data(meta: TensorMeta, generator: torch.Generator) -> Tensor:
    dtype = getattr(torch, meta.dtype)
    if dtype.is_floating_point or dtype.is_complex:
        wide = torch.complex128 if dtype.is_complex else torch.float64
        return torch.randn(meta.shape, dtype=wide, generator=generator).requires_grad_(meta.requires_grad)
    if dtype == torch.bool:
        return torch.randint(0, 2, meta.shape, generator=generator).bool()
    return torch.randint(0, _SMALLEST, meta.shape, generator=generator).to(dtype)
