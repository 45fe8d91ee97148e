"""The strategy selection problem: one strategy per node, minimal cost, bounded use of resources.

Node ``i`` has ``K_i`` strategies, each with a cost and with its use of ``M`` resources; an edge has
a cost (and may have a use) for each pair of strategies of its two nodes.  ``inf`` forbids.  The evaluator
(``evaluator.py``) is the referee; the solver (``solver.py``) never overrules it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from searchspace.errors import SearchError

Costs = NDArray[np.float64]
Assignment = tuple[int, ...]
"""One strategy index per node."""


@dataclass(frozen=True, eq=False)
class Node:
    """``costs`` has shape (K,), ``usages`` shape (K, M)."""

    name: str
    costs: Costs
    usages: Costs

    def __post_init__(self) -> None:
        if self.costs.ndim != 1 or not len(self.costs):
            raise SearchError(
                f"node {self.name!r}: expected at least one strategy, got costs of shape {self.costs.shape}"
            )
        if self.usages.ndim != 2 or len(self.usages) != len(self.costs):
            raise SearchError(
                f"node {self.name!r}: expected usages of shape ({len(self.costs)}, M), got {self.usages.shape}"
            )
        if np.isnan(self.costs).any() or not np.isfinite(self.usages).all():
            raise SearchError(f"node {self.name!r}: costs must not be NaN and usages must be finite")


@dataclass(frozen=True, eq=False)
class Edge:
    """``costs[a, b]``: cost when node ``source`` takes strategy a and node ``target`` strategy b.

    ``usages``, where given, has shape (K_source, K_target, M).
    """

    source: int
    target: int
    costs: Costs
    usages: Costs | None = None


@dataclass(frozen=True, eq=False)
class Problem:
    """Nodes, edges (parallel edges add up) and the limit of each resource (``inf``: none)."""

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    limits: Costs

    def __post_init__(self) -> None:
        for node in self.nodes:
            if node.usages.shape[1] != len(self.limits):
                raise SearchError(
                    f"node {node.name!r} uses {node.usages.shape[1]} resources, "
                    f"the problem has {len(self.limits)} limits"
                )
        for edge in self.edges:
            if edge.source == edge.target:
                raise SearchError(f"edge from node {edge.source} to itself: add its diagonal to the node's costs")
            expected = (len(self.nodes[edge.source].costs), len(self.nodes[edge.target].costs))
            if edge.costs.shape != expected:
                raise SearchError(
                    f"edge {self.nodes[edge.source].name!r} -> {self.nodes[edge.target].name!r}: "
                    f"expected costs of shape {expected}, got {edge.costs.shape}"
                )
            if edge.usages is not None and edge.usages.shape != (*expected, len(self.limits)):
                raise SearchError(
                    f"edge {self.nodes[edge.source].name!r} -> {self.nodes[edge.target].name!r}: "
                    f"expected usages of shape {(*expected, len(self.limits))}, got {edge.usages.shape}"
                )
            if np.isnan(edge.costs).any():
                raise SearchError(
                    f"edge {self.nodes[edge.source].name!r} -> {self.nodes[edge.target].name!r}: cost is NaN"
                )
