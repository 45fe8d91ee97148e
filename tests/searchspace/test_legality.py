"""What may be split: the predicate agrees with the cuts themselves."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from searchspace.errors import IllegalPlanError
from searchspace.layout import R, Split, region_of, whole
from searchspace.mesh import Mesh
from searchspace.resolve import layout_problem

MESH = Mesh((("dp", 2), ("tp", 3)), tuple(range(6)))
UNITS = st.sampled_from([1, 2, 3, 4])


@given(st.integers(1, 40), st.one_of(st.just(R), st.builds(Split, st.just(0), UNITS)), UNITS)
def test_the_predicate_says_whether_every_device_gets_a_part(extent: int, outer: Split, unit: int) -> None:
    layout = (outer, Split(0, unit))
    try:
        for device in MESH.devices:
            region_of(whole((extent,)), layout, MESH, device)
        possible = True
    except IllegalPlanError:
        possible = False
    assert (layout_problem((extent,), layout, MESH) is None) == possible


def test_units_that_the_outer_axis_breaks_are_refused_with_the_numbers() -> None:
    problem = layout_problem((640,), (Split(0), Split(0, 128)), Mesh((("dp", 2), ("tp", 2)), (0, 1, 2, 3)))
    assert problem == "S(0,128) cuts whole units of 128 in an extent of 320"
