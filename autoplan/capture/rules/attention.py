"""Scaled dot product attention: batch, heads, query sequence, and the value's features."""

from __future__ import annotations

from autoplan.capture.call import Call, Traits
from autoplan.capture.rules.building import Mark, broadcast, elements, input_index, letters, packet, traits
from searchspace.graph import TensorDim


def attention(call: Call) -> Traits | None:
    """``b (h 4) s e^, b h t^ e^, b h t^ f, b (h 4) s t^ -> b (h 4) s f``, with 4 query heads to a key head.

    The query sequence splits unless the kernel's own causal mask needs to know where it begins;
    autoplan.causal_attention is told.
    """
    q, k, v = call.inputs[:3]
    y = call.outputs[0]
    local = packet(call.target) == "causal_attention"
    causal = local or bool(call.argument("is_causal"))
    rank = len(y.shape)
    lead: list[Mark] = [*letters(rank - 2, skip="hst")]
    heads = rank - 3
    share = 1
    if call.argument("enable_gqa") and heads >= 0:
        share = q.shape[heads] // k.shape[heads]
        if k.shape[heads] != v.shape[heads]:
            return None
    if heads >= 0:
        lead[heads] = "h"
    whole = (*y.shape[:-2],)
    seq: Mark = "s" if local or not causal else None

    def marks(shape: tuple[int, ...], query: bool, tail: list[Mark]) -> list[Mark]:
        full = list(whole)
        if share > 1 and not query:
            full[heads] //= share
        found = broadcast(lead, shape[:-2], tuple(full))
        own = heads - (rank - len(shape))
        if share > 1 and query and own >= 0 and found[own] is not None:
            found[own] = ("h", share)
        return [*found, *tail]

    inputs = {
        0: marks(q.shape, True, [seq, None]),
        1: marks(k.shape, False, [None, None]),
        2: marks(v.shape, False, [None, "f"]),
    }
    mask = None if local else input_index(call, "attn_mask")
    if mask is not None:
        shape = call.inputs[mask].shape
        if len(shape) < 2:
            inputs[mask] = [None] * len(shape)
        else:
            inputs[mask] = marks(shape, True, [seq if shape[-2] == q.shape[-2] else None, None])
    rows = elements(y) // max(y.shape[-1], 1)
    return traits(
        call, inputs, [marks(y.shape, True, [seq, "f"])], family="attention", linear=((2,),),
        starts={"start": TensorDim(0, rank - 2)} if local else None,
        flops=2 * rows * k.shape[-2] * (q.shape[-1] + v.shape[-1]) * (0.5 if causal else 1),
        saves=range(len(call.inputs)), saves_outputs=(0,), saves_bytes=4 * rows,
    )  # fmt: skip
