"""Recurrent layers: the batch only."""

from __future__ import annotations

from autoplan.capture.call import Call, Traits
from autoplan.capture.rules.building import Mark, elements, frozen, opaque, packet, traits, words
from searchspace.graph import InputRef

RECURRENT = words("lstm.input gru.input rnn_tanh.input rnn_relu.input")


def recurrent(call: Call) -> Traits | None:
    """``t b i^, l b h^, ... -> t b h^, l b h^``; ``b t`` with batch_first."""
    x = call.inputs[0]
    if len(x.shape) != 3:
        return None
    sequence: list[Mark] = ["b", None, None] if call.argument("batch_first") else [None, "b", None]
    state: list[Mark] = [None, "b", None]
    given = call.argument("hx")
    states = [ref.index for ref in (given if isinstance(given, tuple) else (given,)) if isinstance(ref, InputRef)]
    weights = [t for i, t in enumerate(call.inputs) if i and i not in states]
    inputs = {i: frozen(t) for i, t in enumerate(call.inputs)}
    inputs.update({0: sequence, **dict.fromkeys(states, state)})
    steps = x.shape[0] * x.shape[1]
    if call.argument("train") and call.argument("dropout"):
        return opaque(call, family="recurrent", random=True)
    return traits(
        call, inputs, [sequence, *[state] * (len(call.outputs) - 1)], family="recurrent",
        flops=2 * steps * sum(elements(w) for w in weights if len(w.shape) == 2), saves=range(len(call.inputs)),
        saves_bytes=elements(call.outputs[0]) * 4 * (6 if packet(call.target) == "lstm" else 4),
    )  # fmt: skip
