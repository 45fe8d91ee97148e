"""Strategy selection of a folded model on one mesh: from wiring to a problem, and back to a plan's entries.

Costs are seconds per micro-batch on the busiest device, forward and backward; what happens once per
step counts for its share.  Usages are bytes: parameters with their states, activations saved per
micro-batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from autoplan.search.figures import KindFigures, ParameterLayouts, Readers, Terms
from autoplan.search.folding import Group
from autoplan.search.problem import Assignment, Costs, Edge, Node, Problem
from autoplan.search.strategies import Strategy
from autoplan.search.wiring import Kind, NodeTable, Wiring


class Selection:
    """The selection problems of one wiring, one for each :class:`Terms`."""

    def __init__(self, wiring: Wiring) -> None:
        self.wiring = wiring
        self.kinds = len(wiring.folding.counts)
        self._counts = np.array([wiring.folding.counts[k] for k in range(self.kinds)], dtype=float)
        self._members = self._matrix([node.members for node in wiring.nodes])
        self._present = self._matrix([node.present for node in wiring.nodes])
        self._occurrences = self._matrix([link.occurrences for link in wiring.links])

    def _matrix(self, counters: Sequence[Counter[Kind]]) -> Costs:
        """Counts per block of each kind, shape (rows, kinds); what is outside of blocks is shared out."""
        found = np.zeros((len(counters), self.kinds))
        for row, counter in enumerate(counters):
            for kind, count in counter.items():
                if kind >= 0:
                    found[row, kind] += count / self._counts[kind]
                else:
                    found[row] += count / self._counts.sum()
        return found

    # -- problems --------------------------------------------------------------------------------

    def problem(self, terms: Terms, limit: float = np.inf, blocks: Costs | None = None) -> Problem:
        """The problem of a stage with ``blocks`` of each kind (default: of the whole model).

        Its one resource is bytes: resident, and saved by ``terms.in_flight`` micro-batches.
        """
        wiring = self.wiring
        counts = self._counts if blocks is None else blocks
        weights, uses = self._members @ counts, self._occurrences @ counts
        costs = [self._cost(node, terms) * weight for node, weight in zip(wiring.nodes, weights, strict=True)]
        edges = []
        for link, weight in zip(wiring.links, uses, strict=True):
            table = ((1 + terms.recompute) * link.forward + link.backward) * weight
            kept = None
            if not terms.recompute and link.kept.any():
                kept = link.kept[:, :, None] * (weight * terms.in_flight)
                table = table + (terms.price_saved * weight) * link.kept
            if link.source == link.target:
                costs[link.source] = costs[link.source] + np.diagonal(table)
            else:
                edges.append(Edge(link.source, link.target, table, kept))
        nodes = []
        for node, cost, weight in zip(wiring.nodes, costs, weights, strict=True):
            saved = node.carried if terms.recompute else node.saved
            usage = (node.resident + terms.in_flight * saved) * weight
            nodes.append(Node(f"{node.role} {node.key}", cost, usage[:, None]))
        return Problem(tuple(nodes), tuple(edges), np.array([limit]))

    def _cost(self, node: NodeTable, terms: Terms) -> Costs:
        seconds = (1 + terms.recompute) * node.forward + node.backward + node.step / terms.micro_batches
        saved = node.carried if terms.recompute else node.saved
        return seconds + terms.price_resident * node.resident + terms.price_saved * saved

    # -- figures ---------------------------------------------------------------------------------

    def by_kind(self, assignment: Assignment, recompute: bool) -> KindFigures:
        """What an assignment costs per block of each kind (averages over equal blocks).

        An adapter belongs to the block that reads.
        """
        nodes, links = self.wiring.nodes, self.wiring.links

        def of_nodes(name: str) -> Costs:
            return np.array([getattr(node, name)[s] for node, s in zip(nodes, assignment, strict=True)])

        def of_links(name: str) -> Costs:
            return np.array([getattr(link, name)[assignment[link.source], assignment[link.target]] for link in links])

        times = 1 + recompute
        saved, carried, kept = of_nodes("saved"), of_nodes("carried"), of_links("kept")
        seconds = (times * of_nodes("forward") + of_nodes("backward")) @ self._members
        interior = saved @ self._members + kept @ self._occurrences
        return KindFigures(
            seconds=seconds + (times * of_links("forward") + of_links("backward")) @ self._occurrences,
            step=of_nodes("step") @ self._members,
            resident=of_nodes("resident") @ self._present,
            saved=carried @ self._members if recompute else interior,
            interior=interior,
            carried=carried @ self._members,
            gathered=of_links("gathered") @ self._occurrences,
            working=np.max(of_nodes("working")[:, None] * (self._members > 0), axis=0, initial=0.0),
        )

    def meeting(self, first: Assignment, second: Assignment, kinds: tuple[Kind, Kind]) -> float:
        """Seconds that a micro-batch costs more where a block with ``first`` is followed by one with ``second``.

        ``kinds`` are those of the two blocks; :meth:`by_kind` prices what the second reads as if both had
        its assignment.
        """
        extra = 0.0
        for link in self.wiring.links:
            if kinds in link.crossing:
                table = link.forward + link.backward
                reading = second[link.target]
                extra += float(table[first[link.source], reading] - table[second[link.source], reading])
        return extra

    # -- decoding --------------------------------------------------------------------------------

    def labels(self, assignment: Assignment) -> dict[Group, dict[str, str]]:
        """For each group of operators the label by axis, replicated axes left out."""
        axes = self.wiring.mesh.axis_names
        found: dict[Group, dict[str, str]] = {}
        for node, s in zip(self.wiring.nodes, assignment, strict=True):
            if node.role == "operator":
                strategy: Strategy = node.strategies[s]  # type: ignore[assignment]
                entry = {axis: choice.label for axis, choice in zip(axes, strategy, strict=True) if choice.label}
                found[node.key] = entry  # type: ignore[index]
        return found

    def parameters(self, assignment: Assignment) -> dict[Readers, ParameterLayouts]:
        """For each group of parameters (by its readers) the chosen layouts."""
        return {
            node.key: node.strategies[s]  # type: ignore[misc]
            for node, s in zip(self.wiring.nodes, assignment, strict=True)
            if node.role == "parameter"
        }
