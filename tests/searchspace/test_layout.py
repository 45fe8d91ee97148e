"""Index arithmetic of layouts, against enumeration."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from searchspace.errors import IllegalPlanError, PlanFileError
from searchspace.layout import (
    Layout,
    P,
    Partial,
    R,
    Split,
    canonical,
    cut,
    delivered_gradient,
    demanded_gradient,
    intersect,
    local_shape,
    parse_placement,
    region_of,
    relative,
    whole,
)
from searchspace.mesh import Mesh

MESH = Mesh((("dp", 2), ("tp", 3)), (5, 4, 3, 2, 1, 0))


@given(st.integers(1, 60), st.integers(1, 7), st.integers(1, 9))
def test_parts_are_balanced_whole_units_that_cover_once(units: int, unit: int, parts: int) -> None:
    extent = units * unit
    if units < parts:
        with pytest.raises(IllegalPlanError, match="non-empty parts"):
            cut((0, extent), unit, parts, 0)
        return
    pieces = [cut((10, 10 + extent), unit, parts, i) for i in range(parts)]
    assert [p[0] for p in pieces] == [10, *(p[1] for p in pieces[:-1])] and pieces[-1][1] == 10 + extent
    sizes = [high - low for low, high in pieces]
    assert all(size % unit == 0 and size > 0 for size in sizes) and max(sizes) - min(sizes) <= unit
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("layout", [(Split(0), Split(1)), (Split(1), Split(1)), (R, Split(0, 2)), (P, R)])
def test_regions_cover_the_tensor_once_per_replica(layout: Layout) -> None:
    shape = (8, 13)
    seen: dict[tuple[int, int], int] = {}
    for device in MESH.devices:
        (a, b), (c, d) = region_of(whole(shape), layout, MESH, device)
        for i in range(a, b):
            for j in range(c, d):
                seen[i, j] = seen.get((i, j), 0) + 1
    copies = prod(n for p, n in zip(layout, MESH.shape, strict=True) if not isinstance(p, Split))
    assert len(seen) == 8 * 13 and set(seen.values()) == {copies}


def test_the_earlier_axis_is_the_outer_one() -> None:
    regions = [region_of(((0, 12),), (Split(0), Split(0)), MESH, d)[0] for d in MESH.devices]
    assert regions == [(0, 2), (2, 4), (4, 6), (6, 8), (8, 10), (10, 12)]


def test_relative_and_intersect() -> None:
    assert intersect(((0, 4), (2, 6)), ((3, 9), (0, 3))) == ((3, 4), (2, 3))
    assert intersect(((0, 4),), ((4, 9),)) is None
    assert relative(((3, 4), (2, 3)), ((3, 9), (0, 3))) == ((0, 1), (2, 3))
    assert local_shape(((3, 9), (0, 3))) == (6, 3)


@pytest.mark.parametrize("text", ["R", "P", "P(max)", "S(0)", "S(3,16)"])
def test_placements_print_and_parse(text: str) -> None:
    assert str(parse_placement(text)) == text


def test_a_word_that_is_no_placement_is_an_error() -> None:
    with pytest.raises(PlanFileError, match=r"expected a placement R, P, P\(max\), S\(dim\).*got 'Q'"):
        parse_placement("Q")


def test_gradient_table() -> None:
    assert delivered_gradient((Split(0), R, P), (Split(1),)) == (Split(0), P, R)
    assert delivered_gradient((R, R), (R,)) == (R, R)
    assert delivered_gradient((Split(0), R), (P,)) == (Split(0), P)
    assert demanded_gradient((Split(0, 4), P, Partial("max"), R)) == (Split(0, 4), R, R, R)


def test_equal_cuts_are_equal_layouts() -> None:
    assert canonical((64,), (Split(0, 16), R), (2, 3)) == (Split(0), R)
    assert canonical((80,), (Split(0, 16), R), (2, 3)) == (Split(0, 16), R)
    assert canonical((96,), (Split(0, 16), Split(0, 16)), (2, 3)) == (Split(0), Split(0))
    assert canonical((96,), (Split(0, 16), R), (2, 3), Split(0), 4) == (Split(0, 16), R)
    assert canonical((96, 8), (Split(0, 16), R), (2, 3), Split(1), 4) == (Split(0), R)
