"""Layouts (RVD): how a tensor lies on a mesh, and the index arithmetic that follows from it.

For each axis of the mesh a tensor is *replicated* (R), *partial* (V: the axis' devices hold
summands, or candidates of a maximum) or *split* along one of its dimensions (D).  Splits are
balanced in whole *units* (a head is not cut): with ``count = extent / unit`` units over ``n``
parts the first ``count % n`` parts get one unit more.  A part is never empty.

When several axes split the same dimension, the mesh's earlier axis is the outer one.  All
intervals are half-open.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from searchspace.errors import IllegalPlanError, PlanFileError
from searchspace.mesh import Device, Mesh

Shape = tuple[int, ...]
Interval = tuple[int, int]
Region = tuple[Interval, ...]
Reduction = Literal["sum", "max"]


@dataclass(frozen=True, order=True)
class Replicated:
    """Every device of the axis holds the same data."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, order=True)
class Partial:
    """The value is the sum (or maximum) of what the devices of the axis hold."""

    reduction: Reduction = "sum"

    def __str__(self) -> str:
        return "P" if self.reduction == "sum" else f"P({self.reduction})"


@dataclass(frozen=True, order=True)
class Split:
    """Each device of the axis holds one part of dimension ``dim``, cut at multiples of ``unit``."""

    dim: int
    unit: int = 1

    def __str__(self) -> str:
        return f"S({self.dim})" if self.unit == 1 else f"S({self.dim},{self.unit})"


Placement = Replicated | Partial | Split
Layout = tuple[Placement, ...]
"""One placement per mesh axis."""

R = Replicated()
P = Partial()

_PLACEMENT = re.compile(r"^(?:(R)|(P)(?:\((sum|max)\))?|S\((\d+)(?:,(\d+))?\))$")


def parse_placement(text: str) -> Placement:
    """Inverse of ``str(placement)``: ``R``, ``P``, ``P(max)``, ``S(1)``, ``S(1,64)``."""
    match = _PLACEMENT.match(text)
    if match is None:
        raise PlanFileError(f"expected a placement R, P, P(max), S(dim) or S(dim,unit), got {text!r}")
    replicated, partial, reduction, dim, unit = match.groups()
    if replicated:
        return R
    if partial:
        return Partial("max" if reduction == "max" else "sum")
    return Split(int(dim), int(unit or 1))


def layout_text(layout: Layout) -> str:
    """``(R, P, S(0))`` as ``"R P S(0)"``."""
    return " ".join(map(str, layout))


def replicated(mesh: Mesh) -> Layout:
    """The layout that replicates over every axis of ``mesh``."""
    return (R,) * len(mesh.axes)


def cut(interval: Interval, unit: int, parts: int, index: int) -> Interval:
    """Part ``index`` of ``interval`` cut into ``parts`` balanced parts of whole units.

    Raises IllegalPlanError when the interval is no whole number of units or has fewer units
    than parts (a part would be empty).
    """
    low, high = interval
    count, rest = divmod(high - low, unit)
    if rest or count < parts:
        raise IllegalPlanError(
            f"cannot cut {high - low} elements into {parts} non-empty parts of whole units of {unit}"
        )
    share, extra = divmod(count, parts)
    start = index * share + min(index, extra)
    stop = start + share + (index < extra)
    return low + start * unit, low + stop * unit


def whole(shape: Shape) -> Region:
    """The region that covers a tensor of ``shape``."""
    return tuple((0, extent) for extent in shape)


def refine(region: Region, placement: Placement, parts: int, index: int) -> Region:
    """The part of ``region`` that member ``index`` of an axis of size ``parts`` holds."""
    if not isinstance(placement, Split):
        return region
    if placement.dim >= len(region):
        raise IllegalPlanError(f"{placement} splits a dimension that a {len(region)}-d tensor does not have")
    piece = cut(region[placement.dim], placement.unit, parts, index)
    return region[: placement.dim] + (piece,) + region[placement.dim + 1 :]


def region_of(base: Region, layout: Layout, mesh: Mesh, device: Device) -> Region:
    """The region of a tensor that ``device`` holds, where ``base`` is what the mesh holds."""
    if len(layout) != len(mesh.axes):
        raise IllegalPlanError(
            f"layout {layout_text(layout)!r} has {len(layout)} placements for mesh axes {mesh.axis_names}"
        )
    region = base
    for placement, size, coordinate in zip(layout, mesh.shape, mesh.coordinates(device), strict=True):
        region = refine(region, placement, size, coordinate)
    return region


def local_shape(region: Region) -> Shape:
    """The shape of the buffer that holds ``region``."""
    return tuple(high - low for low, high in region)


def intersect(a: Region, b: Region) -> Region | None:
    """The common part of two regions, or None when it is empty."""
    common = tuple((max(p[0], q[0]), min(p[1], q[1])) for p, q in zip(a, b, strict=True))
    return None if any(low >= high for low, high in common) else common


def relative(region: Region, base: Region) -> Region:
    """``region`` in the local coordinates of a buffer that holds ``base``."""
    return tuple((low - origin, high - origin) for (low, high), (origin, _) in zip(region, base, strict=True))


def canonical(
    shape: Shape, layout: Layout, mesh_shape: Shape, time: Placement = Replicated(), time_parts: int = 1
) -> Layout:
    """The same layout with unit 1 where all parts are equal, so that equal cuts compare equal.

    ``time``: how ``time_parts`` micro-batches cut the tensor before the mesh does.
    """
    parts: dict[int, int] = {time.dim: time_parts} if isinstance(time, Split) else {}
    for placement, size in zip(layout, mesh_shape, strict=True):
        if isinstance(placement, Split):
            parts[placement.dim] = parts.get(placement.dim, 1) * size
    return tuple(
        Split(p.dim) if isinstance(p, Split) and shape[p.dim] % (p.unit * parts[p.dim]) == 0 else p for p in layout
    )


def is_partial(layout: Layout) -> bool:
    return any(isinstance(placement, Partial) for placement in layout)


def demanded_gradient(layout: Layout) -> Layout:
    """The layout in which the producer of a value in ``layout`` wants its gradient: S -> S, V -> R, R -> R."""
    return tuple(placement if isinstance(placement, Split) else R for placement in layout)


def delivered_gradient(inputs: Sequence[Placement], outputs: Sequence[Placement]) -> tuple[Placement, ...]:
    """The gradient placement that an operator delivers for each input, on one axis.

    The one table that makes backward mechanical: S -> S; V -> R; R -> V where the operator's
    work is divided on the axis (an output is split or partial), R where it is replicated.
    """
    divided = any(not isinstance(placement, Replicated) for placement in outputs)
    table: dict[type, Placement] = {Partial: R, Replicated: P if divided else R}
    return tuple(table.get(type(placement), placement) for placement in inputs)
