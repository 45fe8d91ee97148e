"""Conversions from end to end: found, lowered, proved, run on numpy, and compared with the reference."""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from searchspace.conversion import ElementCount, Path, cheapest_path
from searchspace.layout import Partial, R, Split, demanded_gradient, is_partial
from searchspace.mesh import Mesh
from tests.searchspace.conversions import convert, grid, layouts, numbers, run

MESHES = [grid(2), grid(3), grid(4), grid(8), grid(2, 2), grid(2, 3), grid(2, 4), grid(4, 2), grid(1, 4), grid(3, 2)]
SHAPES = {
    (8,): {0: (1, 2)},
    (11,): {},
    (8, 12): {1: (1, 3)},
    (7, 10): {1: (1, 2)},
    (9, 5): {},
    (4, 8, 6): {1: (1, 2)},
    (5, 9, 3): {},
    (0, 6): {1: (1, 2)},
}
CASES = list(product(MESHES, SHAPES))
PRICES = ElementCount(8)


def _pairs(mesh, shape, reduction="sum"):
    found = layouts(shape, mesh, SHAPES[shape], reduction)
    return list(product(found, repeat=2))


@pytest.mark.parametrize(("mesh", "shape"), CASES, ids=str)
def test_one_mesh(mesh, shape):
    """A sample of all ordered pairs of layouts; every start and every end occurs over the suite."""
    pairs = _pairs(mesh, shape)
    for source, target in random.Random(f"{mesh}{shape}").sample(pairs, min(16, len(pairs))):
        convert(numbers(shape), (mesh, source), (mesh, target), PRICES)


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["sum", "max"])
@pytest.mark.parametrize(("mesh", "shape"), CASES, ids=str)
def test_one_mesh_all_pairs(mesh, shape, reduction):
    for source, target in _pairs(mesh, shape, reduction):
        convert(numbers(shape), (mesh, source), (mesh, target), PRICES)


@pytest.mark.parametrize("mesh", [grid(4), grid(2, 3)], ids=str)
def test_maxima(mesh):
    pairs = [pair for pair in _pairs(mesh, (7, 10), "max") if any(map(is_partial, pair))]
    for source, target in random.Random(0).sample(pairs, min(40, len(pairs))):
        convert(numbers((7, 10)), (mesh, source), (mesh, target), PRICES)


@pytest.mark.parametrize("shape", [(8, 6), (7, 12)])
def test_three_axes(shape):
    mesh = grid(2, 2, 2)
    pairs = list(product(layouts(shape, mesh, {0: (1,), 1: (1, 3)}), repeat=2))
    for source, target in random.Random(0).sample(pairs, 60):
        convert(numbers(shape), (mesh, source), (mesh, target), PRICES)


def test_maximum_to_sum_and_back():
    mesh = grid(2, 2)
    for source, target in [((Partial("max"), R), (Partial(), Split(0))), ((Partial(), R), (R, Partial("max")))]:
        convert(numbers((6,)), (mesh, source), (mesh, target), PRICES)


@pytest.mark.parametrize("dtype", ["float64", "float32", "int64", "int32", "bfloat16", "complex128"])
def test_every_dtype_moves_unharmed(dtype):
    array = numbers((7, 6)).astype("float32" if dtype == "bfloat16" else dtype)
    convert(array, (grid(2, 2), (Partial(), Split(0))), (grid(2, 2), (Split(0), Split(0))), PRICES, dtype)


def test_scalars():
    for source, target in product(layouts((), grid(2, 3)), repeat=2):
        convert(numbers(()), (grid(2, 3), source), (grid(2, 3), target), PRICES)


def test_empty_tensors():
    mesh, shape = grid(2, 2), (0, 6)
    for source, target in product(layouts(shape, mesh), repeat=2):
        convert(numbers(shape), (mesh, source), (mesh, target), PRICES)
        convert(numbers(shape), (mesh, source), (grid(2, 2, first=3), target), PRICES)


MESH_PAIRS = [
    pytest.param(grid(1), grid(1, first=1), id="one to one"),
    pytest.param(grid(1), grid(4, first=1), id="one to many"),
    pytest.param(grid(4), grid(1, first=4), id="many to one"),
    pytest.param(grid(2, 2), grid(2, 2, first=4), id="disjoint"),
    pytest.param(grid(2, 2), grid(4, first=4), id="disjoint, another shape"),
    pytest.param(grid(3), grid(2, 2, first=3), id="disjoint, more devices"),
    pytest.param(grid(4), grid(2, 2, first=2), id="overlapping"),
    pytest.param(grid(2, 3), grid(3, 2), id="same devices, another shape"),
    pytest.param(grid(4), Mesh((("x", 4),), (3, 1, 0, 2)), id="same devices, another order"),
    pytest.param(grid(2, 2), grid(2, first=1), id="into a part"),
    pytest.param(grid(2, first=3), grid(2, 4), id="into a superset"),
]


