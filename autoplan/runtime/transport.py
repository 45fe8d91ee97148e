"""The plug point between a program and the machinery that runs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from autoplan.runtime.codegen import SegmentCompiler
from autoplan.runtime.store import Store
from searchspace.layout import Shape
from searchspace.program import Program, Rank


class Runnable(Protocol):
    """A program bound to the stores of this process's ranks."""

    def __call__(self) -> None:
        """Run once: from what the stores hold to what they hold afterwards."""


class Transport(Protocol):
    """Ranks that work together: all of them in this process, or one of them here and others elsewhere.

    All methods but the properties are collective: every rank calls them in the same order.
    """

    @property
    def ranks(self) -> tuple[Rank, ...]:
        """The ranks of this process."""

    @property
    def world(self) -> int:
        """How many ranks there are altogether."""

    @property
    def device(self) -> torch.device: ...

    @property
    def control(self) -> dist.ProcessGroup | None:
        """The group for messages between hosts; None: torch's default group, or all ranks are here."""

    def prepare(self, program: Program, stores: Mapping[Rank, Store], compiler: SegmentCompiler) -> Runnable:
        """Check the program, set up its groups, and bind its instructions."""

    def reduce(self, values: Sequence[Tensor], reduction: Literal["sum", "max"]) -> Tensor:
        """Combine one tensor of each of this process's ranks over all ranks; equal on all ranks."""

    def fetch(self, owner: Rank, piece: Tensor | None, shape: Shape, dtype: torch.dtype) -> Tensor:
        """``owner``'s piece on every rank (None where the caller is not the owner)."""

    def concatenate(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """One part of each of this process's ranks, joined along ``dim`` over all ranks in order."""
