"""What one operator costs on one shard: a roofline with shape-dependent efficiency, by family.

    seconds = launch + max(flops / (peak * efficiency), bytes / memory rate)

Forward and backward are described by the same record, :class:`Work`: matrix products ``(batch, m, n, k)``, other
floating point operations, and bytes that move between memory and processors.  Costs are additive over the
records, monotone in each extent, and never 0 unless nothing runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from costmodel.device import DeviceSpec
from costmodel.units import Flops, Seconds
from searchspace.graph import DTYPE_BYTES, Family, Operator
from searchspace.layout import Shape
from searchspace.rule import Rule

TILE = 128
"""Rows and columns of the output tile that one processor computes (cuBLAS and CUTLASS defaults)."""
WAVE_SHARE = 0.5
"""Share of a wave of tiles that idles on average (the last wave is between empty and full)."""
FILL = 128
"""Steps along ``k`` in which a tile's pipeline fills and drains."""
ATTENTION_SHARE = 0.75
"""Rate of fused attention over that of the best matrix product: FlashAttention-2 (arXiv 2307.08691,
figures 4 to 6) reaches 50 to 73 % of an A100's peak forward, matrix products 87 %."""

BACKWARD_FLOPS: Mapping[Family, float] = {"attention": 2.5, "composite": 2.0, "recurrent": 2.0}
"""Backward over forward operations where they are not separate products: fused attention recomputes one
of its two products and does four more (arXiv 2307.08691, section 3.1.2)."""

PASSES: Mapping[Family, tuple[float, float]] = {"normalisation": (1.0, 1.5), "random": (1.25, 1.25)}
"""How often the bytes of inputs and outputs move, forward and backward, where it is not once: a norm reads
twice for its weight, dropout has a mask."""


@dataclass(frozen=True)
class Work:
    """What runs on a device for one operator in one direction.

    Fields
        products: ``(batch, m, n, k)`` of each matrix product: ``batch`` times ``m x k`` by ``k x n``.
        flops: other operations; ``share`` of the best matrix product's rate is what they reach.
        bytes: read and written.
        kernels: launches.
    """

    products: tuple[tuple[int, int, int, int], ...] = ()
    flops: Flops = 0.0
    share: float = 1.0
    bytes: float = 0.0
    kernels: int = 1

    def seconds(self, dtype: str, device: DeviceSpec) -> Seconds:
        """Time on ``device`` when the arithmetic is in ``dtype``; 0 without kernels."""
        if not self.kernels:
            return 0.0
        rate = device.peak_of(dtype) * device.matmul_efficiency
        arithmetic = sum(product_seconds(*p, rate, device.processors) for p in self.products)
        arithmetic += self.flops / (rate * self.share)
        return self.kernels * device.launch + max(arithmetic, self.bytes / device.memory_rate)


def product_seconds(batch: int, m: int, n: int, k: int, rate: float, processors: int) -> Seconds:
    """``batch`` products ``m x k`` by ``k x n`` at ``rate``: waves of output tiles, each filling a pipeline over ``k``.

    The idle half wave and the fill are additive, so the time grows with every extent.
    """
    tiles = batch * max(m, 1) * max(n, 1) / TILE**2
    return 2.0 * batch * m * n * (k + FILL) / rate * (1 + WAVE_SHARE * processors / max(tiles, 1e-9))


def work_fraction(rule: Rule, whole: Sequence[Shape], local: Sequence[Shape]) -> float:
    """The share of an operator's work that a shard does: the product of its identifiers' shares.

    ``whole`` and ``local`` are the shapes of inputs, then outputs.
    """
    share = 1.0
    seen: set[str] = set()
    for uses, full, part in zip(rule.inputs + rule.outputs, whole, local, strict=True):
        if full == part:
            continue
        for use, extent, piece in zip(uses, full, part, strict=True):
            if use is not None and piece != extent and use.id not in seen:
                seen.add(use.id)
                share *= piece / extent
    return share


def operator_seconds(
    op: Operator,
    whole: Sequence[Shape],
    local: Sequence[Shape],
    dtypes: Sequence[str],
    wants: Sequence[bool],
    device: DeviceSpec,
    computes_in: str | None = None,
) -> tuple[Seconds, Seconds]:
    """Forward and backward seconds of ``op`` on a shard.

    ``whole`` and ``local`` are shapes of inputs, then outputs, of the whole operator and of the shard;
    ``dtypes`` are the tensors' data types; ``wants`` says which inputs need a gradient.
    ``computes_in`` is the data type of the arithmetic (autocast); inputs in others are cast first.
    """
    flops = op.flops * work_fraction(op.rule, whole, local) if op.flops else 0.0
    inputs = len(op.inputs)
    saved = tuple(i for i, name in enumerate(op.inputs + op.outputs) if name in op.saved)
    return _seconds(
        op.family, flops, inputs, tuple(local), tuple(dtypes), tuple(wants), saved, device, computes_in
    )  # fmt: skip


