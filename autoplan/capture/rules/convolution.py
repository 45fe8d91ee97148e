"""Convolutions and what else works on windows of the last dims, which stay whole."""

from __future__ import annotations

import re
from math import prod

from autoplan.capture.call import Call, Traits
from autoplan.capture.rules.building import Mark, elements, input_index, letters, packet, traits, words

CONVOLUTIONS = words("conv1d conv2d conv3d convolution conv_transpose1d conv_transpose2d conv_transpose3d")
WINDOWS = re.compile(
    r"(max_pool|avg_pool|adaptive_max_pool|adaptive_avg_pool|max_pool_with_indices|_adaptive_avg_pool|lp_pool|"
    r"fractional_max_pool)([123])d(_with_indices)?$|upsample_|pixel_|channel_shuffle|im2col|col2im|grid_sampler|"
    r"reflection_pad|replication_pad"
)


def convolution(call: Call) -> Traits | None:
    """``b i+ s^, o i+ s^, o & -> b o s^``; transposed: the weight is ``i+ o s^``."""
    x, weight, y = call.inputs[0], call.inputs[1], call.outputs[0]
    name = packet(call.target)
    transposed = "transpose" in name or (name == "convolution" and bool(call.argument("transposed")))
    spatial = len(weight.shape) - 2
    whole: list[Mark] = [None] * spatial
    batch: list[Mark] = ["b"] * (len(x.shape) - spatial - 1)
    bias = input_index(call, "bias")
    flops = 2 * elements(x if transposed else y) * prod(weight.shape[1:])
    saves = [i for i in (0, 1) if call.inputs[1 - i].requires_grad]
    if call.argument("groups") != 1:
        return traits(
            call, {0: [*batch, None, *whole]}, [[*batch, None, *whole]], family="convolution", flops=flops, saves=saves
        )
    inputs: dict[int, list[Mark]] = {
        0: [*batch, "i", *whole],
        1: ["i", "o", *whole] if transposed else ["o", "i", *whole],
    }
    together = () if bias is None else (bias,)
    if bias is not None:
        inputs[bias] = ["o"]
    return traits(
        call, inputs, [[*batch, "o", *whole]], family="convolution", reductions={"i": "sum"}, added=together,
        linear=[(0, *together), (1, *together)], flops=flops, saves=saves,
    )  # fmt: skip


def grouped(call: Call) -> Traits | None:
    """autoplan.grouped_convolution: ``b (g i) s^, (g o) i^ s^, (g o) -> b (g o) s^``."""
    x, weight, y = call.inputs[0], call.inputs[1], call.outputs[0]
    into = weight.shape[1]
    count = x.shape[1] // into
    out = weight.shape[0] // count
    whole: list[Mark] = [None] * (len(weight.shape) - 2)
    inputs: dict[int, list[Mark]] = {0: ["b", ("g", into), *whole], 1: [("g", out), None, *whole], 2: [("g", out)]}
    together = (2,) if len(call.inputs) > 2 else ()
    return traits(
        call, {i: marks for i, marks in inputs.items() if i < len(call.inputs)}, [["b", ("g", out), *whole]],
        family="convolution", linear=[(0, *together), (1, *together)], flops=2 * elements(y) * prod(weight.shape[1:]),
        saves=[i for i in (0, 1) if call.inputs[1 - i].requires_grad],
    )  # fmt: skip


def windows(call: Call) -> Traits | None:
    """Pooling, interpolation and the like: the windowed dims stay whole, batch and channels split."""
    x = call.inputs[0]
    name = packet(call.target)
    if name.startswith(("pixel_", "channel_shuffle", "im2col", "col2im", "grid_sampler")):
        frees = max(len(x.shape) - 3, 0) if name.startswith("pixel_") else 1
        if name.startswith(("im2col", "col2im")) and len(x.shape) == len(call.outputs[0].shape) == 2:
            frees = 0
    else:
        match = re.search(r"([123])d", name)
        frees = len(x.shape) - int(match[1]) if match else 2
    marks = letters(frees)
    inputs: dict[int, list[Mark]] = {0: [*marks, *[None] * (len(x.shape) - frees)]}
    if name.startswith("grid_sampler"):
        inputs[1] = [marks[0], *[None] * (len(call.inputs[1].shape) - 1)]
    outputs: list[list[Mark]] = [[*marks, *[None] * (len(t.shape) - frees)] for t in call.outputs]
    maximum = "max_pool" in name
    return traits(
        call, inputs, outputs, family="reduction" if "pool" in name else "data",
        linear=() if maximum or name.startswith("lp_") else ((0,),) if len(call.inputs) == 1 else (),
        flops=elements(x), saves=(0,) if maximum else (), saves_outputs=(1,) if maximum and len(outputs) > 1 else (),
        saves_bytes=8 * elements(call.outputs[0]) if maximum and len(outputs) == 1 else 0,
    )  # fmt: skip
