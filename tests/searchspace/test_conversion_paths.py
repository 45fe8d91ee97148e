"""The cheapest path against brute force, nnScaler's facts, and its own promises."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations, product
from math import inf, prod

import numpy as np
import pytest

from searchspace.conversion import ElementCount, cheapest_path
from searchspace.conversion.routes import copies
from searchspace.layout import P, Partial, Replicated, intersect, local_shape, region_of, whole
from tests.searchspace.conversions import grid, layouts


@dataclass(frozen=True, eq=False)
class Linear:
    """Latency and bandwidth: ring collectives, full-duplex ports; outer axes and far devices are slower."""

    alpha: float = 5.0
    beta: float = 1.0
    nodes_of: int = 2

    def collective(self, kind, mesh, axes, bytes):
        members = prod(mesh.shape[a] for a in axes)
        slow = 4.0 if 0 in axes else 1.0
        rounds = 2 if kind == "all_reduce" else 1
        return rounds * (members - 1) * (self.alpha + slow * self.beta * bytes / members)

    def transfer(self, copies):
        ports = {}
        for source, target, size in copies:
            far = source // self.nodes_of != target // self.nodes_of
            for port in (("out", source), ("in", target)):
                ports[port] = ports.get(port, 0.0) + size * (4.0 if far else 1.0)
        return self.alpha + self.beta * max(ports.values())

    def local(self, bytes):
        return 0.5 + 0.01 * self.beta * bytes


# -- brute force: regions of all devices instead of reasoning about layouts ----------------------------


def _volume(region):
    return prod(local_shape(region))


def _tiles(pieces, goal):
    return (
        all(intersect(piece, goal) == piece for piece in pieces)
        and sum(map(_volume, pieces)) == _volume(goal)
        and all(intersect(a, b) is None for a, b in combinations(pieces, 2))
    )


def _kind(placement):
    return "R" if isinstance(placement, Replicated) else "P" if isinstance(placement, Partial) else "S"


def _single_moves(shape, mesh, before, after):
    """(kind, axes, bytes per element) of each single move from ``before`` to ``after``."""
    axes = tuple(a for a in range(len(mesh.axes)) if before[a] != after[a])
    have = {d: region_of(whole(shape), before, mesh, d) for d in mesh.devices}
    want = {d: region_of(whole(shape), after, mesh, d) for d in mesh.devices}
    largest = [max(map(_volume, regions.values())) for regions in (have, want)]
    kinds = {(_kind(before[a]), _kind(after[a])) for a in axes}
    partial = [tuple(p if isinstance(p, Partial) else None for p in layout) for layout in (before, after)]
    if partial[0] == partial[1] and have != want:
        yield "send_receive", (), 0
    if len(kinds) != 1:
        return
    groups = mesh.groups(axes)
    inside = all(intersect(have[d], want[d]) == want[d] for d in mesh.devices)
    match kinds.pop():
        case "P", "R":
            yield "all_reduce", axes, largest[0]
        case "P", "S" if all(_tiles([want[d] for d in group], have[e]) for group in groups for e in group):
            yield "reduce_scatter", axes, largest[0]
        case "S", "R" if all(_tiles([have[d] for d in group], want[e]) for group in groups for e in group):
            yield "all_gather", axes, largest[1]
        case "S", "S" if {before[a].dim for a in axes}.isdisjoint(after[a].dim for a in axes) and all(
            _tiles([part for d in group if (part := intersect(have[d], want[e]))], want[e])
            and all(intersect(have[d], want[e]) for d in group)
            for group in groups
            for e in group
        ):
            yield "all_to_all", axes, largest[0]
        case ("R", "S") if inside:
            yield "local", axes, largest[1]
        case ("R", "P"):
            yield "local", axes, largest[1]
        case ("S", "P") if after[axes[0]] == P and all(
            _tiles([have[d] for d in group], want[e]) for group in groups for e in group
        ):
            yield "local", axes, largest[1]


def _min_plus(a, b):
    return np.min(a[:, :, None] + b[None, :, :], axis=1)


def _all_prices(shape, mesh, every, prices):
    """The cheapest of all paths between all layouts.

    Floyd and Warshall over collectives and local moves, then every place for one send_receive
    (not where a single move does it, and not next to a slice).
    """
    count = len(every)
    single, slices, sends = (np.full((count, count), inf) for _ in range(3))
    for (i, before), (j, after) in product(enumerate(every), repeat=2):
        have, want = ([region_of(whole(shape), x, mesh, d) for d in mesh.devices] for x in (before, after))
        if have == want and list(map(_kind, before)) == list(map(_kind, after)):
            single[i, j] = 0.0
            continue
        for kind, axes, size in _single_moves(shape, mesh, before, after):
            if kind == "send_receive":
                if sent := copies(shape, 8, (mesh, before), (mesh, after)):
                    sends[i, j] = prices.transfer(sent)
            elif kind == "local":
                single[i, j] = prices.local(size * 8)
                if _kind(before[axes[0]]) == "R" and _kind(after[axes[0]]) == "S":
                    slices[i, j] = single[i, j]
            else:
                single[i, j] = prices.collective(kind, mesh, axes, size * 8)
    sends[single < inf] = inf
    whole_run = single.copy()
    for k in range(count):
        whole_run = np.minimum(whole_run, whole_run[:, k, None] + whole_run[None, k, :])
    free = np.where(single == 0, 0.0, inf)
    collected = np.where((slices < inf) | (single == 0), inf, single)
    before = np.minimum(free, _min_plus(_min_plus(whole_run, collected), free))
    after = np.minimum(free, _min_plus(free, _min_plus(collected, whole_run)))
    return np.minimum(whole_run, _min_plus(_min_plus(before, sends), after))


def _partial_axes(*found):
    return tuple(sorted({axis for layout in found for axis, p in enumerate(layout) if isinstance(p, Partial)}))


BRUTE = [
    (grid(2), (6,), {}),
    (grid(4), (12, 8), {0: (1, 3)}),
    (grid(3), (7, 4), {}),
    (grid(2, 2), (8, 8), {}),
    (grid(2, 2), (7, 12), {1: (1, 3)}),
    (grid(2, 4), (8, 16), {}),
    (grid(3, 2), (7, 9), {}),
    (grid(2, 2), (4, 5, 8), {}),
    (grid(2, 2, 2), (8,), {}),
]


@pytest.mark.parametrize("prices", [ElementCount(8), ElementCount(8, 1.0), Linear(), Linear(100.0, 0.1)], ids=repr)
@pytest.mark.parametrize(("mesh", "shape", "units"), BRUTE, ids=str)
def test_equals_brute_force(mesh, shape, units, prices):
    """All ordered pairs; brute force knows nothing of suffixes, codes, pruning or two ends."""
    every = layouts(shape, mesh, units)
    by_axes = {}
    for source, target in product(every, repeat=2):
        axes = _partial_axes(source, target)
        if axes not in by_axes:
            inside = [layout for layout in every if set(_partial_axes(layout)) <= set(axes)]
            by_axes[axes] = {x: i for i, x in enumerate(inside)}, _all_prices(shape, mesh, inside, prices)
        index, distance = by_axes[axes]
        path = cheapest_path(shape, 8, (mesh, source), (mesh, target), prices)
        assert path.seconds == pytest.approx(distance[index[source], index[target]]), path
