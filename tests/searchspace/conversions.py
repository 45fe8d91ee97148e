"""What the tests of conversions share: layouts, and the run of a path on numpy arrays."""

from __future__ import annotations

from itertools import product

import numpy as np

from searchspace.conversion import Path, Placed, Prices, cheapest_path, check_coverage, lower
from searchspace.conversion.simulate import Array, execute, gather, scatter
from searchspace.errors import IllegalPlanError
from searchspace.layout import Layout, Partial, Placement, R, Reduction, Shape, Split, is_partial, region_of, whole
from searchspace.mesh import Mesh


def grid(*sizes: int, first: int = 0) -> Mesh:
    """A mesh with axes a, b, c of these sizes over consecutive devices."""
    return Mesh(tuple(zip("abc", sizes, strict=False)), tuple(range(first, first + int(np.prod(sizes)))))


def legal(shape: Shape, layout: Layout, mesh: Mesh) -> bool:
    """Whether no part is empty and no unit is cut; one layout has one reduction."""
    try:
        for device in mesh.devices:
            region_of(whole(shape), layout, mesh, device)
    except IllegalPlanError:
        return False
    return len({p for p in layout if isinstance(p, Partial)}) <= 1


def layouts(
    shape: Shape, mesh: Mesh, units: dict[int, tuple[int, ...]] | None = None, reduction: Reduction = "sum"
) -> list[Layout]:
    """Every legal layout, in the given units by dimension (1 by default)."""
    splits = [Split(d, u) for d in range(len(shape)) for u in (units or {}).get(d, (1,))]
    placements: list[Placement] = [R, Partial(reduction), *splits]
    return [layout for layout in product(placements, repeat=len(mesh.axes)) if legal(shape, layout, mesh)]


def run(path: Path, array: Array, source: Placed, target: Placed, dtype: str = "float64") -> None:
    """Check coverage of every move, run the path, and compare every buffer with the reference."""
    base = whole(array.shape)
    memory = {device: {("at.0", 0): buffer} for device, buffer in scatter(array, source, seed=1).items()}
    for device in target[0].devices:
        memory.setdefault(device, {})
    at = source
    for number, move in enumerate(path.moves):
        exchanges = lower(move, base, (f"at.{number}", 0), (f"at.{number + 1}", 0), dtype)
        check_coverage("x", exchanges, base, move.before, move.after)
        execute(exchanges, memory)
        at = move.after
    assert not path.moves or at == target
    result = {device: memory[device][f"at.{len(path.moves)}", 0] for device in target[0].devices}
    assert np.array_equal(gather(result, base, target), array)
    if not is_partial(target[1]):
        for device, expected in scatter(array, target).items():
            assert np.array_equal(result[device], expected)


def convert(array: Array, source: Placed, target: Placed, prices: Prices, dtype: str = "float64") -> Path:
    """Find the cheapest path and :func:`run` it."""
    path = cheapest_path(array.shape, array.dtype.itemsize, source, target, prices)
    run(path, array, source, target, dtype)
    return path


def numbers(shape: Shape) -> Array:
    """Distinct whole numbers."""
    return np.arange(1, 1 + int(np.prod(shape)), dtype=np.float64).reshape(shape)
