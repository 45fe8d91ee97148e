"""The referee of strategy selection: what an assignment costs and whether it is allowed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autoplan.search.problem import Assignment, Costs, Problem
from searchspace.errors import SearchError

SLACK = 1e-9
"""Relative rounding error that a limit tolerates."""


@dataclass(frozen=True, eq=False)
class Evaluation:
    """``cost`` is ``inf`` when a forbidden entry is used; ``usage`` has one total per resource."""

    cost: float
    usage: Costs
    feasible: bool


def evaluate(problem: Problem, assignment: Assignment) -> Evaluation:
    """Cost and usage of ``assignment``, summed from the problem's own tables."""
    if len(assignment) != len(problem.nodes):
        raise SearchError(f"expected {len(problem.nodes)} strategies, got {len(assignment)}")
    cost = 0.0
    usage = np.zeros(len(problem.limits))
    for node, strategy in zip(problem.nodes, assignment, strict=True):
        cost += float(node.costs[strategy])
        usage = usage + node.usages[strategy]
    for edge in problem.edges:
        pair = assignment[edge.source], assignment[edge.target]
        cost += float(edge.costs[pair])
        if edge.usages is not None:
            usage = usage + edge.usages[pair]
    return Evaluation(cost, usage, bool(np.isfinite(cost)) and within(usage, problem.limits))


def within(usage: Costs, limits: Costs) -> bool:
    """Whether every resource stays within its limit."""
    return bool(np.all(usage <= limits + SLACK * np.abs(limits)))
