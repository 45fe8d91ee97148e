"""Moves: one step of a conversion, from a layout on a mesh to another."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from searchspace.conversion.prices import Seconds
from searchspace.errors import IllegalPlanError
from searchspace.layout import Layout, Partial, Placement, Split, layout_text
from searchspace.mesh import Mesh
from searchspace.program import ExchangeKind

Placed = tuple[Mesh, Layout]
"""How a tensor lies: a layout on a mesh."""

PlacementKind = str
"""``"R"``, ``"P"`` or ``"S"``."""

CHANGES: tuple[tuple[PlacementKind, PlacementKind, ExchangeKind], ...] = (
    ("P", "R", "all_reduce"),
    ("P", "S", "reduce_scatter"),
    ("S", "R", "all_gather"),
    ("S", "S", "all_to_all"),
    ("R", "S", "local"),  # slice
    ("R", "P", "local"),  # mask: the first member keeps the value, the others hold zeros
    ("S", "P", "local"),  # pad: each member keeps its part, surrounded by zeros
)
"""What one move does to the placements of all axes that it is about."""


def placement_kind(placement: Placement) -> PlacementKind:
    return "S" if isinstance(placement, Split) else "P" if isinstance(placement, Partial) else "R"


@dataclass(frozen=True)
class Move:
    """One step: an exchange that changes the placements of ``axes`` (indices, ascending) in one way.

    ``send_receive`` changes any layout into any other, also on another mesh (``axes`` is empty); on
    one mesh it keeps partial placements.  ``local`` with no axes is such a change for which every
    device already holds what it needs.
    """

    kind: ExchangeKind
    axes: tuple[int, ...]
    source_mesh: Mesh
    source: Layout
    target_mesh: Mesh
    target: Layout

    def __post_init__(self) -> None:
        kinds = {(placement_kind(self.source[a]), placement_kind(self.target[a]), self.kind) for a in self.axes}
        if self.axes and not (len(kinds) == 1 and kinds <= set(CHANGES)):
            raise IllegalPlanError(
                f"{self.kind} along {', '.join(self._along)} cannot turn"
                f" {layout_text(self.source)!r} into {layout_text(self.target)!r}"
            )
        if not self.axes and self.kind not in ("send_receive", "local"):
            raise IllegalPlanError(f"{self.kind} needs at least one mesh axis")

    @property
    def before(self) -> Placed:
        return self.source_mesh, self.source

    @property
    def after(self) -> Placed:
        return self.target_mesh, self.target

    @property
    def _along(self) -> tuple[str, ...]:
        return tuple(self.source_mesh.axes[a][0] for a in self.axes)

    def __str__(self) -> str:
        along = f"[{','.join(self._along)}]" if self.axes else ""
        return f"{layout_text(self.source)} -{self.kind}{along}-> {layout_text(self.target)}"


@dataclass(frozen=True)
class Path:
    """Moves that follow one another, and what they cost.

    Without moves every device already holds exactly the buffer that it needs (an alias).
    """

    moves: tuple[Move, ...]
    seconds: Seconds

    def __post_init__(self) -> None:
        for first, second in pairwise(self.moves):
            if first.after != second.before:
                raise IllegalPlanError(f"moves do not follow one another: {first}, then {second}")

    def __str__(self) -> str:
        return "; ".join(map(str, self.moves)) or "nothing"
