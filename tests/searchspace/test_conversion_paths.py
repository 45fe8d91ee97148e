"""The cheapest path against brute force, nnScaler's facts, and its own promises."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, replace
from itertools import chain, combinations, product
from math import inf, prod

import numpy as np
import pytest

from searchspace.conversion import ElementCount, Move, Path, cheapest_path, paths
from searchspace.conversion.routes import copies
from searchspace.conversion.simulate import scatter
from searchspace.errors import IllegalPlanError
from searchspace.layout import P, Partial, R, Replicated, Split, intersect, local_shape, region_of, whole
from searchspace.mesh import Mesh
from tests.searchspace.conversions import grid, layouts, legal, numbers


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
    """(kind, axes, elements) of the single move from ``before`` to ``after``, if there is one."""
    axes = tuple(a for a in range(len(mesh.axes)) if before[a] != after[a])
    have = {d: region_of(whole(shape), before, mesh, d) for d in mesh.devices}
    want = {d: region_of(whole(shape), after, mesh, d) for d in mesh.devices}
    largest = [max(map(_volume, regions.values())) for regions in (have, want)]
    kinds = {(_kind(before[a]), _kind(after[a])) for a in axes}
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


def _runs(shape, mesh, every, prices):
    """Cheapest runs of collectives and local moves between all layouts (Floyd and Warshall).

    Returns single moves, runs, and runs that may end before, or start after, a send_receive (no
    slice there).
    """
    count = len(every)
    single, slices = np.full((count, count), inf), np.full((count, count), inf)
    for (i, before), (j, after) in product(enumerate(every), repeat=2):
        have, want = ([region_of(whole(shape), x, mesh, d) for d in mesh.devices] for x in (before, after))
        if have == want and list(map(_kind, before)) == list(map(_kind, after)):
            single[i, j] = 0.0
            continue
        for kind, axes, size in _single_moves(shape, mesh, before, after):
            if kind == "local":
                single[i, j] = prices.local(size * 8)
                if _kind(before[axes[0]]) == "R" and _kind(after[axes[0]]) == "S":
                    slices[i, j] = single[i, j]
            else:
                single[i, j] = prices.collective(kind, mesh, axes, size * 8)
    runs = single.copy()
    for k in range(count):
        runs = np.minimum(runs, runs[:, k, None] + runs[None, k, :])
    free = np.where(single == 0, 0.0, inf)
    collected = np.where((slices < inf) | (single == 0), inf, single)
    before = np.minimum(free, _min_plus(_min_plus(runs, collected), free))
    after = np.minimum(free, _min_plus(free, _min_plus(collected, runs)))
    return single, runs, before, after


def _sends(shape, source_mesh, befores, target_mesh, afters, prices):
    """Prices of one send_receive between all layouts of two meshes, or of one mesh."""
    found = np.full((len(befores), len(afters)), inf)
    for (i, before), (j, after) in product(enumerate(befores), enumerate(afters)):
        partial = [tuple(p if isinstance(p, Partial) else None for p in layout) for layout in (before, after)]
        if partial[0] == partial[1] if source_mesh == target_mesh else not any(partial[0]) and not any(partial[1]):
            sent = copies(shape, 8, (source_mesh, before), (target_mesh, after))
            size = max(_volume(region_of(whole(shape), after, target_mesh, d)) for d in target_mesh.devices)
            found[i, j] = prices.transfer(sent) if sent else prices.local(size * 8)
    return found


def _all_prices(shape, mesh, every, prices):
    """The cheapest of all paths between all layouts of one mesh, with every place for a send_receive."""
    single, runs, before, after = _runs(shape, mesh, every, prices)
    sends = np.where(single < inf, inf, _sends(shape, mesh, every, mesh, every, prices))
    return np.minimum(runs, _min_plus(_min_plus(before, sends), after))


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


@pytest.mark.parametrize("prices", [ElementCount(8), Linear(), Linear(100.0, 0.1)], ids=repr)
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


@pytest.mark.parametrize("prices", [ElementCount(8), Linear(), Linear(100.0, 0.1)], ids=repr)
@pytest.mark.parametrize(
    ("source_mesh", "target_mesh", "shape"),
    [
        (grid(2, 2), grid(2, 2, first=4), (8, 6)),
        (grid(2), grid(2, 3, first=2), (7, 6)),
        (grid(4), grid(2, 2, first=2), (8, 5)),
        (grid(2, 2), grid(4), (12,)),
    ],
    ids=str,
)
@pytest.mark.parametrize("many", [0, 64])
def test_equals_brute_force_between_meshes(source_mesh, target_mesh, shape, prices, many, monkeypatch):
    monkeypatch.setattr(paths, "MANY_DEVICES", many)
    prices = replace(prices)  # nothing is remembered
    sides = []
    for mesh in (source_mesh, target_mesh):
        every = layouts(shape, mesh)
        for axes in chain.from_iterable(combinations(range(len(mesh.axes)), n) for n in range(len(mesh.axes) + 1)):
            inside = [layout for layout in every if set(_partial_axes(layout)) <= set(axes)]
            sides.append((mesh, axes, inside, _runs(shape, mesh, inside, prices)))
    for (mesh, axes, befores, runs), (other, goal_axes, afters, other_runs) in product(sides, repeat=2):
        if mesh is not source_mesh or other is not target_mesh:
            continue
        before, after = runs[2], other_runs[3]
        joined = _min_plus(_min_plus(before, _sends(shape, mesh, befores, other, afters, prices)), after)
        for (i, source), (j, target) in product(enumerate(befores), enumerate(afters)):
            if _partial_axes(source) == axes and _partial_axes(target) == goal_axes:
                path = cheapest_path(shape, 8, (mesh, source), (other, target), prices)
                assert path.seconds == pytest.approx(joined[i, j] if path.moves else 0.0), path


# -- facts ---------------------------------------------------------------------------------------------

TOY = ElementCount(4)
SQUARE = (1024, 1024)


def S(dim, unit=1):
    return Split(dim, unit)


@pytest.mark.parametrize(
    ("shape", "sizes", "source", "target", "kinds", "price"),
    [
        # nnScaler v0.8; layouts there are (replicas, value parts, parts of each dimension), ours are by axis.
        ((256, 256), (4, 2), (S(1), P), (S(1), S(1)), ["reduce_scatter"], 8193),
        ((8, 8), (2, 2), (P, S(1)), (S(0), S(0)), ["reduce_scatter", "all_to_all"], 26),
        ((32, 64, 128), (8,), (P,), (R,), ["all_reduce"], 458753),
        ((32, 64, 128), (8,), (R,), (S(0),), ["local"], 1),
        ((32, 64, 128), (4, 2), (P, S(2)), (R, S(2)), ["all_reduce"], 196609),
        (SQUARE, (4,), (S(0),), (R,), ["all_gather"], 786433),
        (SQUARE, (4,), (S(0),), (S(1),), ["all_to_all"], 196609),
        (SQUARE, (4,), (P,), (S(0),), ["reduce_scatter"], 786433),
        (SQUARE, (4,), (P,), (R,), ["all_reduce"], 1572865),
        (SQUARE, (2, 2), (R, P), (R, R), ["all_reduce"], 1048577),
        (SQUARE, (2, 2), (S(0), P), (S(0), S(0)), ["reduce_scatter"], 262145),
        (SQUARE, (2, 2), (P, S(0)), (S(1), R), ["reduce_scatter", "all_gather"], 524290),
        (SQUARE, (2, 2), (S(0), S(0)), (R, S(1)), ["all_to_all", "all_gather"], 393218),
        # Cheaper here, since one move may be along several axes: 2 and 786434 there.
        (SQUARE, (2, 2), (R, R), (S(0), S(1)), ["local"], 1),
        (SQUARE, (2, 2), (S(0), S(1)), (R, R), ["all_gather"], 786433),
    ],
)  # fmt: skip
def test_facts_on_one_mesh(shape, sizes, source, target, kinds, price):
    mesh = grid(*sizes)
    path = cheapest_path(shape, 4, (mesh, source), (mesh, target), TOY)
    assert [move.kind for move in path.moves] == kinds
    assert path.seconds == price


def test_fact_devices_of_nested_splits():
    """(1,2,1,4) to (1,1,1,8): groups of two, and the parts lie on devices 0 4 1 5 2 6 3 7."""
    mesh = Mesh((("d", 4), ("v", 2)), (0, 4, 1, 5, 2, 6, 3, 7))
    (move,) = cheapest_path((256, 256), 4, (mesh, (S(1), P)), (mesh, (S(1), S(1))), TOY).moves
    assert mesh.groups(move.axes) == ((0, 4), (1, 5), (2, 6), (3, 7))


@pytest.mark.parametrize(
    ("source", "target", "kinds", "price"),
    [
        ((grid(1), (R,)), (grid(1, first=1), (R,)), ["send_receive"], 25165848),
        ((grid(1), (R,)), (grid(4, first=1), (R,)), ["send_receive", "all_gather"], 25952281),
        ((grid(2), (S(0),)), (grid(4, first=2), (R,)), ["send_receive", "all_gather"], 13369369),
        ((grid(4), (S(0),)), (grid(2, first=4), (S(0),)), ["send_receive"], 12582936),
        # Cheaper here: replicas share a send_receive without a slice before it (13107226 there), and a
        # send_receive lays out anew (12845081 there, with an all-to-all).
        ((grid(2), (R,)), (grid(2, first=2), (R,)), ["send_receive", "all_gather"], 13107225),
        ((grid(2), (S(0),)), (grid(2, first=2), (S(1),)), ["send_receive"], 12582936),
    ],
)  # fmt: skip
def test_facts_between_meshes(source, target, kinds, price):
    path = cheapest_path(SQUARE, 4, source, target, TOY)
    assert [move.kind for move in path.moves] == kinds
    assert path.seconds == price


def test_fact_everything_is_reachable():
    """All pairs of layouts of a 3-D tensor on 8 devices, as (2,2,2): no exception (fact 33)."""
    mesh = grid(2, 2, 2)
    every = layouts((8, 8, 8), mesh)
    for source, target in random.Random(0).sample(list(product(every, repeat=2)), 150):
        assert cheapest_path((8, 8, 8), 4, (mesh, source), (mesh, target), TOY).seconds >= 0


def test_fact_replicas_summands_and_parts():
    """R = 2, V = 8, D = (1,1,2) on 32 devices: the device is the row-major index (fact 36)."""
    mesh = Mesh((("r", 2), ("v", 8), ("d", 2)), tuple(range(32)))
    array = numbers((4, 4, 6))
    held = scatter(array, (mesh, (R, P, S(2))))
    assert all(np.array_equal(held[d], held[d + 16]) for d in range(16))
    halves = [sum(held[2 * v + d] for v in range(8)) for d in range(2)]
    assert np.array_equal(np.concatenate(halves, axis=2), array)


# -- promises ------------------------------------------------------------------------------------------


def test_replicas_share_the_sending():
    sent = copies((8,), 1, (grid(2), (R,)), (grid(4, first=2), (R,)))
    assert sent == [(0, 2, 8), (0, 3, 8), (1, 4, 8), (1, 5, 8)]


def test_what_a_device_has_it_keeps():
    sent = copies((8,), 1, (grid(4), (S(0),)), (grid(2, first=2), (S(0),)))
    assert sent == [(0, 2, 2), (1, 2, 2), (2, 3, 2)]  # device 3 holds 6:8 itself


def test_hierarchical_all_reduce():
    """With slow outer links: scatter inside, reduce across, gather inside (S. Li et al., 2020, section 3)."""
    mesh = grid(2, 4)
    path = cheapest_path((4096,), 4, (mesh, (P, P)), (mesh, (R, R)), Linear())
    assert [(move.kind, move.axes) for move in path.moves] == [
        ("reduce_scatter", (1,)),
        ("all_reduce", (0,)),
        ("all_gather", (1,)),
    ]


@pytest.mark.parametrize(("source", "target"), [((S(0), R), (S(0), R)), ((S(0), P), (R, R)), ((R, S(1)), (P, S(0)))])
def test_a_thousand_devices_are_quick(source, target):
    """Pipeline neighbours of 512 devices each; the time is generous, enumerating all pairs takes minutes."""
    ours, theirs = (Mesh((("a", 8), ("b", 64)), tuple(range(first, first + 512))) for first in (0, 512))
    started = time.perf_counter()
    path = cheapest_path((512, 2048, 1024), 2, (ours, source), (theirs, target), ElementCount(2))
    assert time.perf_counter() - started < 2
    assert [move.kind for move in path.moves].count("send_receive") == 1


def test_among_equals_the_fewest_messages():
    mesh = grid(2, 4)
    other = grid(2, 4, first=8)
    path = cheapest_path((8, 8, 8), 4, (mesh, (S(0), P)), (other, (S(0), S(2))), TOY)
    assert [str(move) for move in path.moves] == [
        "S(0) P -reduce_scatter[b]-> S(0) S(2)",
        "S(0) S(2) -send_receive-> S(0) S(2)",
    ]


def test_no_part_is_ever_empty():
    mesh = grid(4)
    path = cheapest_path((3, 8), 4, (mesh, (P,)), (mesh, (S(1),)), TOY)
    assert all(legal((3, 8), move.target, mesh) for move in path.moves)
    with pytest.raises(IllegalPlanError, match=r"cannot cut 3 elements into 4 non-empty parts"):
        cheapest_path((3, 8), 4, (mesh, (R,)), (mesh, (S(0),)), TOY)
    with pytest.raises(IllegalPlanError, match=r"whole units of 3"):
        cheapest_path((3, 8), 4, (mesh, (S(1, 3),)), (mesh, (R,)), TOY)


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ((R, R), (R,), r"layout 'R R' has 2 placements for mesh axes \('a',\)"),
        ((R,), (S(2),), r"S\(2\) splits a dimension that a 2-d tensor does not have"),
    ],
)
def test_malformed_layouts(source, target, message):
    with pytest.raises(IllegalPlanError, match=message):
        cheapest_path((4, 4), 4, (grid(2), source), (grid(2), target), TOY)


def test_mixed_reductions_are_refused():
    with pytest.raises(IllegalPlanError, match=r"'P P\(max\)' is a sum and a maximum of parts at once"):
        cheapest_path((4,), 4, (grid(2, 2), (P, Partial("max"))), (grid(2, 2), (R, R)), TOY)


def test_moves_check_themselves():
    mesh = grid(2, 2)
    with pytest.raises(IllegalPlanError, match=r"all_gather along b cannot turn 'S\(0\) P' into 'S\(0\) R'"):
        Move("all_gather", (1,), mesh, (S(0), P), mesh, (S(0), R))
    with pytest.raises(IllegalPlanError, match="all_reduce needs at least one mesh axis"):
        Move("all_reduce", (), mesh, (P, P), mesh, (R, R))
    moves = [Move("local", (a,), mesh, (R, R), mesh, (S(0), R) if a == 0 else (R, S(0))) for a in (0, 1)]
    with pytest.raises(IllegalPlanError, match="moves do not follow one another"):
        Path(tuple(moves), 0.0)


def test_paths_print():
    mesh = grid(2, 2)
    path = cheapest_path((8, 8), 4, (mesh, (P, S(1))), (mesh, (S(0), S(0))), TOY)
    assert str(path) == "P S(1) -reduce_scatter[a]-> S(0) S(1); S(0) S(1) -all_to_all[b]-> S(0) S(0)"
    assert str(cheapest_path((8, 8), 4, (mesh, (R, R)), (mesh, (R, R)), TOY)) == "nothing"


def test_the_same_question_has_the_same_answer():
    mesh = grid(2, 2)
    pairs = random.Random(3).sample(list(product(layouts((8, 6, 4), mesh), repeat=2)), 40)
    answers = [
        [str(cheapest_path((8, 6, 4), 4, (mesh, a), (mesh, b), prices)) for a, b in order]
        for prices, order in [(ElementCount(4), pairs), (ElementCount(4), pairs[::-1])]
    ]
    assert answers[0] == answers[1][::-1]


def test_answers_are_kept_as_long_as_the_prices():
    calls = []

    class Counting(ElementCount):
        def collective(self, *arguments):
            calls.append(arguments)
            return super().collective(*arguments)

    mesh, prices = grid(4), Counting(4)
    first = cheapest_path(SQUARE, 4, (mesh, (P,)), (mesh, (R,)), prices)
    asked = len(calls)
    assert cheapest_path(SQUARE, 4, (mesh, (P,)), (mesh, (R,)), prices) is first
    assert asked == len(calls) > 0
    assert id(prices) in paths._memos
    number = id(prices)
    del prices
    assert number not in paths._memos
