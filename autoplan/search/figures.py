"""The vocabulary of strategy selection: what is chosen, what it costs, and who says so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from autoplan.search.folding import Group
from autoplan.search.problem import Costs
from autoplan.search.strategies import Strategy
from searchspace.graph import Operator, Tensor
from searchspace.layout import Layout
from searchspace.mesh import Mesh
from searchspace.microbatch import TimeAxis

Pair = tuple[Layout, Layout | None]
"""Forward layout and gradient layout (None: no gradient)."""

Readers = tuple[tuple[Group, int], ...]
"""Who reads a parameter: groups of operators and the index of the input, ascending."""


@dataclass(frozen=True)
class ParameterLayouts:
    """One way to keep a parameter: as operators use it, and between uses."""

    used: Pair
    stored: Layout
    gradient: Layout | None
    optimizer: Layout


@dataclass(frozen=True)
class Figures:
    """What a strategy costs: forward and backward seconds per micro-batch, seconds per step, bytes.

    ``resident`` bytes stay, ``saved`` bytes stay from forward to backward of one micro-batch, ``working``
    bytes are there only while the operator runs, in the worse direction.
    """

    forward: float = 0.0
    backward: float = 0.0
    step: float = 0.0
    resident: float = 0.0
    saved: float = 0.0
    working: float = 0.0


@dataclass(frozen=True, eq=False)
class KindFigures:
    """Per block of each kind, arrays of shape (kinds,): seconds per micro-batch and per step, bytes.

    ``saved`` is kept per micro-batch in flight, ``interior`` is what a block keeps without recomputation,
    ``carried`` what it reads from other blocks, ``gathered`` parameters that are whole only while it runs,
    ``working`` what its most demanding operator needs besides.
    """

    seconds: Costs
    step: Costs
    resident: Costs
    saved: Costs
    interior: Costs
    carried: Costs
    gathered: Costs
    working: Costs


@dataclass(frozen=True)
class Terms:
    """How figures become one cost.

    ``micro_batches`` share a step; with ``recompute`` a block's forward runs twice and only what it
    reads from other blocks is kept; ``in_flight`` micro-batches are between forward and backward.
    Prices are seconds per byte.
    """

    micro_batches: int = 1
    recompute: bool = False
    in_flight: float = 1
    price_resident: float = 0.0
    price_saved: float = 0.0


class Pricing(Protocol):
    """What selection asks about compute and memory; conversions are priced by ``conversions.py``.

    A storage that several operators save must be counted once, by the operator that makes it.
    """

    def operator(self, op: Operator, strategy: Strategy, mesh: Mesh, time: TimeAxis) -> Figures:
        """Compute seconds, and bytes that stay saved until backward."""
        ...

    def parameter(self, tensor: Tensor, layouts: ParameterLayouts, mesh: Mesh) -> Figures:
        """Seconds per step of the optimizer (gradients and weights are moved besides), and bytes that stay."""
        ...

    def accumulate(self, tensor: Tensor, held: Layout, mesh: Mesh) -> float:
        """Seconds to add one micro-batch's gradient, in its accumulated layout, to what there is."""
        ...

    def shard_bytes(self, tensor: Tensor, layout: Layout, mesh: Mesh, time: TimeAxis) -> float:
        """Bytes of an activation, in the fullest micro-batch, or of a parameter on the fullest device."""
        ...

    def saved_by_maker(self, tensor: Tensor) -> bool:
        """Whether the operator that makes an activation counts it as saved."""
        ...
