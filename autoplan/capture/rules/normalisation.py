"""Normalisations: the normalised dims stay whole, or statistics are summed over parts."""

from __future__ import annotations

from autoplan.capture.call import Call, Traits
from autoplan.capture.rules.building import (
    Mark,
    Marks,
    elements,
    frozen,
    input_index,
    integers,
    letters,
    packet,
    traits,
)
from searchspace.graph import GlobalSize, LocalSize, TensorDim


def layer_norm(call: Call) -> Traits | None:
    """layer_norm and rms_norm: ``* c^, c^, c^ -> * c^``; statistics are kept for backward."""
    x = call.inputs[0]
    lead = len(x.shape) - len(integers(call.argument("normalized_shape")))
    marks: list[Mark] = [*letters(lead), *[None] * (len(x.shape) - lead)]
    outputs = [marks[: len(output.shape)] for output in call.outputs]
    rows = elements(x)
    for extent in x.shape[lead:]:
        rows //= max(extent, 1)
    statistics = 1 if "rms" in packet(call.target) else 2
    return traits(
        call, {0: marks}, outputs, family="normalisation", flops=8 * elements(x),
        saves=[0, *([index] if (index := input_index(call, "weight")) is not None else [])],
        saves_bytes=rows * statistics * (8 if x.dtype == "float64" else 4),
    )  # fmt: skip


def samplewise(call: Call) -> Traits | None:
    """group_norm and local_response_norm as they are: samples only."""
    x = call.inputs[0]
    marks: list[Mark] = ["a", *[None] * (len(x.shape) - 1)]
    return traits(call, {0: marks}, [marks], family="normalisation", flops=8 * elements(x), saves=(0,))


def native_group_norm(call: Call) -> Traits | None:
    """The same with the statistics: ``a 6 5, 6, 6 -> a 6 5, a 3, a 3``."""
    x = call.inputs[0]
    outputs: list[Marks] = [["a", *[None] * (len(t.shape) - 1)] for t in call.outputs]
    return traits(
        call, {0: outputs[0]}, outputs, family="normalisation", flops=8 * elements(x), saves=(0, 1),
        saves_outputs=(1, 2), replace={"N": LocalSize(TensorDim(0, 0))},
    )  # fmt: skip


def groups(call: Call) -> Traits | None:
    """autoplan.group_norm: ``a (g 4) s^, (g 4), (g 4) -> a (g 4) s^``."""
    x = call.inputs[0]
    group = ("g", int(call.argument("group")))  # type: ignore[arg-type]
    marks: list[Mark] = ["a", group, *[None] * (len(x.shape) - 2)]
    inputs: dict[int, Marks] = {0: marks, **{i: [group] for i in range(1, len(call.inputs))}}
    return traits(
        call, inputs, [marks], family="normalisation", flops=8 * elements(x), saves=(0, 1),
        saves_bytes=x.shape[0] * (x.shape[1] // group[1]) * 8,
    )  # fmt: skip


def instance_norm(call: Call) -> Traits | None:
    """Each sample and channel by itself, unless running statistics are used."""
    x = call.inputs[0]
    if not call.argument("use_input_stats") or input_index(call, "running_mean") is not None:
        return None
    marks: list[Mark] = ["a", "c", *[None] * (len(x.shape) - 2)]
    inputs: dict[int, Marks] = {0: marks, **{i: ["c"] for i in range(1, len(call.inputs))}}
    return traits(call, inputs, [marks], family="normalisation", flops=8 * elements(x), saves=(0, 1))


def batch_norm(call: Call) -> Traits | None:
    """Evaluation is pointwise with vectors over channels; training as it is couples the samples: channels only."""
    x = call.inputs[0]
    name = packet(call.target)
    names = letters(len(x.shape))
    frees = name.endswith("no_training") or not call.argument("training")
    marks: list[Mark] = [mark if frees or d == 1 else None for d, mark in enumerate(names)]
    channel = names[1]
    inputs: dict[int, Marks] = {0: marks, **{i: [channel] for i in range(1, len(call.inputs))}}
    outputs: list[list[Mark]] = [marks]
    for output in call.outputs[1:]:
        outputs.append([channel] if output.shape == (x.shape[1],) else frozen(output))
    return traits(call, inputs, outputs, family="normalisation", flops=8 * elements(x), saves=range(len(call.inputs)))


def channel_statistic(call: Call) -> Traits | None:
    """autoplan.channel_mean and channel_variance: ``a+ c s+, c -> c``."""
    x = call.inputs[0]
    names = letters(len(x.shape), skip="c")
    marks: list[Mark] = ["c" if d == 1 else mark for d, mark in enumerate(names)]
    others = [d for d in range(len(x.shape)) if d != 1]
    inputs: dict[int, Marks] = {0: marks, **{i: ["c"] for i in range(1, len(call.inputs))}}
    variance = packet(call.target) == "channel_variance"
    return traits(
        call, inputs, [["c"]], family="normalisation", reductions={names[d]: "sum" for d in others},
        linear=() if variance else ((0,),), replace={"sizes": tuple(GlobalSize(TensorDim(0, d)) for d in others)},
        flops=(3 if variance else 1) * elements(x), saves=(0, 1) if variance else (),
    )  # fmt: skip


def channel_normalise(call: Call) -> Traits | None:
    """autoplan.channel_normalise: ``a c s, c, c, c, c -> a c s``."""
    x = call.inputs[0]
    names = letters(len(x.shape), skip="c")
    marks: list[Mark] = ["c" if d == 1 else mark for d, mark in enumerate(names)]
    inputs: dict[int, Marks] = {0: marks, **{i: ["c"] for i in range(1, len(call.inputs))}}
    others = tuple(GlobalSize(TensorDim(0, d)) for d in range(len(x.shape)) if d != 1)
    return traits(
        call, inputs, [marks], family="normalisation", replace={"sizes": others}, flops=4 * elements(x),
        saves=range(min(4, len(call.inputs))),
    )  # fmt: skip


def running(call: Call) -> Traits | None:
    """autoplan.running_average: ``c, c -> c``."""
    return traits(call, {0: ["c"], 1: ["c"]}, [["c"]], family="normalisation")
