"""The stage problem against brute force."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from autoplan.search.figures import KindFigures
from autoplan.search.stages import StageProblem


def random_problem(seed: int, limit: float = np.inf) -> StageProblem:
    """Three options for two kinds of blocks; the third recomputes."""
    rng = np.random.default_rng(seed)
    kinds = rng.integers(0, 2, size=6).tolist()
    options = [KindFigures(*(rng.random(2) for _ in range(4)), *[np.zeros(2)] * 4) for _ in range(3)]
    return StageProblem(kinds, options, [False, False, True], 4, np.zeros(6), limit)


def brute_force(problem: StageProblem, stages: int, in_flight: list[int]) -> float:
    """Best step over all cuts and options of blocks, of equal blocks too."""
    best = np.inf
    count = len(problem.kinds)
    for cuts in itertools.combinations(range(1, count), stages - 1):
        ends = (0, *cuts, count)
        per_stage = []
        for k, (a, b) in zip(in_flight, itertools.pairwise(ends), strict=True):
            found = []
            for chosen in itertools.product(range(3), repeat=b - a):
                kinds, pick = problem.kinds[a:b], list(chosen)
                used = (problem.resident[pick, kinds] + k * problem.saved[pick, kinds]).sum()
                if used <= problem.limit:
                    found.append((problem.seconds[pick, kinds].sum(), problem.step[pick, kinds].sum()))
            per_stage.append(found)
        if all(per_stage):
            quickest = [min(f) for f in per_stage]  # by seconds per micro-batch, which count four times a step's
            seconds = [q[0] for q in quickest]
            best = min(best, sum(seconds) + 3 * max(seconds))
    return best


@pytest.mark.parametrize("seed", range(12))
def test_without_a_limit_it_is_optimal(seed):
    problem = random_problem(seed)
    problem.step[:] = 0.0
    problem.time[:] = problem.seconds
    found = problem.solve(3, [3, 2, 1])
    assert found is not None
    assert found.seconds == pytest.approx(brute_force(problem, 3, [3, 2, 1]))
    assert problem.bound(3) <= found.seconds + 1e-12


@pytest.mark.parametrize("seed", range(12))
def test_with_a_limit_it_is_feasible_and_near_the_optimum(seed):
    problem = random_problem(seed, limit=4.0)
    problem.step[:] = 0.0
    problem.time[:] = problem.seconds
    best = brute_force(problem, 3, [3, 2, 1])
    found = problem.solve(3, [3, 2, 1])
    if not np.isfinite(best):
        assert found is None
        return
    assert found is not None and found.seconds >= best - 1e-12
    assert found.seconds <= 1.6 * best
    for stage, k in zip(found.stages, [3, 2, 1], strict=True):
        kinds, pick = problem.kinds[stage.first : stage.last], list(stage.options)
        used = (problem.resident[pick, kinds] + k * problem.saved[pick, kinds]).sum()
        assert used <= 4.0 and stage.bytes == pytest.approx(used)


def test_least_bytes_is_where_it_becomes_feasible():
    problem = random_problem(3, limit=0.01)
    need = problem.least_bytes(2, [2, 1])
    for limit, fits in ((need * 1.001, True), (need * 0.98, False)):
        problem.limit = limit
        assert (problem.solve(2, [2, 1]) is not None) == fits


def test_more_stages_than_blocks_is_impossible():
    assert random_problem(0).solve(7, [1] * 7) is None


def test_transfers_count_on_both_sides_of_a_cut():
    rng = np.ones(1)
    options = [KindFigures(rng, *[0 * rng] * 7)]
    problem = StageProblem([0, 0], options, [False], 1, np.array([0.0, 0.25]), np.inf)
    found = problem.solve(2, [1, 1])
    assert found is not None
    assert [s.seconds for s in found.stages] == [1.25, 1.25]
