"""The largest shard: what the busiest device of a mesh holds of a tensor.

Splits are balanced with the surplus on the first parts, so the device at the mesh's origin, in
micro-batch 0, holds the most of every tensor, whatever its layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod

from costmodel.units import Bytes
from searchspace.graph import DTYPE_BYTES
from searchspace.layout import Layout, Placement, R, Shape, Split


@lru_cache(maxsize=65536)
def largest_shard(
    shape: Shape, layout: Layout, sizes: tuple[int, ...], time: Placement = R, micro_batches: int = 1
) -> Shape:
    """Shape of the largest shard of a tensor in ``layout`` over axes of ``sizes``, cut in time first."""
    extents = list(shape)
    for placement, parts in ((time, micro_batches), *zip(layout, sizes, strict=True)):
        if isinstance(placement, Split) and parts > 1:
            units = extents[placement.dim] // placement.unit
            extents[placement.dim] = -(-units // parts) * placement.unit
    return tuple(extents)


def shape_bytes(shape: Sequence[int], dtype: str) -> Bytes:
    """Bytes of a buffer of ``shape``."""
    return prod(shape) * DTYPE_BYTES[dtype]