@lru_cache(maxsize=65536)
def _seconds(
    family: Family,
    flops: Flops,
    inputs: int,
    local: tuple[Shape, ...],
    dtypes: tuple[str, ...],
    wants: tuple[bool, ...],
    saved: tuple[int, ...],
    device: DeviceSpec,
    computes_in: str | None,
) -> tuple[Seconds, Seconds]:
    sizes = [prod(shape) * DTYPE_BYTES[dtype] for shape, dtype in zip(local, dtypes, strict=True)]
    arithmetic = computes_in or _widest(dtypes[:inputs] or dtypes)
    ahead, back = shard_work(family, flops, local, sizes, inputs, wants, saved)
    casts = [
        Work(bytes=size + prod(shape) * DTYPE_BYTES[computes_in])
        for shape, dtype, size in zip(local[:inputs], dtypes, sizes, strict=False)
        if computes_in is not None and dtype != computes_in and dtype in _FLOATS
    ]
    cast = sum(work.seconds(arithmetic, device) for work in casts)
    forward = ahead.seconds(arithmetic, device) + cast
    backward = back.seconds(arithmetic, device) + (cast if back.kernels else 0.0)
    return forward, backward


_FLOATS = ("float64", "float32", "bfloat16", "float16")


def _widest(dtypes: Sequence[str]) -> str:
    """The floating data type of an operator's arithmetic: the widest of its inputs."""
    for dtype in _FLOATS:
        if dtype in dtypes:
            return dtype
    return "float32"


def shard_work(
    family: Family,
    flops: Flops,
    local: Sequence[Shape],
    sizes: Sequence[int],
    inputs: int,
    wants: Sequence[bool],
    saved: Sequence[int],
) -> tuple[Work, Work]:
    """Forward and backward work of a shard with local shapes and ``sizes`` in bytes (inputs, then outputs)."""
    read, written = sum(sizes[:inputs]), sum(sizes[inputs:])
    wanted = sum(size for size, want in zip(sizes, wants, strict=False) if want)
    kept = sum(sizes[i] for i in saved)
    nothing = Work(kernels=0)
    moved = float(read + written)
    returned = float(written + kept + wanted) if wanted else 0.0
    passes, back_passes = PASSES.get(family, (1.0, 1.0))
    match family:
        case "view":
            reshaped = len(sizes) == inputs + 1 and inputs >= 1 and sizes[0] == sizes[inputs]
            return nothing, nothing if reshaped or not wanted else Work(bytes=written + wanted)
        case "creation":
            return Work(bytes=written), nothing
        case "embedding":
            # Rows are read as far as they are looked up; the gradient of the table is dense.
            width = local[inputs][-1:]
            table = next((i for i, shape in enumerate(local[:inputs]) if len(shape) == 2 and shape[1:] == width), None)
            indices = read - (sizes[table] if table is not None else 0)
            dense = Work(bytes=2 * written + wanted, kernels=2) if wanted else nothing
            return Work(bytes=2 * written + indices), dense
        case "loss" if kept:
            # Passes of autoplan's cross entropy: subtract, exponentiate in place, sum; in backward subtract,
            # exponentiate, scale, and cast where the logits are narrower than float32.
            logits = max(range(inputs), key=lambda i: prod(local[i]))
            elements, narrow = prod(local[logits]), sizes[logits] / max(1, prod(local[logits]))
            wide = max(4.0, narrow)
            ahead = elements * (narrow + 4 * wide)
            back = elements * (narrow + 5 * wide + (wide + narrow if narrow < wide else 0))
            return Work(bytes=ahead, kernels=3), Work(bytes=back, kernels=4) if wanted else nothing
        case "matmul" | "convolution" if flops and inputs >= 2:
            batch, m, n, k = product_shape(family, flops, local, inputs)
            first, second = operands(local[:inputs])
            shapes = {first: (batch, m, k, n), second: (batch, k, n, m)}
            gradients = tuple(shape for i, shape in shapes.items() if wants[i])
            return (
                Work(products=((batch, m, n, k),), bytes=moved),
                Work(products=gradients, bytes=len(gradients) * moved, kernels=max(1, len(gradients)))
                if wanted
                else nothing,
            )
        case "attention" | "composite" | "recurrent":
            share = ATTENTION_SHARE if family == "attention" else 1.0
            back_flops = flops * BACKWARD_FLOPS[family]
            return (
                Work(flops=flops, share=share, bytes=moved),
                Work(flops=back_flops, share=share, bytes=returned, kernels=2) if wanted else nothing,
            )
        case _:
            return (
                Work(bytes=moved * passes),
                Work(bytes=returned * back_passes) if wanted else nothing,
            )


def operands(inputs: Sequence[Shape]) -> tuple[int, int]:
    """Indices of the two factors: the last two inputs that are matrices (a bias is a vector, or comes first)."""
    matrices = [i for i, shape in enumerate(inputs) if len(shape) > 1]
    first, second = matrices[-2:] if len(matrices) > 1 else (0, len(inputs) - 1)
    return first, second


def product_shape(family: Family, flops: Flops, local: Sequence[Shape], inputs: int) -> tuple[int, int, int, int]:
    """``(batch, m, n, k)`` of a shard's matrix product or convolution, from its output and its operations."""
    output = local[inputs]
    elements = max(1, prod(output))
    k = max(1, round(flops / (2 * elements)))
    if family == "convolution":
        n = output[1] if len(output) > 1 else 1
        return 1, elements // n, n, k
    n = output[-1] if output else 1
    if len(output) > 2 and all(len(local[i]) > 2 for i in operands(local[:inputs])):
        batch = max(1, prod(output[:-2]))
        return batch, output[-2], n, k
    return 1, elements // max(n, 1), n, k


def copy_seconds(bytes: float, device: DeviceSpec, passes: int = 2) -> Seconds:
    """A kernel that moves ``bytes`` ``passes`` times (2: read and write; 3: add into)."""
    return Work(bytes=passes * bytes).seconds("float32", device)