@pytest.mark.parametrize(("source_mesh", "target_mesh"), MESH_PAIRS)
@pytest.mark.parametrize("shape", [(12, 4), (7, 10)])
def test_between_meshes(source_mesh, target_mesh, shape):
    pairs = list(product(layouts(shape, source_mesh), layouts(shape, target_mesh, {1: (1, 2)})))
    for source, target in random.Random(str(shape)).sample(pairs, min(24, len(pairs))):
        convert(numbers(shape), (source_mesh, source), (target_mesh, target), PRICES)


@pytest.mark.slow
@pytest.mark.parametrize(("source_mesh", "target_mesh"), MESH_PAIRS)
@pytest.mark.parametrize("shape", list(SHAPES))
def test_between_meshes_all_pairs(source_mesh, target_mesh, shape):
    for source, target in product(layouts(shape, source_mesh), layouts(shape, target_mesh, SHAPES[shape])):
        convert(numbers(shape), (source_mesh, source), (target_mesh, target), PRICES)


@pytest.mark.parametrize("mesh", [grid(4), grid(2, 2), grid(2, 3)], ids=str)
def test_adjoint(mesh):
    """<A x, g> = <x, A' g>: forward a to b, backward from b's demanded gradient to a's.

    With x and g whole numbers both sides are exact; that forward and backward each keep the whole
    value is what makes them adjoint, so this checks the layouts of gradients.
    """
    shape = (7, 6)
    x, g = numbers(shape), numbers(shape)[::-1]
    pairs = _layout_pairs(mesh, shape)
    for source, target in random.Random(1).sample(pairs, 12):
        convert(x, (mesh, source), (mesh, target), PRICES)
        delivered = tuple(placement if isinstance(placement, Split) else Partial() for placement in target)
        convert(g, (mesh, delivered), (mesh, demanded_gradient(source)), PRICES)


def _layout_pairs(mesh, shape):
    return list(product(layouts(shape, mesh), repeat=2))


@given(st.data())
def test_any_shape_and_units(data):
    sizes = data.draw(st.sampled_from([(2,), (4,), (2, 2), (3, 2), (2, 2, 2)]))
    mesh = grid(*sizes)
    unit = data.draw(st.integers(1, 3))
    shape = (data.draw(st.integers(1, 4)) * unit, *data.draw(st.lists(st.integers(1, 9), max_size=2)))
    found = st.sampled_from(layouts(shape, mesh, {0: tuple({1, unit})}))
    convert(numbers(shape), (mesh, data.draw(found)), (mesh, data.draw(found)), PRICES)


def test_a_part_of_the_tensor():
    """The meshes may hold one micro-batch: regions are relative to the base."""
    from searchspace.conversion import check_coverage, lower
    from searchspace.conversion.simulate import execute, gather, scatter

    mesh, base, array = grid(2, 2), ((3, 10), (0, 6)), numbers((7, 6))
    source, target = (mesh, (Split(0), Partial())), (mesh, (Split(1), Split(0)))
    memory = {device: {("0", 5): buffer} for device, buffer in scatter(array, source).items()}
    for i, move in enumerate(cheapest_path((7, 6), 8, source, target, PRICES).moves):
        exchanges = lower(move, base, (str(i), 5), (str(i + 1), 5), "float64")
        check_coverage("x", exchanges, base, move.before, move.after)
        execute(exchanges, memory)
    buffers = {device: memory[device][str(i + 1), 5] for device in mesh.devices}
    assert np.array_equal(gather(buffers, base, target), array)


def test_relabelling_is_free():
    """Layouts that put the same elements on the same devices need no move."""
    flat, square = grid(8), grid(2, 4)
    free = Path((), 0.0)
    assert cheapest_path((8, 128), 4, (square, (R, Split(1))), (square, (R, Split(1, 16))), PRICES) == free
    assert cheapest_path((16,), 4, (square, (Split(0), Split(0))), (flat, (Split(0),)), PRICES) == free
    renamed = Mesh((("p", 2), ("q", 4)), square.devices)
    assert cheapest_path((16,), 4, (square, (Partial(), R)), (renamed, (Partial(), R)), PRICES) == free
    assert cheapest_path((6,), 4, (grid(1, 2), (Partial(), R)), (grid(1, 2), (Split(0), R)), PRICES) == free


def test_renamed_axes_are_one_mesh():
    square, renamed = grid(2, 2), Mesh((("p", 2), ("q", 2)), (0, 1, 2, 3))
    path = cheapest_path((8, 8), 4, (square, (Partial(), R)), (renamed, (R, R)), PRICES)
    assert [move.kind for move in path.moves] == ["all_reduce"]
    run(path, numbers((8, 8)), (square, (Partial(), R)), (renamed, (R, R)))
