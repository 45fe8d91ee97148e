"""The layouts of one tensor on one mesh, and the collectives that lead from one to another.

A *code* is a layout written as small integers, one per mesh axis of size 2 or more.  Only the
mesh's shape matters here, not its devices, so meshes of a thousand devices cost no more than
small ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain, combinations, product
from typing import Any, NamedTuple

from searchspace.conversion.moves import CHANGES, PlacementKind, placement_kind
from searchspace.errors import IllegalPlanError
from searchspace.layout import Layout, Partial, Placement, R, Shape, Split, cut, layout_text
from searchspace.program import ExchangeKind

Code = tuple[int, ...]


class Step(NamedTuple):
    """A move along ``axes`` (of the mesh) between the layout at hand and ``other``.

    ``elements`` is the size of the largest buffer that prices the move; ``slices`` marks R to S.
    """

    kind: ExchangeKind
    axes: tuple[int, ...]
    elements: int
    other: Code
    slices: bool


class Space:
    """Layouts that a conversion may pass through.

    Each axis may be replicated, split along any dimension ``d`` in ``units[d]``, and partial if it
    is in ``partial`` (pairs of axis and placement; a layout has one reduction).  No part is ever
    empty.  Layouts that cut alike are one: of the units that give the same even parts the smallest
    stands for all, and axes of size 1 are left out.
    """

    def __init__(
        self,
        sizes: Shape,
        shape: Shape,
        units: tuple[Shape, ...],
        partial: tuple[tuple[int, Partial], ...],
    ) -> None:
        self.sizes, self.shape, self.units = sizes, shape, units
        self.placements: tuple[Placement, ...] = (
            R,
            *sorted({placement for _, placement in partial}),
            *(Split(d, u) for d in range(len(shape)) for u in units[d]),
        )
        self.ids = {placement: i for i, placement in enumerate(self.placements)}
        self.kinds = tuple(map(placement_kind, self.placements))
        self.splits = tuple((p.dim, p.unit) if isinstance(p, Split) else (-1, 0) for p in self.placements)
        self.axes = tuple(a for a, size in enumerate(sizes) if size > 1)
        self._allowed: tuple[dict[PlacementKind, tuple[int, ...]], ...] = tuple(
            {
                "R": (0,),
                "P": tuple(self.ids[placement] for axis, placement in partial if axis == a),
                "S": tuple(i for i, (d, u) in enumerate(self.splits) if d >= 0 and shape[d] >= u * sizes[a]),
            }
            for a in self.axes
        )
        self._largest: dict[tuple[int, tuple[tuple[int, int], ...]], int] = {}
        self._elements: dict[Code, int] = {}
        self._steps: dict[tuple[Code, bool], tuple[Step, ...]] = {}

    def encode(self, layout: Layout) -> Code:
        """The code of ``layout``; IllegalPlanError when a part would be empty."""
        if len({p for p in layout if isinstance(p, Partial)}) > 1:
            raise IllegalPlanError(f"layout {layout_text(layout)!r} is a sum and a maximum of parts at once")
        kept: list[int] = []
        extents: dict[int, set[int]] = {d: {extent} for d, extent in enumerate(self.shape)}
        for a, (placement, size) in enumerate(zip(layout, self.sizes, strict=True)):
            if isinstance(placement, Split):
                dim = placement.dim
                if dim not in extents:
                    raise IllegalPlanError(
                        f"{placement} splits a dimension that a {len(self.shape)}-d tensor does not have"
                    )
                before = extents[dim]
                extents[dim] = {
                    high - low
                    for extent in sorted(before)
                    for low, high in (cut((0, extent), placement.unit, size, i) for i in (0, size - 1))
                }
                if len(before) == len(extents[dim]) == 1:
                    even = next(iter(extents[dim]))
                    placement = Split(dim, next(u for u in self.units[dim] if even % u == 0))
            if a in self.axes:
                kept.append(self.ids[placement])
        return tuple(kept)

    def decode(self, code: Code) -> Layout:
        """The layout of ``code``; axes of size 1 are replicated."""
        placements = dict(zip(self.axes, (self.placements[i] for i in code), strict=True))
        return tuple(placements.get(a, R) for a in range(len(self.sizes)))

    def partial(self, code: Code) -> tuple[tuple[int, int], ...]:
        """Which positions of ``code`` are partial, and how."""
        return tuple((i, c) for i, c in enumerate(code) if self.kinds[c] == "P")

    def elements(self, code: Code) -> int:
        """Elements of the largest part (at least 1); 0 when it is illegal or another code stands for it."""
        found = self._elements.get(code)
        if found is None:
            cuts: dict[int, list[tuple[int, int]]] = {}
            found = int(len({c for c in code if self.kinds[c] == "P"}) <= 1)
            for a, c in zip(self.axes, code, strict=True):
                dim, unit = self.splits[c]
                if dim >= 0:
                    cuts.setdefault(dim, []).append((self.sizes[a], unit))
            for dim, extent in enumerate(self.shape):
                found *= self._largest_part(dim, tuple(cuts[dim])) if dim in cuts else max(extent, 1)
            self._elements[code] = found
        return found

    def _largest_part(self, dim: int, cuts: tuple[tuple[int, int], ...]) -> int:
        """The largest extent after ``cuts`` (parts, unit) of ``dim``, outermost first; 0 if not allowed."""
        key = (dim, cuts)
        if key not in self._largest:
            extents = [self.shape[dim]]
            for parts, unit in cuts:
                if any(extent % unit or extent < unit * parts for extent in extents):
                    extents = [0]
                    break
                after: set[int] = set()
                for extent in extents:
                    share, more = divmod(extent // unit, parts)
                    after |= {share * unit, (share + (more > 0)) * unit}
                even = max(after) if len(extents) == len(after) == 1 else 0
                extents = sorted(after)
                if even and any(u < unit and even % u == 0 for u in self.units[dim]):
                    extents = [0]  # the smaller unit gives the same parts
                    break
            self._largest[key] = extents[-1]
        return self._largest[key]

    def steps(self, code: Code, reverse: bool = False) -> tuple[Step, ...]:
        """All moves from ``code`` (with ``reverse``: to it), in a fixed order."""
        key = (code, reverse)
        if key not in self._steps:
            self._steps[key] = tuple(self._make_steps(code, reverse))
        return self._steps[key]

    def _make_steps(self, code: Code, reverse: bool) -> Iterator[Step]:
        here = self.elements(code)
        for before, after, kind in CHANGES:
            mine, others = (after, before) if reverse else (before, after)
            slices = (before, after) == ("R", "S")
            positions = [i for i, c in enumerate(code) if self.kinds[c] == mine]
            for chosen in _subsets(positions):
                if mine == "S" and not self._innermost(code, chosen):
                    continue
                mine_dims = {self.splits[code[i]][0] for i in chosen}
                for replacement in product(*(self._allowed[i][others] for i in chosen)):
                    other = list(code)
                    for i, c in zip(chosen, replacement, strict=True):
                        other[i] = c
                    if kind == "all_to_all" and not mine_dims.isdisjoint(self.splits[c][0] for c in replacement):
                        continue  # some members would exchange nothing: that is a send_receive
                    there = tuple(other)
                    ends = (there, code) if reverse else (code, there)
                    if (before, after) == ("S", "P") and self._is_max(ends[1]):
                        continue  # zeros are not neutral
                    if others == "S" and not self._innermost(there, chosen):
                        continue
                    size = self.elements(there)
                    if size:
                        input_counts = kind in ("reduce_scatter", "all_to_all", "all_reduce")
                        elements = here if input_counts != reverse else size
                        yield Step(kind, tuple(self.axes[i] for i in chosen), elements, there, slices)

    def _is_max(self, code: Code) -> bool:
        return any(self.placements[c] == Partial("max") for c in code)

    def _innermost(self, code: Code, chosen: Sequence[int]) -> bool:
        """Whether no other axis cuts the parts of ``chosen`` further: only then are groups regular."""
        for i in chosen:
            dim = self.splits[code[i]][0]
            for j in range(i + 1, len(code)):
                if j not in chosen and self.splits[code[j]][0] == dim:
                    return False
        return True


def _subsets(items: Sequence[int]) -> Iterator[tuple[int, ...]]:
    return chain.from_iterable(combinations(items, n) for n in range(1, len(items) + 1))


@lru_cache(maxsize=4096)
def _space(*arguments: Any) -> Space:
    return Space(*arguments)


def space(sizes: Shape, shape: Shape, layouts: Sequence[Layout], elsewhere: Sequence[Layout] = ()) -> Space:
    """The (shared) space of what ``layouts`` need: their units, 1 for other dimensions, their partial axes.

    Layouts ``elsewhere`` on another mesh add their units.
    """
    units: list[set[int]] = [set() for _ in shape]
    partial: set[tuple[int, Partial]] = set()
    for layout in (*layouts, *elsewhere):
        for placement in layout:
            if isinstance(placement, Split) and placement.dim < len(shape):
                units[placement.dim].add(placement.unit)
    for layout in layouts:
        partial |= {(axis, placement) for axis, placement in enumerate(layout) if isinstance(placement, Partial)}
    return _space(sizes, shape, tuple(tuple(sorted(u)) or (1,) for u in units), tuple(sorted(partial)))
