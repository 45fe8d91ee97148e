"""Every rule is verified, not believed: an operator is run whole and split, forward and backward.

For each choice of a rule on one axis of n devices: the inputs are laid out as the choice says (split, replicated,
or as random summands), each device's call is computed, and the results must combine to the whole result as the
choice's output placements say.  Gradients likewise, by the table of :func:`searchspace.layout.delivered_gradient`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autoplan.capture.call import Call, TensorMeta, symbolic
from autoplan.operators import resolve
from autoplan.operators.composite import composite_of
from searchspace.errors import RuleError
from searchspace.graph import (
    Argument,
    GlobalSize,
    InputRef,
    LocalEnd,
    LocalOffset,
    LocalSize,
    Symbol,
    TensorDim,
)
from searchspace.layout import (
    Partial,
    Placement,
    Region,
    Replicated,
    Shape,
    Split,
    delivered_gradient,
    demanded_gradient,
    refine,
    whole,
)
from searchspace.rule import Choice, Rule

_OPERATOR_SEED = 20240913


@dataclass(frozen=True)
class Case:
    """An operator with concrete inputs, and arguments as :class:`~searchspace.graph.Operator` has them."""

    name: str
    function: Callable[..., Any]
    args: tuple[Argument, ...]
    kwargs: tuple[tuple[str, Argument], ...]
    tensors: tuple[Tensor, ...]
    outputs: tuple[Shape, ...] = ()


def make_call(
    target: str, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
) -> tuple[Call, tuple[Tensor, ...]]:
    """The call of ``target`` on tensors, and the tensors by index."""
    tensors: list[Tensor] = []
    plain = tuple(_refer(arg, tensors) for arg in args)
    keywords = tuple((name, _refer(arg, tensors)) for name, arg in (kwargs or {}).items())
    case = Case(target, resolve(target), plain, keywords, tuple(tensors))
    outputs = _run(case, tensors, [whole(tuple(t.shape)) for t in tensors], [])
    return Call(target, plain, keywords, tuple(map(_meta, tensors)), tuple(map(_meta, outputs))), tuple(tensors)


def verify_rule(
    operator: str | Callable[..., Any] | torch.nn.Module,
    args: Sequence[Any],
    rule: Rule | None = None,
    parts: Sequence[int] = (2, 3),
    *,
    kwargs: Mapping[str, Any] | None = None,
    tolerance: float = 1e-9,
) -> tuple[str, ...]:
    """Check that ``operator`` (a qualified name, a function of tensors, a composite) may be split as ``rule`` says.

    ``args`` and ``kwargs`` hold real tensors, float64 for the default ``tolerance`` (of the larger of 1 and the
    largest magnitude); those that require a gradient get theirs compared too.  Integers that follow the shard are
    given as LocalSize and its kin.  Without ``rule``, the one that autoplan has for the name is checked, or the one
    that a composite (a function or a module of a class decorated with :func:`autoplan.composite`) has.
    Returns the labels of the choices that could be cut into any of ``parts``.  Raises RuleError saying which
    choice failed where, and by how much.
    """
    if (found := composite_of(operator)) is not None:
        composite, module = found
        bound, key = composite.bind(module, tuple(args), kwargs or {})
        operator, args, kwargs = composite.target, (bound, key, (0,) * len(composite.offsets)), None
    if isinstance(operator, str) and rule is None:
        from autoplan.capture.rules import describe

        call, tensors = make_call(operator, args, kwargs)
        traits = describe(call)
        shapes = tuple(output.shape for output in call.outputs)
        case = Case(operator, resolve(operator), traits.args, traits.kwargs, tensors, shapes)
        return check(case, traits.rule, parts, tolerance)
    if rule is None:
        raise RuleError(f"a rule is needed to verify the function {operator!r}")
    inline: list[Tensor] = []
    plain = tuple(_refer(arg, inline) for arg in args)
    keywords = tuple((name, _refer(arg, inline)) for name, arg in (kwargs or {}).items())
    function = resolve(operator) if isinstance(operator, str) else operator
    name = operator if isinstance(operator, str) else getattr(operator, "__name__", str(operator))
    return check(Case(name, function, plain, keywords, tuple(inline)), rule, parts, tolerance)


def check(case: Case, rule: Rule, parts: Sequence[int], tolerance: float) -> tuple[str, ...]:
    """See :func:`verify_rule`."""
    regions = [whole(tuple(t.shape)) for t in case.tensors]
    inputs = [_leaf(t) for t in case.tensors]
    outputs = _run(case, inputs, regions, [whole(shape) for shape in case.outputs])
    generator = torch.Generator().manual_seed(0)
    gradients = [_random_like(o, generator) if o.requires_grad else None for o in outputs]
    reference = _Reference(inputs, outputs, gradients, _differentiate(inputs, outputs, gradients))
    shapes = [tuple(t.shape) for t in (*inputs, *outputs)]
    rule.check(shapes)
    verified = []
    for label, choice in rule.choices.items():
        counts = [n for n in parts if label.startswith("+") or (label and rule.units(label, shapes) >= n)]
        for n in counts:
            try:
                _check_choice(case, choice, n, reference, tolerance, generator)
            except RuleError as error:
                raise RuleError(
                    f"{case.name}: rule {rule.text!r} fails along {label!r} in {n} parts: {error}"
                ) from error
        if counts:
            verified.append(label)
    return tuple(verified)


@dataclass(frozen=True)
class _Reference:
    """The whole operator: inputs, outputs, gradients of the outputs and of the inputs."""

    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    output_gradients: Sequence[Tensor | None]
    input_gradients: Sequence[Tensor | None]


def _check_choice(
    case: Case, choice: Choice, n: int, reference: _Reference, tolerance: float, generator: torch.Generator
) -> None:
    laid_out = [_lay_out(t, p, n, generator) for t, p in zip(reference.inputs, choice.inputs, strict=True)]
    wanted = demanded_gradient(choice.outputs)
    results, gradients = [], []
    for device in range(n):
        inputs = [_leaf(held[device]) for held in laid_out]
        regions_in = _regions(reference.inputs, choice.inputs, n, device)
        regions_out = _regions(reference.outputs, choice.outputs, n, device)
        try:
            outputs = _run(case, inputs, regions_in, regions_out)
        except (RuntimeError, IndexError, ValueError, TypeError) as error:
            raise RuleError(f"part {device} cannot be computed: {error}") from error
        results.append(outputs)
        given = [
            None if g is None or not o.requires_grad else _slice(g, _regions([g], [p], n, device)[0])
            for g, p, o in zip(reference.output_gradients, wanted, outputs, strict=True)
        ]
        gradients.append(_differentiate(inputs, outputs, given))
    for i, (placement, expected) in enumerate(zip(choice.outputs, reference.outputs, strict=True)):
        _compare([held[i] for held in results], placement, expected, f"output {i}", tolerance)
    for i, (placement, gradient) in enumerate(
        zip(delivered_gradient(choice.inputs, choice.outputs), reference.input_gradients, strict=True)
    ):
        if reference.inputs[i].requires_grad:
            expected = torch.zeros_like(reference.inputs[i]) if gradient is None else gradient
            held = [
                torch.zeros_like(laid_out[i][device]) if (own := gradients[device][i]) is None else own
                for device in range(n)
            ]
            _compare(held, placement, expected, f"the gradient of input {i}", tolerance)


def _lay_out(tensor: Tensor, placement: Placement, n: int, generator: torch.Generator) -> list[Tensor]:
    """What each of n devices holds of ``tensor``."""
    if isinstance(placement, Split):
        return [_slice(tensor, refine(whole(tuple(tensor.shape)), placement, n, i)) for i in range(n)]
    if isinstance(placement, Replicated):
        return [tensor] * n
    summands = [_random_like(tensor, generator) for _ in range(n - 1)]
    return [*summands, tensor.detach() - sum(summands)]


def _compare(held: Sequence[Tensor], placement: Placement, expected: Tensor, what: str, tolerance: float) -> None:
    """Raise RuleError unless what the devices hold makes ``expected``."""
    if isinstance(placement, Partial):
        stacked = torch.stack([t.detach() for t in held]) if all(t.shape == expected.shape for t in held) else None
        if stacked is None:
            raise RuleError(
                f"{what} has shapes {[list(t.shape) for t in held]} where {list(expected.shape)} is expected"
            )
        _equal(stacked.sum(0) if placement.reduction == "sum" else stacked.amax(0), expected, what, tolerance)
        return
    for i, tensor in enumerate(held):
        region = refine(whole(tuple(expected.shape)), placement, len(held), i)
        _equal(tensor, _slice(expected, region), f"{what} of part {i}", tolerance)


def _equal(found: Tensor, expected: Tensor, what: str, tolerance: float) -> None:
    found, expected = found.detach(), expected.detach()
    if found.shape != expected.shape:
        raise RuleError(f"{what} has shape {list(found.shape)}, expected {list(expected.shape)}")
    if not expected.numel():
        return
    if not (expected.is_floating_point() or expected.is_complex()):
        if not torch.equal(found.to(expected.dtype), expected):
            raise RuleError(f"{what} differs in {int((found != expected).sum())} of {expected.numel()} elements")
        return
    if not torch.equal(torch.isnan(found), torch.isnan(expected)):
        raise RuleError(f"{what} is not a number in other places")
    same = (found == expected) | torch.isnan(expected)
    error = float(torch.where(same, 0, (found - expected)).abs().max())
    finite = expected[torch.isfinite(expected)]
    scale = max(1.0, float(finite.abs().max())) if finite.numel() else 1.0
    if not error <= tolerance * scale:
        raise RuleError(f"{what} differs by {error:.3g}, allowed is {tolerance * scale:.3g}")


def _regions(tensors: Sequence[Tensor], placements: Sequence[Placement], n: int, device: int) -> list[Region]:
    return [refine(whole(tuple(t.shape)), p, n, device) for t, p in zip(tensors, placements, strict=True)]


def _run(case: Case, tensors: Sequence[Tensor], inputs: Sequence[Region], outputs: Sequence[Region]) -> list[Tensor]:
    """The operator's results on ``tensors``, which hold the given regions."""
    wholes = [tuple(t.shape) for t in case.tensors]

    def value(argument: Argument) -> Any:
        match argument:
            case InputRef(index):
                return tensors[index]
            case LocalSize(of):
                low, high = interval(of)
                return high - low
            case LocalOffset(of):
                return interval(of)[0]
            case LocalEnd(of):
                return interval(of)[1]
            case GlobalSize(of):
                return (case.outputs if of.output else wholes)[of.index][of.dim]
            case Symbol("operator"):
                return _OPERATOR_SEED
            case Symbol("device"):
                return tensors[0].device if tensors else torch.device("cpu")
            case Symbol(name):
                return getattr(torch, name.removeprefix("torch."))
            case tuple():
                return [value(item) for item in argument]
            case _:
                return argument

    def interval(of: TensorDim) -> tuple[int, int]:
        regions = outputs if of.output else inputs
        if of.index >= len(regions):
            raise RuleError(f"{case.name}: an argument refers to dimension {of.dim} of {of}, which is not known")
        return regions[of.index][of.dim]

    with torch.enable_grad():
        returned = case.function(*map(value, case.args), **{name: value(a) for name, a in case.kwargs})
    found = list(returned) if isinstance(returned, list | tuple) else [returned]
    if not all(isinstance(t, Tensor) for t in found):
        raise RuleError(f"{case.name} returns {[type(t).__name__ for t in found]}; only tensors can be split")
    return found


