"""What both communicators share: cutting pieces out of a source buffer and assembling a target buffer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from autoplan.runtime.dtypes import torch_dtype
from searchspace.errors import ExecutionError
from searchspace.layout import Reduction, Shape
from searchspace.program import Exchange, Rank, Slices


def extent(slices: Slices) -> Shape:
    """The shape of what ``slices`` cut out."""
    return tuple(high - low for low, high in slices)


def take(source: Tensor, slices: Slices) -> Tensor:
    """The view of ``source`` that ``slices`` cut out."""
    return source[tuple(slice(low, high) for low, high in slices)] if slices else source


def by_peer(entries: Sequence[tuple[Rank, Slices]], group: Sequence[Rank]) -> dict[Rank, list[Slices]]:
    """The entries of each peer, peers in the order of the group, so that sums have one order on all ranks."""
    return {peer: [slices for rank, slices in entries if rank == peer] for peer in group}


def combine(target: Tensor, value: Tensor, reduction: Reduction) -> None:
    """Reduce ``value`` into ``target``."""
    if reduction == "sum":
        target.add_(value)
    elif reduction == "max":
        torch.maximum(target, value, out=target)
    else:
        raise ExecutionError(f"unknown reduction {reduction!r}")


@dataclass(frozen=True)
class Assembly:
    """How arrived pieces make a target buffer.

    Fields
        places: where each piece goes, in the order in which the pieces are given.
    """

    places: tuple[Slices, ...]
    shape: Shape
    dtype: torch.dtype
    reduction: Reduction | None

    @classmethod
    def of(cls, exchange: Exchange) -> Assembly:
        """The assembly of one rank's target, whose pieces come by peer in the order of the group."""
        arriving = by_peer(exchange.receive, exchange.group)
        places = tuple(slices for every in arriving.values() for slices in every)
        return cls(places, exchange.shape, torch_dtype(exchange.dtype), exchange.reduction)

    @property
    def single(self) -> bool:
        """Whether one piece is the whole target."""
        return len(self.places) == 1 and extent(self.places[0]) == self.shape

    @property
    def covered(self) -> bool:
        """Whether the pieces leave nothing of the target unfilled (they are disjoint or coincide)."""
        return sum(prod(extent(slices)) for slices in dict.fromkeys(self.places)) == prod(self.shape)

    def build(self, pieces: Sequence[Tensor], device: torch.device) -> Tensor:
        """A new buffer made of ``pieces``; zeros where there is none."""
        make = torch.empty if self.covered else torch.zeros
        target = make(self.shape, dtype=self.dtype, device=device)
        filled: set[Slices] = set()
        for slices, piece in zip(self.places, pieces, strict=True):
            if slices in filled and self.reduction is not None:
                combine(take(target, slices), piece.to(self.dtype), self.reduction)
            else:
                take(target, slices).copy_(piece)
                filled.add(slices)
        return target
