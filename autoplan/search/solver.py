"""Strategy selection solved: reductions, elimination, Lagrangian bound, integer program.

1. Drop forbidden and dominated strategies (``reduction.py``).
2. Where tables stay narrow, elimination (``elimination.py``) is exact for any price of memory:
   it solves the problem without limits, and gives the Lagrangian bound with them.  The bound is
   maximised by cutting planes (Kelley); every point on the way is a candidate.
3. If a gap is left, or tables are too wide, CP-SAT solves the integer program: one boolean per
   strategy and per useful pair on an edge (the local polytope), deterministic by work limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from scipy.optimize import linprog

from autoplan.search.elimination import MAX_ENTRIES, Order, elimination_order, minimise
from autoplan.search.evaluator import Evaluation, evaluate, within
from autoplan.search.problem import Assignment, Costs, Edge, Node, Problem
from autoplan.search.reduction import reduce, sum_parallel
from searchspace.errors import InfeasibleError, SearchError

Status = Literal["optimal", "feasible"]


@dataclass(frozen=True)
class SolverOptions:
    """How hard to try."""

    gap: float = 1e-9
    """Relative gap at which a solution counts as optimal."""
    work_limit: float = 20.0
    """CP-SAT's deterministic time; 0 keeps the Lagrangian solution."""
    seed: int = 0
    """Seed of CP-SAT."""
    max_entries: int = MAX_ENTRIES
    """Widest table of elimination; wider problems go to CP-SAT at once."""


@dataclass(frozen=True, eq=False)
class Solution:
    """``bound <= cost`` holds for every feasible assignment's cost in place of ``cost``."""

    assignment: Assignment
    evaluation: Evaluation
    bound: float
    status: Status

    @property
    def cost(self) -> float:
        return self.evaluation.cost


def solve(problem: Problem, options: SolverOptions | None = None) -> Solution:
    """The cheapest assignment within the limits, with a lower bound.

    Raises InfeasibleError when no assignment is allowed (with the least usage that is possible,
    where that is what binds), SearchError when the work limit ends before one is found.
    """
    options = options or SolverOptions()
    if not problem.nodes:
        return Solution((), evaluate(problem, ()), 0.0, "optimal")
    order = _order(problem)
    if order.widest <= options.max_entries:
        free = _Pricing(problem, order).at(np.zeros(len(problem.limits)))
        if free.evaluation.feasible:
            return Solution(free.assignment, free.evaluation, free.value, "optimal")
        if not np.isfinite(free.value):
            raise InfeasibleError("no combination of strategies is allowed")
    reduction = reduce(problem)
    small = _solve_reduced(reduction.problem, options)
    assignment = reduction.restore(small.assignment)
    evaluation = evaluate(problem, assignment)
    if not evaluation.feasible:
        raise SearchError(f"solver and evaluator disagree: usage {evaluation.usage}, limits {problem.limits}")
    return Solution(assignment, evaluation, small.bound, small.status)


def _solve_reduced(problem: Problem, options: SolverOptions) -> Solution:
    best: Solution | None = None
    bound = -np.inf
    order = _order(problem)
    if order.widest <= options.max_entries:
        best, bound = _lagrangian(problem, _Pricing(problem, order), options)
        if best is not None and best.cost - bound <= options.gap * max(abs(best.cost), 1e-300):
            return Solution(best.assignment, best.evaluation, bound, "optimal")
    if options.work_limit > 0:
        best = _integer_program(problem, options, best, bound)
    if best is None:
        raise SearchError(f"no assignment found within a work limit of {options.work_limit}")
    return best


def _order(problem: Problem) -> Order:
    return elimination_order(
        tuple(len(n.costs) for n in problem.nodes), tuple((e.source, e.target) for e in problem.edges)
    )


@dataclass(frozen=True, eq=False)
class _Point:
    """A minimiser of cost + prices . usage; ``value`` is that minimum (prices . limits not subtracted)."""

    assignment: Assignment
    evaluation: Evaluation
    value: float


