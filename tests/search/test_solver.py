"""The solver against brute force."""

from __future__ import annotations

import contextlib
import itertools

import numpy as np
import pytest

from autoplan.search.elimination import elimination_order, minimise
from autoplan.search.evaluator import evaluate
from autoplan.search.problem import Edge, Node, Problem
from autoplan.search.reduction import reduce
from autoplan.search.solver import SolverOptions, solve
from searchspace.errors import InfeasibleError, SearchError


def random_problem(seed: int, resources: int = 1, tightness: float | None = 0.5) -> Problem:
    """A connected-ish graph with parallel edges, ties, forbidden entries and (optionally) a tight limit."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 7))
    sizes = rng.integers(1, 4, size=count)
    whole = bool(rng.integers(2))

    def draw(*shape: int) -> np.ndarray:
        return rng.integers(0, 6, size=shape).astype(float) if whole else rng.random(shape)

    nodes = tuple(Node(f"n{i}", draw(k), draw(k, resources)) for i, k in enumerate(sizes))
    edges = []
    for _ in range(int(rng.integers(0, 2 * count)) if count > 1 else 0):
        a, b = rng.choice(count, size=2, replace=False)
        table = draw(sizes[a], sizes[b])
        table[rng.random(table.shape) < 0.15] = np.inf
        uses = draw(sizes[a], sizes[b], resources) if rng.random() < 0.4 else None
        edges.append(Edge(int(a), int(b), table, uses))
    uses = [n.usages for n in nodes] + [e.usages.reshape(-1, resources) for e in edges if e.usages is not None]
    low, high = sum(u.min(axis=0) for u in uses), sum(u.max(axis=0) for u in uses)
    limits = np.full(resources, np.inf) if tightness is None else low + (high - low) * tightness * rng.random(resources)
    return Problem(nodes, tuple(edges), limits)


def brute_force(problem: Problem) -> float:
    costs = [
        result.cost
        for choice in itertools.product(*(range(len(n.costs)) for n in problem.nodes))
        if (result := evaluate(problem, choice)).feasible
    ]
    return min(costs, default=np.inf)


def check(problem: Problem, options: SolverOptions) -> None:
    best = brute_force(problem)
    if not np.isfinite(best):
        with pytest.raises(InfeasibleError):
            solve(problem, options)
        return
    solution = solve(problem, options)
    referee = evaluate(problem, solution.assignment)
    assert referee.feasible
    assert referee.cost == solution.cost == pytest.approx(best, rel=1e-9, abs=1e-9)
    assert solution.bound <= best + 1e-9 * max(1, abs(best))
    assert solution.status == "optimal"


@pytest.mark.parametrize("batch", range(10))
def test_equals_brute_force_without_limits(batch):
    for seed in range(30 * batch, 30 * batch + 30):
        check(random_problem(seed, tightness=None), SolverOptions())


@pytest.mark.parametrize("resources", [1, 2])
@pytest.mark.parametrize("batch", range(5))
def test_equals_brute_force_with_limits(batch, resources):
    for seed in range(30 * batch, 30 * batch + 30):
        check(random_problem(1000 * resources + seed, resources), SolverOptions())


def test_equals_brute_force_when_tables_are_too_wide():
    for seed in range(40):
        check(random_problem(5000 + seed), SolverOptions(max_entries=0))


def test_lagrangian_alone_gives_a_feasible_answer_and_a_bound():
    gaps = []
    for seed in range(60):
        problem = random_problem(9000 + seed)
        best = brute_force(problem)
        if not np.isfinite(best):
            continue
        try:
            solution = solve(problem, SolverOptions(work_limit=0))
        except SearchError:
            continue
        assert evaluate(problem, solution.assignment).feasible
        assert solution.bound <= best + 1e-9 <= solution.cost + 2e-9
        gaps.append(solution.cost - solution.bound)
    assert len(gaps) > 20 and max(gaps) > 0  # the limit did bind somewhere


def test_objective_is_monotone_in_the_limit_and_under_pins():
    for seed in range(30):
        problem = random_problem(seed, tightness=0.4)
        looser = Problem(problem.nodes, problem.edges, problem.limits * 1.5 + 0.5)
        costs = [brute_force(problem), brute_force(looser)]
        assert costs[1] <= costs[0]
        if not np.isfinite(costs[0]):
            continue
        assert solve(looser).cost <= solve(problem).cost + 1e-9
        first = problem.nodes[0]
        for s in range(len(first.costs)):
            pinned = np.where(np.arange(len(first.costs)) == s, first.costs, np.inf)
            nodes = (Node(first.name, pinned, first.usages), *problem.nodes[1:])
            with contextlib.suppress(InfeasibleError):
                assert solve(Problem(nodes, problem.edges, problem.limits)).cost >= solve(problem).cost - 1e-9


def test_same_seed_same_assignment():
    for seed in range(20):
        problem = random_problem(seed)
        if np.isfinite(brute_force(problem)):
            assert solve(problem).assignment == solve(problem).assignment


def test_long_chain_with_skips_is_solved_by_elimination():
    rng = np.random.default_rng(0)
    count, k = 400, 12
    nodes = tuple(Node(f"n{i}", rng.random(k), rng.random((k, 1))) for i in range(count))
    edges = tuple(Edge(i, i + d, rng.random((k, k))) for d in (1, 2) for i in range(count - d))
    order = elimination_order((k,) * count, tuple((e.source, e.target) for e in edges))
    assert order.widest == k**3
    free = solve(Problem(nodes, edges, np.array([np.inf])))
    assert free.cost == pytest.approx(free.bound)
    limit = 0.8 * float(free.evaluation.usage[0])
    tight = solve(Problem(nodes, edges, np.array([limit])), SolverOptions(work_limit=0))
    assert tight.evaluation.usage[0] <= limit * (1 + 1e-9)
    assert free.cost < tight.cost
    assert (tight.cost - tight.bound) / tight.cost < 0.01


def test_reduction_keeps_the_optimum_and_drops_equal_strategies_once():
    for seed in range(60):
        problem = random_problem(seed)
        best = brute_force(problem)
        if not np.isfinite(best):
            continue
        reduction = reduce(problem)
        assert brute_force(reduction.problem) == pytest.approx(best)
        assert sum(len(n.costs) for n in reduction.problem.nodes) <= sum(len(n.costs) for n in problem.nodes)
    twin = Problem((Node("a", np.ones(3), np.ones((3, 1))),), (), np.array([1.0]))
    assert [len(k) for k in reduce(twin).kept] == [1]


def test_elimination_of_a_triangle():
    a_b, b_c, a_c = np.array([[0.0, 5], [5, 0]]), np.array([[0.0, 5], [5, 0]]), np.array([[9.0, 0], [0, 9]])
    order = elimination_order((2, 2, 2), ((0, 1), (1, 2), (0, 2)))
    value, assignment = minimise(order, [np.zeros(2)] * 3, [(0, 1, a_b), (1, 2, b_c), (0, 2, a_c)])
    assert value == 5.0 and assignment[0] != assignment[2]


def test_messages():
    node = Node("a", np.array([1.0, 2.0]), np.array([[4.0], [3.0]]))
    with pytest.raises(InfeasibleError, match="at least 3 times, its limit is 2"):
        solve(Problem((node,), (), np.array([2.0])))
    with pytest.raises(SearchError, match="itself"):
        Problem((node,), (Edge(0, 0, np.zeros((2, 2))),), np.array([2.0]))
    with pytest.raises(SearchError, match=r"expected costs of shape \(2, 2\)"):
        Problem((node, node), (Edge(0, 1, np.zeros((2, 3))),), np.array([2.0]))
    with pytest.raises(SearchError, match="at least one strategy"):
        Node("empty", np.zeros(0), np.zeros((0, 1)))
    with pytest.raises(SearchError, match="expected 1 strategies, got 2"):
        evaluate(Problem((node,), (), np.array([2.0])), (0, 0))