def _differentiate(
    inputs: Sequence[Tensor], outputs: Sequence[Tensor], gradients: Sequence[Tensor | None]
) -> list[Tensor | None]:
    wanted = [t for t in inputs if t.requires_grad]
    chosen = [(o, g) for o, g in zip(outputs, gradients, strict=True) if g is not None]
    if not wanted or not chosen:
        return [None] * len(inputs)
    found = iter(torch.autograd.grad([o for o, _ in chosen], wanted, [g for _, g in chosen], allow_unused=True))
    return [next(found) if t.requires_grad else None for t in inputs]


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _slice(tensor: Tensor, region: Region) -> Tensor:
    found = tensor.detach()[tuple(slice(low, high) for low, high in region)]
    return found.contiguous().requires_grad_(tensor.requires_grad)


def _random_like(tensor: Tensor, generator: torch.Generator) -> Tensor:
    if tensor.is_floating_point() or tensor.is_complex():
        found = torch.randn(tensor.shape, dtype=tensor.dtype, generator=generator)
    else:
        found = torch.randint(-3, 4, tensor.shape, generator=generator).to(tensor.dtype)
    return found.requires_grad_(tensor.requires_grad)


def _refer(arg: Any, tensors: list[Tensor]) -> Any:
    if isinstance(arg, Tensor):
        tensors.append(arg)
        return InputRef(len(tensors) - 1)
    if isinstance(arg, list | tuple):
        return tuple(_refer(item, tensors) for item in arg)
    return symbolic(arg)


def _meta(tensor: Tensor) -> TensorMeta:
    return TensorMeta(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.requires_grad)
