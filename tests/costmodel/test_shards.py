from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel.shards import largest_shard, shape_bytes
from searchspace.errors import IllegalPlanError
from searchspace.layout import P, R, Split, local_shape, refine, region_of, whole
from searchspace.mesh import Mesh

PLACEMENTS = [R, P, Split(0), Split(1), Split(1, 3)]


@given(
    st.tuples(st.integers(1, 20), st.integers(1, 8).map(lambda units: 3 * units)),
    st.sampled_from(list(product(PLACEMENTS, PLACEMENTS))),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.sampled_from([(R, 1), (Split(0), 2), (Split(0), 3)]),
)
@settings(max_examples=300, deadline=None)
def test_it_is_the_largest_of_all_regions(shape, layout, sizes, time):
    mesh = Mesh((("a", sizes[0]), ("b", sizes[1])), tuple(range(sizes[0] * sizes[1])))
    placement, parts = time
    try:
        regions = [
            region_of(refine(whole(shape), placement, parts, m), layout, mesh, d)
            for d in mesh.devices
            for m in range(parts)
        ]
    except IllegalPlanError:
        return
    found = largest_shard(shape, layout, sizes, placement, parts)
    assert found == tuple(max(local_shape(r)[dim] for r in regions) for dim in range(2))
    assert found in [local_shape(r) for r in regions]


@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 2), ("float32", 4), ("int64", 8), ("bool", 1)])
def test_bytes(dtype, size):
    assert shape_bytes((3, 5), dtype) == 15 * size
