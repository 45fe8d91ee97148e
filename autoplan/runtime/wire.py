"""Buffers on the wire: pieces as flat messages of bytes, and back."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from autoplan.runtime.exchange import extent, take
from searchspace.layout import Shape
from searchspace.program import Slices


def slabs(places: Sequence[Slices], shape: Shape) -> bool:
    """Whether ``places``, in order, are equal consecutive parts of dimension 0 that fill ``shape``."""
    if not shape or len({extent(slices) for slices in places}) != 1:
        return False
    step = places[0][0][1] - places[0][0][0]
    inner = tuple((0, size) for size in shape[1:])
    return len(places) * step == shape[0] and all(
        slices == ((i * step, (i + 1) * step), *inner) for i, slices in enumerate(places)
    )


def as_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor's memory as a flat byte tensor."""
    if not tensor.numel():  # counts as contiguous whatever its strides, which a view may object to
        return torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return tensor.view(-1).view(torch.uint8)


def cast_bytes(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The elements of any tensor, cast to ``dtype``, as a flat byte tensor."""
    return as_bytes(tensor.detach().to(dtype).contiguous())


def wire_size(places: Sequence[Slices], dtype: torch.dtype) -> int:
    """Bytes of the message that holds ``places``."""
    return sum(prod(extent(slices)) for slices in places) * dtype.itemsize


def pack(held: Tensor, places: Sequence[Slices], dtype: torch.dtype) -> Tensor:
    """The pieces of one peer as one message."""
    parts = [cast_bytes(take(held, slices), dtype) for slices in places]
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=held.device)


def unpack(message: Tensor, places: Sequence[Slices], dtype: torch.dtype) -> list[Tensor]:
    """Inverse of :func:`pack`."""
    sizes = [wire_size([slices], dtype) for slices in places]
    # a piece may start at an offset that its dtype cannot be viewed at
    return [
        (part if part.storage_offset() % dtype.itemsize == 0 else part.clone()).view(dtype).view(extent(slices))
        for part, slices in zip(message.split(sizes), places, strict=True)
    ]