class _Pricing:
    """Elimination with a price on each resource."""

    def __init__(self, problem: Problem, order: Order) -> None:
        self.problem = problem
        self.order = order
        self.edges = sum_parallel(problem.edges)

    def at(self, prices: Costs, only_usage: bool = False) -> _Point:
        def priced(costs: Costs, usages: Costs | None) -> Costs:
            table = np.where(np.isfinite(costs), 0.0, np.inf) if only_usage else costs
            return table if usages is None else table + usages @ prices

        unary = [priced(n.costs, n.usages) for n in self.problem.nodes]
        pairs = [(e.source, e.target, priced(e.costs, e.usages)) for e in self.edges]
        value, assignment = minimise(self.order, unary, pairs)
        return _Point(assignment, evaluate(self.problem, assignment), value)


def _lagrangian(problem: Problem, pricing: _Pricing, options: SolverOptions) -> tuple[Solution | None, float]:
    """Best candidate and largest bound of the Lagrangian dual over the finite limits."""
    limits = problem.limits
    bounded = np.flatnonzero(np.isfinite(limits))
    points = [pricing.at(np.zeros(len(limits)))]
    for resource in bounded:
        unit = np.zeros(len(limits))
        unit[resource] = 1.0
        least = pricing.at(unit, only_usage=True)
        if not within(least.evaluation.usage[[resource]], limits[[resource]]):
            raise InfeasibleError(
                f"resource {resource} is used at least {least.value:.6g} times, its limit is {limits[resource]:.6g}"
            )
        points.append(least)
    scale = np.maximum(np.abs(limits[bounded]), 1e-300)
    largest_price = 1e3 * max(1e-300, *(abs(p.evaluation.cost) for p in points)) / scale
    bound = points[0].value
    for _ in range(60):
        ceiling, prices_bounded = _best_prices(points, limits, bounded, largest_price)
        if ceiling - bound <= 0.1 * options.gap * max(abs(bound), 1e-300):
            break
        prices = np.zeros(len(limits))
        prices[bounded] = prices_bounded
        point = pricing.at(prices)
        value = point.value - float(prices[bounded] @ limits[bounded])
        points.append(point)
        improved = value > bound
        bound = max(bound, value)
        if not improved and ceiling - value <= options.gap * max(abs(value), 1e-300):
            break
    feasible = [p for p in points if p.evaluation.feasible]
    if not feasible:
        return None, bound
    best = min(feasible, key=lambda p: p.evaluation.cost)
    return Solution(best.assignment, best.evaluation, min(bound, best.evaluation.cost), "feasible"), bound


def _best_prices(
    points: Sequence[_Point], limits: Costs, bounded: np.ndarray, largest_price: Costs
) -> tuple[float, Costs]:
    """Maximum over prices of the least Lagrangian among ``points``, by linear programming (scaled)."""
    costs = np.array([p.evaluation.cost for p in points])
    excess = np.array([p.evaluation.usage[bounded] - limits[bounded] for p in points]) * largest_price
    unit = max(float(np.abs(costs).max()), 1e-300)
    result = linprog(
        np.append(np.zeros(len(bounded)), -1.0),
        A_ub=np.column_stack([-excess / unit, np.ones(len(points))]),
        b_ub=costs / unit,
        bounds=[(0.0, 1.0)] * len(bounded) + [(None, None)],
        method="highs",
    )
    if result.status != 0:
        raise SearchError(f"the master problem of the Lagrangian dual failed: {result.message}")
    return -float(result.fun) * unit, result.x[:-1] * largest_price


