"""Released inputs: a segment's graph that does not hold on to some of what went in.

A parameter that is gathered for a forward (ZeRO-3) is freed after it and gathered again for the
backward.  Autograd would keep it alive in two places.  As a saved tensor: a hook saves a description
instead.  As the leaf of the graph: an anchor of the same shape, without memory, takes its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor


class _View(NamedTuple):
    """A saved tensor as a view of a released one."""

    position: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class _Anchor(torch.autograd.Function):
    """The identity on ``data``, whose gradient goes to ``anchor``."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, data: Tensor) -> Tensor:
        return data.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        return grads[0], None


class Release:
    """One forward whose inputs at the indices ``released`` are let go of.

    ``arguments`` go into the segment, ``leaves`` are what its graph is differentiated for.
    """

    def __init__(self, inputs: Sequence[Tensor], released: Sequence[int]) -> None:
        self.leaves = list(inputs)
        self.arguments = list(inputs)
        self._present: list[Tensor] = []
        self._by_storage: dict[int, tuple[int, Tensor]] = {}
        for position, index in enumerate(released):
            data = inputs[index]
            if not data.is_contiguous():
                continue  # it might come back with other strides: then it is kept
            self._by_storage[data.untyped_storage().data_ptr()] = (position, data.detach())
            if data.requires_grad:
                anchor = torch.empty((), dtype=data.dtype, device=data.device).expand(data.shape).requires_grad_()
                self.leaves[index] = anchor
                self.arguments[index] = _Anchor.apply(anchor, data.detach())
            else:
                self.leaves[index] = data.new_empty(0)

    def saving(self) -> AbstractContextManager[None]:
        """The context for the forward; after it nothing here holds the released inputs."""
        return _Saving(self)

    def restore(self, present: Sequence[Tensor]) -> None:
        """The released inputs are here again, in the order of ``released``."""
        self._present = list(present)

    def _pack(self, saved: Tensor) -> Tensor | _View:
        position, data = self._by_storage.get(saved.untyped_storage().data_ptr(), (0, None))
        if data is None or saved.dtype != data.dtype:
            return saved
        offset = int(saved.storage_offset() - data.storage_offset())
        return _View(position, tuple(saved.shape), tuple(saved.stride()), offset)

    def _unpack(self, packed: Tensor | _View) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        source = self._present[packed.position].detach()
        return source.as_strided(packed.size, packed.stride, source.storage_offset() + packed.offset)


class _Saving(AbstractContextManager[None]):
    def __init__(self, release: Release) -> None:
        self.release = release
        self.hooks = torch.autograd.graph.saved_tensors_hooks(release._pack, release._unpack)

    def __enter__(self) -> None:
        self.hooks.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.hooks.__exit__(*error)
        self.release.arguments.clear()
        self.release._by_storage.clear()
