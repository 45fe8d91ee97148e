"""Matrix products and everything that einsum can say."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd, prod

from autoplan.capture.call import Call, Traits
from autoplan.capture.rules.building import Mark, elements, input_index, integers, letters, packet, traits, words
from searchspace.graph import LocalEnd, LocalOffset, TensorDim

PRODUCTS = words("linear matmul linalg_matmul mm bmm mv dot vdot inner outer ger addmm addmv addbmm baddbmm addr")
_FIXED = {
    "mm": "mk,kn->mn", "bmm": "bmk,bkn->bmn", "mv": "mk,k->m", "dot": "k,k->", "vdot": "k,k->",
    "outer": "m,n->mn", "ger": "m,n->mn", "addmm": "mk,kn->mn", "addmv": "mk,k->m", "addbmm": "bmk,bkn->mn",
    "baddbmm": "bmk,bkn->bmn", "addr": "m,n->mn",
}  # fmt: skip


def product(call: Call) -> Traits | None:
    """``b m k+, b k+ n -> b m n``, whatever the name."""
    name = packet(call.target)
    if name == "linear":
        lead = letters(len(call.inputs[0].shape) - 1)
        out = ["n"] * (len(call.inputs[1].shape) - 1)
        return contraction(call, [[*lead, "k"], [*out, "k"]], [*lead, *out], _addend(call, "bias"))
    if name in ("matmul", "linalg_matmul"):
        return contraction(call, *_matmul([len(t.shape) for t in call.inputs]))
    if name == "inner":
        left, right = (len(t.shape) for t in call.inputs)
        if not left or not right:
            return None
        every = letters(left + right - 2)
        return contraction(call, [[*every[: left - 1], "k"], [*every[left - 1 :], "k"]], every)
    operands, output = _FIXED[name].split("->")
    added = 0 if name.startswith("add") or name == "baddbmm" else None
    return contraction(call, [list(operand) for operand in operands.split(",")], list(output), added)


def _matmul(ranks: Sequence[int]) -> tuple[list[list[str]], list[str]]:
    """Operands' and result's identifiers of matmul for operands of these ranks (numpy's rules)."""
    left, right = ranks
    batch = letters(max(left, right, 2) - 2, skip="m")
    operands = [
        ["k"] if left == 1 else [*batch[len(batch) - left + 2 :], "m", "k"],
        ["k"] if right == 1 else [*batch[len(batch) - right + 2 :], "k", "n"],
    ]
    return operands, [*batch, *(["m"] if left > 1 else []), *(["n"] if right > 1 else [])]


def einsum(call: Call) -> Traits | None:
    """The equation is the rule; a repeated letter in one operand (a diagonal) is never split."""
    equation = str(call.argument("equation")).replace(" ", "")
    left, arrow, output = equation.partition("->")
    terms = left.split(",")
    operands: list[list[str]] = []
    ellipsis = max((len(t.shape) - len(term.replace("...", ""))) for term, t in zip(terms, call.inputs, strict=True))
    for term, tensor in zip(terms, call.inputs, strict=True):
        rest = len(tensor.shape) - len(term.replace("...", ""))
        before, dots, after = term.partition("...")
        operands.append([*before, *([f"e{i}" for i in range(ellipsis - rest, ellipsis)] if dots else []), *after])
    if arrow:
        before, dots, after = output.partition("...")
        result = [*before, *([f"e{i}" for i in range(ellipsis)] if dots else []), *after]
    else:  # implicit: letters that occur once, in order
        flat = "".join(terms).replace(".", "")
        result = [f"e{i}" for i in range(ellipsis)] + sorted(c for c in set(flat) if flat.count(c) == 1)
    return contraction(call, operands, result)


def tensordot(call: Call) -> Traits | None:
    """The dims of ``dims_self`` meet those of ``dims_other``."""
    left, right = (len(t.shape) for t in call.inputs)
    pairs = list(
        zip(
            [d % left for d in integers(call.argument("dims_self"))],
            [d % right for d in integers(call.argument("dims_other"))],
            strict=True,
        )
    )
    names = letters(left + right)
    first = names[:left]
    second: list[str] = names[left:]
    for a, b in pairs:
        second[b] = first[a]
    shared = {first[a] for a, _ in pairs}
    return contraction(call, [first, second], [i for i in first + second if i not in shared])


def contraction(
    call: Call, operands: Sequence[Sequence[str]], output: Sequence[str], added: int | None = None
) -> Traits:
    """Sum over all identifiers that the output lacks of the product of the operands; ``added`` is added once."""
    indices = [i for i in range(len(call.inputs)) if i != added][: len(operands)]
    extents: dict[str, int] = {}
    for index, ids in zip(indices, operands, strict=True):
        for name, extent in zip(ids, call.inputs[index].shape, strict=True):
            extents[name] = max(extents.get(name, 1), extent)
    diagonal = {name for ids in operands for name in ids if list(ids).count(name) > 1}
    inputs: dict[int, list[Mark]] = {}
    for index, ids in zip(indices, operands, strict=True):
        shape = call.inputs[index].shape
        inputs[index] = [
            name if extent == extents[name] and name not in diagonal else None
            for name, extent in zip(ids, shape, strict=True)
        ]
    result: list[Mark] = [None if name in diagonal else name for name in output]
    if added is not None:
        shape = call.inputs[added].shape
        tail = result[len(result) - len(shape) :]
        inputs[added] = [name if e == f else None for name, e, f in zip(tail, shape, _tail(call, shape), strict=True)]
    together = (added,) if added is not None else ()
    reduced = [name for name in extents if name not in output and name not in diagonal]
    gradient = [call.inputs[i].requires_grad for i in indices]
    return traits(
        call, inputs, [result], family="matmul",
        reductions=dict.fromkeys(reduced, "sum"), added=together,
        linear=[tuple(sorted((i, *together))) for i in indices],
        flops=2 * prod(extents.values()),
        saves=[i for i, own in zip(indices, gradient, strict=True) if sum(gradient) > own],
    )  # fmt: skip


def _tail(call: Call, shape: Sequence[int]) -> Sequence[int]:
    whole = call.outputs[0].shape
    return whole[len(whole) - len(shape) :]


def _addend(call: Call, name: str) -> int | None:
    return input_index(call, name)


def bilinear(call: Call) -> Traits | None:
    """``* i+, * j+, n i+ j+, n & -> * n``."""
    lead = letters(len(call.inputs[0].shape) - 1, skip="ij")
    return contraction(call, [[*lead, "i"], [*lead, "j"], ["n", "i", "j"]], [*lead, "n"], _addend(call, "bias"))


def fused_linear(call: Call) -> Traits | None:
    """autoplan.fused_linear: ``a k+, n k+, n & -> a m, a (m 2)``; the weight's rows are taken where they are needed.

    The parts split together, in as many units as all of them have; the weight stays whole along its rows.
    """
    lead: list[Mark] = [*letters(len(call.inputs[0].shape) - 1)]
    widths = [output.shape[-1] for output in call.outputs]
    units = gcd(*widths)
    inputs: dict[int, list[Mark]] = {0: [*lead, "k"], 1: [None, "k"], 2: [None]}
    last = len(lead)
    ends = {
        name: tuple(kind(TensorDim(i, last, output=True)) for i in range(len(widths)))
        for name, kind in (("starts", LocalOffset), ("stops", LocalEnd))
    }
    bias = (2,) if len(call.inputs) > 2 else ()
    x, weight = call.inputs[:2]
    return traits(
        call, {i: inputs[i] for i in range(len(call.inputs))}, [[*lead, ("n", width // units)] for width in widths],
        family="matmul", reductions={"k": "sum"}, added=bias, linear=[(0, *bias), (1, *bias)], replace=ends,
        flops=2 * elements(x) * weight.shape[0],
        saves=[i for i in (0, 1) if call.inputs[1 - i].requires_grad],
    )  # fmt: skip
