"""Exact reductions of a strategy selection problem, and the way back.

Forbidden and dominated strategies are dropped and parallel edges are summed.  Whatever is dropped
could be replaced, in every solution, by something kept that costs no more and uses no more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoplan.search.problem import Assignment, Costs, Edge, Node, Problem
from searchspace.errors import InfeasibleError

Kept = NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class Reduction:
    """``problem`` is what is left; ``kept[i]`` are the original strategies of node i."""

    problem: Problem
    kept: tuple[Kept, ...]

    def restore(self, assignment: Assignment) -> Assignment:
        """The assignment of the original problem."""
        return tuple(int(kept[s]) for kept, s in zip(self.kept, assignment, strict=True))


def sum_parallel(edges: Sequence[Edge]) -> dict[tuple[int, int], Costs]:
    """Edge tables by (lower node, higher node), parallel edges added, in order of appearance."""
    tables: dict[tuple[int, int], Costs] = {}
    for edge in edges:
        pair, table = (edge.source, edge.target), edge.costs
        if edge.source > edge.target:
            pair, table = (edge.target, edge.source), edge.costs.T
        tables[pair] = tables[pair] + table if pair in tables else table
    return tables


def reduce(problem: Problem, dominance: bool = True) -> Reduction:
    """Drop forbidden (arc consistency) and dominated strategies until nothing changes.

    Raises InfeasibleError when some node keeps no strategy.
    """
    tables = sum_parallel(problem.edges)
    near: list[list[tuple[int, tuple[int, int]]]] = [[] for _ in problem.nodes]
    for pair in tables:
        near[pair[0]].append((pair[1], pair))
        near[pair[1]].append((pair[0], pair))
    kept: list[Kept] = [np.flatnonzero(np.isfinite(node.costs)) for node in problem.nodes]

    def rows(v: int, other: int, pair: tuple[int, int]) -> Costs:
        table = tables[pair] if pair[0] == v else tables[pair].T
        return table[np.ix_(kept[v], kept[other])]

    pending = list(range(len(problem.nodes)))
    while pending:
        again: dict[int, None] = {}
        for v in pending:
            around = [rows(v, other, pair) for other, pair in near[v]]
            alive = np.ones(len(kept[v]), dtype=bool)
            for table in around:
                alive &= np.isfinite(table).any(axis=1)
            if dominance:
                node = problem.nodes[v]
                alive[alive] = _undominated(
                    node.costs[kept[v]][alive], node.usages[kept[v]][alive], [table[alive] for table in around]
                )
            if not alive.any():
                raise InfeasibleError(
                    f"node {problem.nodes[v].name!r} has no strategy that is allowed beside its neighbours'"
                )
            if not alive.all():
                kept[v] = kept[v][alive]
                again.update((other, None) for other, _ in near[v])
        pending = list(again)
    nodes = tuple(
        Node(node.name, node.costs[keep], node.usages[keep]) for node, keep in zip(problem.nodes, kept, strict=True)
    )
    edges = tuple(Edge(a, b, table[np.ix_(kept[a], kept[b])]) for (a, b), table in tables.items())
    return Reduction(Problem(nodes, edges, problem.limits), tuple(kept))


def _undominated(costs: Costs, usages: Costs, around: Sequence[Costs]) -> NDArray[np.bool_]:
    """Which strategies no other one beats: in cost with the worst case of every edge, and in each usage."""
    size = len(costs)
    worst = costs[:, None] - costs[None, :]
    for table in around:
        with np.errstate(invalid="ignore"):
            difference = table[:, None, :] - table[None, :, :]
        difference[np.isnan(difference)] = -np.inf  # both forbidden
        worst = worst + difference.max(axis=2)
    beats = (worst <= 0) & (usages[:, None, :] <= usages[None, :, :]).all(axis=2)
    alive = np.ones(size, dtype=bool)
    for loser in range(size):  # one at a time, so that two equal strategies do not drop each other
        rivals = beats[:, loser] & alive
        rivals[loser] = False
        alive[loser] = not rivals.any()
    return alive
