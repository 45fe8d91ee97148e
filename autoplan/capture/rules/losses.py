"""The parts of losses (see autoplan.operators.loss): tokens split, classes are reduced."""

from __future__ import annotations

from autoplan.capture.call import Call, Traits
from autoplan.capture.rules.building import Mark, elements, letters, packet, traits
from searchspace.graph import TensorDim


def over_classes(call: Call) -> Traits | None:
    """class_maximum, exp_sum, exp_sum_and_pick, pick: ``a c+ b, a b, a b -> a b``."""
    logits = call.inputs[0]
    name = packet(call.target)
    dim = int(call.argument("dim")) % len(logits.shape)  # type: ignore[arg-type]
    tokens: list[Mark] = [*letters(len(logits.shape) - 1, skip="c")]
    inputs = {0: [*tokens[:dim], "c", *tokens[dim:]], **dict.fromkeys(range(1, len(call.inputs)), tokens)}
    maximum = name == "class_maximum"
    picks = name in ("pick", "exp_sum_and_pick")
    return traits(
        call, inputs, [tokens] * len(call.outputs), family="loss", reductions={"c": "max" if maximum else "sum"},
        linear=((0,),) if name == "pick" else (), starts={"start": TensorDim(0, dim)} if picks else None,
        flops=elements(logits) * (4 if name.startswith("exp_sum") else 1),
        saves=range(len(call.inputs)) if name.startswith("exp_sum") else (1,) if name == "pick" else (),
    )  # fmt: skip


def over_tokens(call: Call) -> Traits | None:
    """token_loss, log_sum, mask_ignored: pointwise over tokens."""
    marks = letters(len(call.outputs[0].shape))
    return traits(
        call, dict.fromkeys(range(len(call.inputs)), marks), [marks], family="loss",
        linear=((0,),) if packet(call.target) == "mask_ignored" else (), flops=4 * elements(call.outputs[0]),
        saves=(0, len(call.inputs) - 1),
    )  # fmt: skip


def count(call: Call) -> Traits | None:
    """count_valid: ``a+ b+ -> 1``."""
    marks = letters(len(call.inputs[0].shape))
    return traits(
        call, {0: marks}, [[]], family="loss", reductions=dict.fromkeys(marks, "sum"), flops=elements(call.inputs[0])
    )


def embedding(call: Call) -> Traits | None:
    """autoplan.embedding: ``v+ e, a b -> a b e``."""
    marks: list[Mark] = [*letters(len(call.inputs[1].shape), skip="ve")]
    from searchspace.graph import GlobalSize

    return traits(
        call, {0: ["v", "e"], 1: marks}, [[*marks, "e"]], family="embedding", reductions={"v": "sum"},
        linear=((0,),), starts={"start": TensorDim(0, 0)}, replace={"rows": GlobalSize(TensorDim(0, 0))}, saves=(1,),
    )  # fmt: skip
