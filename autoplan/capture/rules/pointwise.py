"""Pointwise operators: every dimension of the result, with broadcasting."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autoplan.capture.call import Call, Traits, overload
from autoplan.capture.rules.building import (
    Mark,
    broadcast,
    dims_of,
    elements,
    frozen,
    input_index,
    letters,
    packet,
    traits,
    words,
)
from searchspace.graph import DTYPE_BYTES, InputRef, TensorDim

UNTAGGED = words(
    "to _to_copy contiguous alias detach detach_ lift lift_fresh lift_fresh_copy polar complex conj _conj resolve_conj "
    "resolve_neg real imag hardswish log_sigmoid arctan2 floor_divide divide multiply subtract negative absolute rsub "
    "float_power fill copy isclose where masked_fill __and__ __or__ __xor__ __lshift__ __rshift__ and_ greater "
    "greater_equal less less_equal not_equal true_divide arcsin arccos arctan arcsinh arccosh arctanh fix "
    "special_expit special_erf special_log1p special_expm1 isreal result_type logical_not square "
    "_autocast_to_reduced_precision _autocast_to_full_precision type_as bucketize isin special_xlogy ldexp"
)
"""Pointwise by nature though torch does not tag them (aliases, copies, casts)."""

ELEMENTWISE_LOSSES = words(
    "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div "
    "poisson_nll_loss soft_margin_loss"
)

SAVES_OUTPUT = words("sigmoid special_expit tanh tan exp exp2 expm1 special_expm1 relu sqrt rsqrt reciprocal")
SAVES_NOTHING = words(
    "add sub rsub neg negative subtract clone to _to_copy contiguous alias detach real imag conj _conj positive "
    "lift_fresh_copy copy type_as floor ceil round trunc sign fill complex _autocast_to_reduced_precision "
    "_autocast_to_full_precision lift_fresh"
)

_SUM_ALL = words("add sub rsub subtract")
_ALONE = words(
    "neg negative clone contiguous alias detach positive lift_fresh_copy lift_fresh real imag conj _conj resolve_conj "
    "resolve_neg to _to_copy type_as _autocast_to_full_precision"
)


def is_pointwise(target: str) -> bool:
    return packet(target) in UNTAGGED or torch.Tag.pointwise in overload(target).tags  # type: ignore[attr-defined]


def pointwise(call: Call) -> Traits | None:
    """``a b, b -> a b``: operands broadcast to the result's shape."""
    whole = call.outputs[0].shape
    if any(output.shape != whole for output in call.outputs):
        return None
    marks = letters(len(whole))
    inputs = {}
    for index, tensor in enumerate(call.inputs):
        if (packet(call.target) in ("type_as", "bucketize", "isin") and index > 0) or len(tensor.shape) > len(whole):
            inputs[index] = frozen(tensor)
        else:
            inputs[index] = broadcast(marks, tensor.shape, whole)
    saves, saves_outputs = _saved(call)
    return traits(
        call, inputs, [marks] * len(call.outputs), family="pointwise", linear=linear_sets(call),
        flops=elements(call.outputs[0]), saves=saves, saves_outputs=saves_outputs,
    )  # fmt: skip


def elementwise_loss(call: Call) -> Traits | None:
    """Losses without reduction are pointwise; reduced ones are taken apart by a rewrite."""
    if call.argument("reduction") != 0:
        return None
    found = pointwise(call)
    if found is None:
        return None
    return traits(
        call, {i: _marks(uses) for i, uses in enumerate(found.rule.inputs)}, [_marks(found.rule.outputs[0])],
        family="loss", flops=4 * elements(call.outputs[0]), saves=range(len(call.inputs)),
    )  # fmt: skip


def channelwise(call: Call) -> Traits | None:
    """prelu: the weight has one element, or one per channel (dimension 1)."""
    x = call.inputs[0]
    marks = letters(len(x.shape))
    weight = call.inputs[1].shape
    own = [marks[1]] if len(weight) == 1 and weight[0] > 1 and len(x.shape) > 1 else [None] * len(weight)
    return traits(call, {0: marks, 1: own}, [marks], family="pointwise", flops=elements(x), saves=(0, 1))


