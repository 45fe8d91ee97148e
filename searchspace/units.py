"""Alignment of cut units, so that neighbours cut a dimension at the same places.

A linear layer with 40 features may be cut anywhere, the view of those as 5 heads of 8 only between heads: over two
devices one would cut 20 + 20 and the other 24 + 16.  Alignment coarsens the linear layer's identifier to units of 8
features, and so on along every edge.

All identifiers that are connected by edges should have the same *number* of units, since they share dimensions of
equal extent; a common number must divide each of theirs.  An edge is followed where its two sides agree without loss
to the coarser of them (its number divides the other's), or where the greatest common divisor still serves a group
of ``AMPLE`` devices.  Other edges keep different units, and plans pay for a conversion there.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import gcd

from searchspace.graph import Graph, Operator
from searchspace.layout import Shape
from searchspace.notation import format_rule
from searchspace.rule import Identifier, Rule

AMPLE = 8
"""So many units are enough for the devices of one node."""

_Node = tuple[str, Identifier]


def align_units(graph: Graph) -> Graph:
    """``graph`` with rules coarsened so that neighbours agree; linear in the number of edges, deterministic.

    Never leaves an identifier with fewer than two units.
    """
    groups = _Groups()
    for op in graph.operators:
        for identifier in op.rule.identifiers:
            groups.add((op.name, identifier), op.rule.units(identifier, graph.shapes(op)))
    for tensor in graph.tensors:
        ends = [(op, op.rule.inputs[index]) for op, index in graph.consumers[tensor.name]]
        maker = graph.producer.get(tensor.name)
        if maker is not None:
            ends.insert(0, (maker, maker.rule.outputs[maker.outputs.index(tensor.name)]))
        for dim in range(len(tensor.shape)):
            nodes = [(op.name, use.id) for op, uses in ends if (use := uses[dim]) is not None]
            for node in nodes[1:]:
                groups.join(nodes[0], node)
    return replace(graph, operators=tuple(_coarsened(graph, op, groups) for op in graph.operators))


def _coarsened(graph: Graph, op: Operator, groups: _Groups) -> Operator:
    factors = tuple((identifier, groups.factor((op.name, identifier))) for identifier in op.rule.identifiers)
    if all(factor == 1 for _, factor in factors):
        return op
    return replace(op, rule=_with_factors(op.rule, factors, graph.shapes(op)))


@cache
def _with_factors(rule: Rule, factors: tuple[tuple[Identifier, int], ...], shapes: tuple[Shape, ...]) -> Rule:
    """Operators of repeated layers share one rule."""
    for identifier, factor in factors:
        if factor > 1:
            rule = rule.coarsened(identifier, factor)
    return replace(rule, text=format_rule(rule, shapes))


class _Groups:
    """Disjoint sets of identifiers, each with the number of units that all its members take."""

    def __init__(self) -> None:
        self._own: dict[_Node, int] = {}
        self._parent: dict[_Node, _Node] = {}
        self._units: dict[_Node, int] = {}
        self._size: dict[_Node, int] = {}

    def add(self, node: _Node, units: int) -> None:
        self._own[node] = self._units[node] = units
        self._parent[node] = node
        self._size[node] = 1

    def root(self, node: _Node) -> _Node:
        while self._parent[node] != node:
            self._parent[node] = self._parent[self._parent[node]]
            node = self._parent[node]
        return node

    def join(self, a: _Node, b: _Node) -> None:
        """Let both groups take their greatest common number of units, if that is no great loss."""
        a, b = self.root(a), self.root(b)
        if a == b:
            return
        units = gcd(self._units[a], self._units[b])
        if units < 2 or units < min(self._units[a], self._units[b], AMPLE):
            return
        if self._size[a] < self._size[b]:
            a, b = b, a
        self._parent[b] = a
        self._size[a] += self._size[b]
        self._units[a] = units

    def factor(self, node: _Node) -> int:
        return self._own[node] // self._units[self.root(node)]
