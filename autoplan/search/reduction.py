"""Exact reductions of a strategy selection problem, and the way back.

Forbidden and dominated strategies are dropped and parallel edges are summed.  Whatever is dropped
could be replaced, in every solution, by something kept that costs no more and uses no more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from autoplan.search.elimination import elimination_order
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


def sum_parallel(edges: Sequence[Edge]) -> tuple[Edge, ...]:
    """At most one edge for each pair of nodes, from the lower to the higher, in order of appearance."""
    merged: dict[tuple[int, int], Edge] = {}
    for edge in edges:
        if edge.source > edge.target:
            usages = None if edge.usages is None else edge.usages.transpose(1, 0, 2)
            edge = Edge(edge.target, edge.source, edge.costs.T, usages)
        pair = (edge.source, edge.target)
        if pair in merged:
            other = merged[pair]
            usages = edge.usages if other.usages is None else other.usages
            if edge.usages is not None and other.usages is not None:
                usages = edge.usages + other.usages
            edge = Edge(*pair, edge.costs + other.costs, usages)
        merged[pair] = edge
    return tuple(merged.values())


def reduce(problem: Problem, dominance: bool = True) -> Reduction:
    """Drop forbidden (arc consistency) and dominated strategies until nothing changes.

    Raises InfeasibleError when some node keeps no strategy.
    """
    merged = sum_parallel(problem.edges)
    near: list[list[tuple[int, Edge]]] = [[] for _ in problem.nodes]
    for edge in merged:
        near[edge.source].append((edge.target, edge))
        near[edge.target].append((edge.source, edge))
    kept: list[Kept] = [np.flatnonzero(np.isfinite(node.costs)) for node in problem.nodes]

    def rows(v: int, other: int, table: Costs, forward: bool) -> Costs:
        """The table seen from node ``v``: its strategies first, those that are left."""
        seen = table if forward else table.swapaxes(0, 1)
        return seen[np.ix_(kept[v], kept[other])]

    pending = list(range(len(problem.nodes)))
    while pending:
        again: dict[int, None] = {}
        for v in pending:
            around = [rows(v, other, edge.costs, edge.source == v) for other, edge in near[v]]
            alive = np.ones(len(kept[v]), dtype=bool)
            for table in around:
                alive &= np.isfinite(table).any(axis=1)
            if dominance:
                node = problem.nodes[v]
                used = [
                    rows(v, other, edge.usages, edge.source == v)[alive]
                    for other, edge in near[v]
                    if edge.usages is not None
                ]
                alive[alive] = _undominated(
                    node.costs[kept[v]][alive], node.usages[kept[v]][alive], [table[alive] for table in around], used
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
    edges = tuple(
        Edge(
            e.source,
            e.target,
            rows(e.source, e.target, e.costs, True),
            None if e.usages is None else rows(e.source, e.target, e.usages, True),
        )
        for e in merged
    )
    return Reduction(Problem(nodes, edges, problem.limits), tuple(kept))


def narrowed(problem: Problem, max_entries: int) -> Reduction:
    """A restriction whose elimination needs no table above ``max_entries``: a heuristic, not exact.

    Nodes of the widest table lose their worst half of strategies, by own cost and cheapest edges, until
    it is narrow enough.
    """
    merged = sum_parallel(problem.edges)
    kept: list[Kept] = [np.arange(len(node.costs)) for node in problem.nodes]
    score = [node.costs.copy() for node in problem.nodes]
    for edge in merged:
        score[edge.source] = score[edge.source] + edge.costs.min(axis=1)
        score[edge.target] = score[edge.target] + edge.costs.min(axis=0)
    pairs = tuple((e.source, e.target) for e in merged)
    while True:
        order = elimination_order(tuple(map(len, kept)), pairs)
        if order.widest <= max_entries:
            break
        size = {v: len(kept[v]) for v in range(len(kept))}
        _, scope = max(order.steps, key=lambda step: prod(size[v] for v in step[1]))
        largest = max(scope, key=lambda v: size[v])
        best = np.argsort(score[largest][kept[largest]], kind="stable")[: max(1, size[largest] // 2)]
        kept[largest] = kept[largest][np.sort(best)]
    nodes = tuple(Node(n.name, n.costs[k], n.usages[k]) for n, k in zip(problem.nodes, kept, strict=True))
    edges = tuple(
        Edge(
            e.source,
            e.target,
            e.costs[np.ix_(kept[e.source], kept[e.target])],
            None if e.usages is None else e.usages[np.ix_(kept[e.source], kept[e.target])],
        )
        for e in merged
    )
    return Reduction(Problem(nodes, edges, problem.limits), tuple(kept))


def _undominated(costs: Costs, usages: Costs, around: Sequence[Costs], used: Sequence[Costs]) -> NDArray[np.bool_]:
    """Which strategies no other one beats: in cost with the worst case of every edge, and so in each usage.

    ``around`` are the edges' cost tables (K, K'), ``used`` their usages (K, K', M).
    """
    size = len(costs)
    worst = costs[:, None] - costs[None, :]
    for table in around:
        with np.errstate(invalid="ignore"):
            difference = table[:, None, :] - table[None, :, :]
        difference[np.isnan(difference)] = -np.inf  # both forbidden
        worst = worst + difference.max(axis=2)
    more = usages[:, None, :] - usages[None, :, :]
    for table in used:
        more = more + (table[:, None] - table[None, :]).max(axis=2)
    beats = (worst <= 0) & (more <= 0).all(axis=2)
    alive = np.ones(size, dtype=bool)
    for loser in range(size):  # one at a time, so that two equal strategies do not drop each other
        rivals = beats[:, loser] & alive
        rivals[loser] = False
        alive[loser] = not rivals.any()
    return alive