def glu(call: Call) -> Traits | None:
    """Halves along ``dim`` are combined; all other dimensions."""
    x = call.inputs[0]
    marks: list[Mark] = [*letters(len(x.shape))]
    marks[dims_of(call.argument("dim"), len(x.shape))[0]] = None
    return traits(call, {0: marks}, [marks], family="pointwise", flops=elements(x), saves=(0,))


def drawn(call: Call) -> Traits | None:
    """autoplan.dropout and autoplan.bernoulli: pointwise, with the block's position."""
    marks = letters(len(call.outputs[0].shape))
    dropout = packet(call.target) == "dropout"
    return traits(
        call, {0: marks}, [marks], family="random", linear=((0,),) if dropout else (),
        starts={"starts": [TensorDim(0, dim) for dim in range(len(marks))]},
        flops=elements(call.outputs[0]), saves_bytes=elements(call.outputs[0]) if dropout else 0, random=True,
    )  # fmt: skip


def linear_sets(call: Call) -> tuple[tuple[int, ...], ...]:
    """Sets of inputs in which the operator is jointly linear and homogeneous: never where a scalar is added."""
    name = packet(call.target)
    tensors = [i for i, t in enumerate(call.inputs) if _adds_up(call, i)]
    if call.outputs[0].dtype == "bool" or (len(tensors) != len(call.inputs) and name not in ("where", "masked_fill")):
        return ()
    if name in _SUM_ALL:
        return ((0, 1),) if len(call.inputs) == 2 else ((0,),) if call.argument("other") == 0 else ()
    if name in _ALONE:
        return ((0,),) if _keeps_sums(call.inputs[0].dtype, call.outputs[0].dtype) else ()
    if name in ("mul", "multiply"):
        return tuple((i,) for i in range(len(call.inputs)))
    if name in ("div", "divide", "true_divide"):
        rounds = call.target.endswith("_mode") and call.argument("rounding_mode") is not None
        return () if rounds or not isinstance(call.argument("self"), InputRef) else ((0,),)
    if name == "where":
        branches = [call.argument("self"), call.argument("other")]
        indices = tuple(b.index for b in branches if isinstance(b, InputRef))
        return (indices,) if indices and all(isinstance(b, InputRef) or b == 0 for b in branches) else ()
    if name == "masked_fill":
        value = input_index(call, "value")
        return ((0, value),) if value is not None else ((0,),) if call.argument("value") == 0 else ()
    if name == "lerp":
        return ((0, 1),)
    if name == "addcmul":
        return ((0, 1), (0, 2))
    if name == "addcdiv":
        return ((0, 1),)
    return ()


def _adds_up(call: Call, index: int) -> bool:
    return call.inputs[index].dtype != "bool" and _keeps_sums(call.inputs[index].dtype, call.outputs[0].dtype)


def _keeps_sums(source: str, target: str) -> bool:
    """Whether casting parts of a sum loses nothing but rounding that the target's type has anyway.

    So a floating-point sum may be rounded part by part, and integers may not become narrower.
    """
    if source == target or _kind(source) < _kind(target):
        return True
    return _kind(source) == _kind(target) and (_kind(source) > 0 or DTYPE_BYTES[source] < DTYPE_BYTES[target])


def _kind(dtype: str) -> int:
    return 2 if dtype.startswith("complex") else 1 if "float" in dtype else 0


def _saved(call: Call) -> tuple[Sequence[int], Sequence[int]]:
    """What autograd keeps: (inputs, outputs)."""
    name = packet(call.target)
    floats = [i for i, t in enumerate(call.inputs) if t.requires_grad]
    if name in SAVES_NOTHING or not floats:
        return (), ()
    if name in SAVES_OUTPUT:
        return (), (0,)
    if name in ("mul", "multiply"):
        return [i for i in range(len(call.inputs)) if any(j != i for j in floats)], ()
    if name in ("div", "divide", "true_divide"):
        if len(call.inputs) == 1:
            return (), ()
        return ((0, 1) if 1 in floats else (1,)), ()
    if name in ("where", "masked_fill"):
        return [i for i, t in enumerate(call.inputs) if t.dtype == "bool"], ()
    return range(len(call.inputs)), ()


def _marks(uses: Sequence[object]) -> list[str | tuple[str, int] | None]:
    return [None if use is None else (use.id, use.unit) for use in uses]  # type: ignore[attr-defined]