def _integer_program(problem: Problem, options: SolverOptions, hint: Solution | None, bound: float) -> Solution:
    """The local-polytope integer program in CP-SAT; costs in fixed point, rounded down for the bound."""
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    offset, nodes, edges = _normalised(problem)
    total = sum(float(n.costs[np.isfinite(n.costs)].max()) for n in nodes)
    total += sum(float(e.costs[np.isfinite(e.costs)].max()) for e in edges)
    scale = 2.0 ** np.floor(44 - np.log2(total or 1.0))
    pick = [[model.new_bool_var(f"{n.name}={s}") for s in range(len(n.costs))] for n in nodes]
    terms, weights = [], []
    for node, chosen in zip(nodes, pick, strict=True):
        model.add_exactly_one(chosen)
        terms += chosen
        weights += [int(c) for c in np.floor(node.costs * scale)]
    chosen_pairs = [_add_edge(model, edge, pick, scale, terms, weights) for edge in edges]
    for resource in np.flatnonzero(np.isfinite(problem.limits)):
        limit = float(problem.limits[resource])
        uses = [
            (x, float(u))
            for n, xs in zip(nodes, pick, strict=True)
            for x, u in zip(xs, n.usages[:, resource], strict=True)
        ]
        for edge, pairs in zip(edges, chosen_pairs, strict=True):
            if edge.usages is not None:
                uses += [(y, float(edge.usages[a, b, resource])) for (a, b), y in pairs.items()]
        largest = max((abs(u) for _, u in uses), default=0.0)
        unit = 2.0 ** np.floor(44 - np.log2(abs(limit) or largest or 1.0))
        allowance = int(np.floor(limit * unit)) + len(nodes) + len(edges)  # rounding; the referee has the last word
        model.add(sum(int(np.floor(u * unit)) * x for x, u in uses if u) <= allowance)
    objective = cp_model.LinearExpr.weighted_sum(terms, weights)
    model.minimize(objective)
    if hint is not None:
        for chosen, strategy in zip(pick, hint.assignment, strict=True):
            for s, x in enumerate(chosen):
                model.add_hint(x, s == strategy)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = options.seed
    solver.parameters.max_deterministic_time = options.work_limit
    solver.parameters.linearization_level = 2
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        raise InfeasibleError("no combination of strategies is within the limits")
    bound = max(bound, solver.best_objective_bound / scale + offset)
    best = hint
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        assignment = tuple(next(s for s, x in enumerate(chosen) if solver.value(x)) for chosen in pick)
        evaluation = evaluate(problem, assignment)
        if evaluation.feasible and (best is None or evaluation.cost < best.cost):
            best = Solution(assignment, evaluation, bound, "feasible")
    if best is None:
        raise SearchError(f"no assignment found within a work limit of {options.work_limit}")
    rounding = (len(nodes) + len(edges)) / scale
    optimal = best.cost - bound <= rounding + options.gap * abs(best.cost)
    return Solution(best.assignment, best.evaluation, min(bound, best.cost), "optimal" if optimal else "feasible")


def _normalised(problem: Problem) -> tuple[float, list[Node], list[Edge]]:
    """Costs with the minimum of each table moved into one constant (smaller numbers, same choice)."""
    offset = 0.0
    nodes, edges = [], []
    for node in problem.nodes:
        least = float(node.costs.min())
        offset += least
        nodes.append(Node(node.name, node.costs - least, node.usages))
    for edge in problem.edges:
        least = float(edge.costs.min())
        offset += least
        edges.append(Edge(edge.source, edge.target, edge.costs - least, edge.usages))
    return offset, nodes, edges


def _add_edge(
    model: Any, edge: Edge, pick: Sequence[Sequence[Any]], scale: float, terms: list[Any], weights: list[int]
) -> dict[tuple[int, int], Any]:
    """One boolean per allowed pair; each strategy is the sum of its pairs."""
    pairs = {
        (int(a), int(b)): model.new_bool_var(f"{edge.source}={a},{edge.target}={b}")
        for a, b in zip(*np.nonzero(np.isfinite(edge.costs)), strict=True)
    }
    for a, x in enumerate(pick[edge.source]):
        model.add(sum(y for (i, _), y in pairs.items() if i == a) == x)
    for b, x in enumerate(pick[edge.target]):
        model.add(sum(y for (_, j), y in pairs.items() if j == b) == x)
    for (a, b), y in pairs.items():
        weight = int(np.floor(edge.costs[a, b] * scale))
        if weight:
            terms.append(y)
            weights.append(weight)
    return pairs
