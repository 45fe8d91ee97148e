"""Wiring: nodes and links of a strategy selection, made from a folded graph on one mesh.

Nodes are groups of operators (see ``folding.py``), of tensors with several readers, and of
parameters; links are adapters.  A tensor with several readers is a node of its own, whose strategies
are the pairs (forward layout, gradient layout) that a reader may want: readers that agree share
one adapter and its gradient's, as they do in a resolved plan.  Parameters are nodes whose strategies
are stored, gradient and optimizer layouts (ZeRO); tied parameters have several readers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from autoplan.search.conversions import Conversions
from autoplan.search.figures import Figures, Pair, ParameterLayouts, Pricing, Readers
from autoplan.search.folding import Folding, Group
from autoplan.search.lineage import batch_labels
from autoplan.search.problem import Costs
from autoplan.search.strategies import Allow, Strategy, everything, input_layouts, output_layouts, strategies
from costmodel.shards import largest_shard
from searchspace.graph import DTYPE_BYTES, Graph, Operator, Tensor
from searchspace.layout import Layout, P, Partial, R, Shape, Split, delivered_gradient, demanded_gradient
from searchspace.mesh import Mesh
from searchspace.microbatch import TimeAxis
from searchspace.resolve import layout_problem

Kind = int
"""Kind of a block; -1: outside of blocks."""


@dataclass(frozen=True, eq=False)
class NodeTable:
    """Strategies of one node and their figures, arrays of shape (K,).

    ``members`` counts the node's members by the kind of block in which they count; ``present`` counts a
    member for each block that reads it (a tied parameter lies on several stages).  ``carried`` are bytes
    of what its block reads from other blocks, which recomputation starts from.
    """

    role: Literal["operator", "tensor", "parameter"]
    key: object
    strategies: tuple[object, ...]
    forward: Costs
    backward: Costs
    step: Costs
    resident: Costs
    saved: Costs
    working: Costs
    carried: Costs
    members: Counter[Kind]
    present: Counter[Kind]


@dataclass(frozen=True, eq=False)
class LinkTable:
    """Adapters between two nodes, arrays of shape (K, K'): seconds, bytes that they keep until backward,
    and bytes of gathered parameters that are there only while they are used.

    ``occurrences`` counts them by the kind of the reading block, ``crossing`` are the kinds of the blocks
    (making, reading) where it leads from one block to another.
    """

    source: int
    target: int
    forward: Costs
    backward: Costs
    kept: Costs
    gathered: Costs
    occurrences: Counter[Kind]
    crossing: frozenset[tuple[Kind, Kind]] = frozenset()


@dataclass(eq=False)
class Wiring:
    """Nodes and links of ``graph`` on ``mesh``.

    ``zero`` are the ZeRO levels that parameters may choose from, over ``shard_axes``;
    ``master_bytes`` is the size of an element of a parameter's gradient and master copy.
    """

    graph: Graph
    folding: Folding
    mesh: Mesh
    time: TimeAxis
    pricing: Pricing
    conversions: Conversions
    gradients: frozenset[str]
    allow: Allow = everything
    zero: tuple[int, ...] = (0,)
    shard_axes: tuple[str, ...] = ("dp",)
    master_bytes: Mapping[str, int] = field(default_factory=dict)
    batch: Mapping[str, str] | None = None
    """The choice of each operator along the batch (see ``lineage.py``)."""

    def __post_init__(self) -> None:
        self.nodes: list[NodeTable] = []
        self.links: list[LinkTable] = []
        self._operator_node: dict[Group, int] = {}
        self._representative: dict[Group, Operator] = {}
        self._carrying: set[tuple[Group, int]] = set()
        self._reads: dict[tuple[Group, int, bool], list[Pair]] = {}
        self._adapters: dict[object, tuple[Costs, Costs]] = {}
        self._kept_ways: dict[object, tuple[list[ParameterLayouts], list[Figures]]] = {}
        self._uses: dict[object, tuple[Costs, Costs, Costs]] = {}
        self._batch = batch_labels(self.graph) if self.batch is None else self.batch
        self._none: Layout = (R,) * len(self.mesh.axes)
        self._block_of = {name: i for i, b in enumerate(self.folding.blocks) for name in b.operators}
        self._add_operators()
        self._connect()

    def _kind(self, op: Operator) -> Kind:
        return self.folding.groups[op.name][0]

    # -- operators -------------------------------------------------------------------------------

    def _add(
        self, role: Literal["operator", "tensor", "parameter"], key: object, options: Sequence[object],
        figures: Sequence[Figures], members: Counter[Kind], present: Counter[Kind] | None = None,
    ) -> int:  # fmt: skip
        def column(name: str) -> Costs:
            return np.array([getattr(f, name) for f in figures], dtype=float)

        self.nodes.append(
            NodeTable(
                role, key, tuple(options), column("forward"), column("backward"), column("step"),
                column("resident"), column("saved"), column("working"), np.zeros(len(figures)),
                members, present or members,
            )
        )  # fmt: skip
        return len(self.nodes) - 1

    def _add_operators(self) -> None:
        count: Counter[Group] = Counter()
        for op in self.graph.operators:
            group = self.folding.groups[op.name]
            self._representative.setdefault(group, op)
            count[group] += 1
        for group, op in self._representative.items():
            options = strategies(self.graph, op, self.mesh, self.time, self.allow)
            if group[0] < 0:
                options = self._simple(op, options)
            figures = [self.pricing.operator(op, s, self.mesh, self.time) for s in options]
            members = Counter({group[0]: count[group]})
            self._operator_node[group] = self._add("operator", group, options, figures, members)

    def _simple(self, op: Operator, options: Sequence[Strategy]) -> tuple[Strategy, ...]:
        """Of an operator that any stage may repeat: replication, and splits along the batch."""
        label = self._batch[op.name]
        found = tuple(s for s in options if all(choice.label in ("", label) for choice in s))
        return found or tuple(options)

    # -- activations -----------------------------------------------------------------------------

    def _connect(self) -> None:
        """One pass over all tensors: who makes them, who reads them, and where."""
        activations: dict[tuple[Group, int], dict[tuple[Group, int], Counter[tuple[int, int]]]] = {}
        examples: dict[tuple[Group, int], str] = {}
        parameters: dict[Readers, list[str]] = {}
        groups, block_of = self.folding.groups, self._block_of
        for tensor in self.graph.tensors:
            readers = self.graph.consumers[tensor.name]
            if tensor.kind == "parameter" and readers:
                key = tuple(sorted({(groups[op.name], i) for op, i in readers}))
                parameters.setdefault(key, []).append(tensor.name)
            elif tensor.kind == "activation":
                maker = self.graph.producer[tensor.name]
                source = (groups[maker.name], maker.outputs.index(tensor.name))
                examples.setdefault(source, tensor.name)
                found = activations.setdefault(source, {})
                for op, i in readers:
                    where = (block_of.get(maker.name, -1), block_of.get(op.name, -1))
                    found.setdefault((groups[op.name], i), Counter())[where] += 1
        for source, found in activations.items():
            self._link_activation(self.graph.tensor[examples[source]], source, found)
        for readers_key, names in parameters.items():
            self._link_parameter(readers_key, names)

    def _read_pairs(self, reader: tuple[Group, int], tensor: Tensor) -> list[Pair]:
        """What each strategy of the reader wants of its input."""
        group, i = reader
        op = self._representative[group]
        wants = tensor.name in self.gradients and any(name in self.gradients for name in op.outputs)
        key = (group, i, wants)
        if key not in self._reads:
            chosen = self.nodes[self._operator_node[group]].strategies
            self._reads[key] = [_read_pair(strategy, i, wants) for strategy in chosen]  # type: ignore[arg-type]
        return self._reads[key]

    def _link_activation(
        self, tensor: Tensor, source: tuple[Group, int], found: Mapping[tuple[Group, int], Counter[tuple[int, int]]]
    ) -> None:
        origin = self._operator_node[source[0]]
        made = self.nodes[origin]
        wants = tensor.name in self.gradients
        produced: list[Pair] = []
        for strategy in made.strategies:
            layout = output_layouts(strategy)[source[1]]  # type: ignore[arg-type]
            produced.append((layout, demanded_gradient(layout) if wants else None))
        shape = largest_shard(tensor.shape, (), (), self.time.placement[tensor.name], self.time.micro_batches)
        pairs = {reader: self._read_pairs(reader, tensor) for reader in found}
        if len(found) > 1 and source[0][0] >= 0:  # what any stage may repeat is cheap: its readers need not agree
            options = tuple(dict.fromkeys((*produced, *(p for wanted in pairs.values() for p in wanted))))
            shared = self._add("tensor", source, options, [Figures()] * len(options), Counter())
            self._link(origin, shared, tensor, shape, produced, options, made.members)
            origin, produced = shared, list(options)
        for reader, where in found.items():
            kinds = Counter({reader[0][0]: sum(where.values())})
            crossing = frozenset({(source[0][0], reader[0][0])} if any(a != b for a, b in where) else ())
            self._link(origin, self._operator_node[reader[0]], tensor, shape, produced, pairs[reader], kinds, crossing)
        self._carry(tensor, found, pairs)

    def _carry(
        self, tensor: Tensor, found: Mapping[tuple[Group, int], Counter[tuple[int, int]]],
        pairs: Mapping[tuple[Group, int], Sequence[Pair]],
    ) -> None:  # fmt: skip
        """Of the readers in other blocks than the maker's, the first in each kind of block carries the tensor."""
        first: dict[Kind, tuple[Group, int]] = {}
        for reader, where in found.items():
            if reader[0][0] >= 0 and any(a != b for a, b in where):
                first[reader[0][0]] = min(first.get(reader[0][0], reader), reader, key=lambda r: r[0][1])
        for group, i in first.values():
            if (group, i) not in self._carrying:
                self._carrying.add((group, i))
                self.nodes[self._operator_node[group]].carried[:] += self._sizes(tensor, pairs[group, i])

    def _sizes(self, tensor: Tensor, pairs: Sequence[Pair]) -> Costs:
        known = {f: self.pricing.shard_bytes(tensor, f, self.mesh, self.time) for f, _ in pairs}
        return np.array([known[f] for f, _ in pairs])

    def _link(
        self, a: int, b: int, tensor: Tensor, shape: Shape, have: Sequence[Pair], want: Sequence[Pair],
        kinds: Counter[Kind], crossing: frozenset[tuple[Kind, Kind]] = frozenset(),
    ) -> None:  # fmt: skip
        """What an adapter reads and what it makes is kept until backward."""
        forward, backward = self._adapter(tensor, shape, have, want)
        if not forward.any() and not backward.any():
            return
        kept = np.zeros_like(forward)
        if any(g is not None for _, g in want):
            kept = kept + self._sizes(tensor, want)[None, :]
            if self.nodes[a].role == "operator" and not self.pricing.saved_by_maker(tensor):
                kept = kept + self._sizes(tensor, have)[:, None]
            kept = np.where(forward > 0, kept, 0.0)
        self.links.append(LinkTable(a, b, forward, backward, kept, np.zeros_like(forward), kinds, crossing))

    def _adapter(self, tensor: Tensor, shape: Shape, have: Sequence[Pair], want: Sequence[Pair]) -> tuple[Costs, Costs]:
        """Seconds of adapters from each pair of ``have`` to each of ``want``, forward and backward."""
        size = DTYPE_BYTES[tensor.dtype]
        key = (shape, size, tuple(have), tuple(want))
        if key not in self._adapters:
            self._adapters[key] = self._priced_adapter(shape, size, have, want)
        return self._adapters[key]

    def _priced_adapter(
        self, shape: Shape, size: int, have: Sequence[Pair], want: Sequence[Pair]
    ) -> tuple[Costs, Costs]:
        forward = self.conversions.table(shape, size, [f for f, _ in have], [f for f, _ in want])
        if all(g is None for _, g in want) or all(g is None for _, g in have):
            return forward, np.zeros_like(forward)
        given, demanded = [g or self._none for _, g in want], [g or self._none for _, g in have]
        backward = self.conversions.table(shape, size, given, demanded).T.copy()
        backward[[g is None for _, g in have], :] = 0.0
        backward[:, [g is None for _, g in want]] = 0.0
        return forward, backward

    # -- parameters ------------------------------------------------------------------------------

    def _link_parameter(self, readers: Readers, names: Sequence[str]) -> None:
        tensor = self.graph.tensor[names[0]]
        pairs = {reader: self._read_pairs(reader, tensor) for reader in readers}
        wanted = tuple(dict.fromkeys(p for some in pairs.values() for p in some))
        alike = (tensor.shape, tensor.dtype, self._master(tensor), wanted)
        if alike not in self._kept_ways:
            self._kept_ways[alike] = self._ways_to_keep(tensor, wanted)
        options, figures = self._kept_ways[alike]
        members: Counter[Kind] = Counter()
        present: Counter[Kind] = Counter()
        uses: Counter[tuple[Group, int]] = Counter()
        for name in names:
            blocks = {self._block_of.get(op.name, -1): self._kind(op) for op, _ in self.graph.consumers[name]}
            members[blocks[min(blocks)]] += 1
            present.update(blocks.values())
            uses.update((self.folding.groups[op.name], i) for op, i in self.graph.consumers[name])
        node = self._add("parameter", readers, options, figures, members, present)
        for reader in readers:
            use = (alike, tuple(pairs[reader]))
            if use not in self._uses:
                self._uses[use] = self._use(tensor, options, pairs[reader])
            gather, backward, gathered = self._uses[use]
            where = Counter({reader[0][0]: uses[reader]})
            target = self._operator_node[reader[0]]
            self.links.append(LinkTable(node, target, gather, backward, np.zeros_like(gather), gathered, where))

    def _master(self, tensor: Tensor) -> int:
        return self.master_bytes.get(tensor.name, DTYPE_BYTES[tensor.dtype])

    def _ways_to_keep(self, tensor: Tensor, wanted: Sequence[Pair]) -> tuple[list[ParameterLayouts], list[Figures]]:
        options = list(dict.fromkeys(o for used in wanted for o in self._parameter_layouts(tensor, used)))
        figures = []
        for option, seconds in zip(options, self._synchronisation(tensor, options), strict=True):
            own = self.pricing.parameter(tensor, option, self.mesh)
            figures.append(Figures(own.forward, own.backward, own.step + seconds, own.resident, own.saved))
        return options, figures

    def _synchronisation(self, tensor: Tensor, options: Sequence[ParameterLayouts]) -> Costs:
        """Seconds per step from accumulated gradients to the optimizer's shards, and back to stored weights."""
        gradients = [o.gradient or o.optimizer for o in options]
        shards, stored = [o.optimizer for o in options], [o.stored for o in options]
        master = self._master(tensor)
        reduce = np.diagonal(self.conversions.table(tensor.shape, master, gradients, shards))
        refresh = np.diagonal(self.conversions.table(tensor.shape, DTYPE_BYTES[tensor.dtype], shards, stored))
        trained = np.array([o.gradient is not None for o in options])
        return np.where(trained, reduce + refresh, 0.0)

    def _use(
        self, tensor: Tensor, options: Sequence[ParameterLayouts], pairs: Sequence[Pair]
    ) -> tuple[Costs, Costs, Costs]:
        """Gathering for each use, forward and backward; gradients converted to how they accumulate, and added."""
        size = DTYPE_BYTES[tensor.dtype]
        master = self._master(tensor)
        gather = self.conversions.table(tensor.shape, size, [o.stored for o in options], [f for f, _ in pairs])
        backward = np.zeros_like(gather)
        if tensor.name in self.gradients:
            held = [o.gradient or self._none for o in options]
            delivered = [g or self._none for _, g in pairs]
            added = {layout: self.pricing.accumulate(tensor, layout, self.mesh) for layout in held}
            backward = gather + self.conversions.table(tensor.shape, master, delivered, held).T
            backward = backward + np.array([added[layout] for layout in held])[:, None]
        gathered = np.where(gather > 0, self._sizes(tensor, pairs)[None, :], 0.0)
        return gather, backward, gathered

    def _parameter_layouts(self, tensor: Tensor, used: Pair) -> list[ParameterLayouts]:
        """Ways to keep a parameter that is used as ``used``: one for each ZeRO level that shards something."""
        forward, gradient = used
        stored = tuple(R if isinstance(p, Partial) else p for p in forward)
        found = [ParameterLayouts(used, stored, gradient, stored)] if 0 in self.zero else []
        cut = self._sharded(tensor, stored)
        if cut is not None and gradient is None and 3 in self.zero:
            found.append(ParameterLayouts(used, cut, None, cut))
        if cut is not None and gradient is not None:
            reduced = tuple(c if g == P and isinstance(c, Split) else g for g, c in zip(gradient, cut, strict=True))
            for level in self.zero:
                if level:
                    kept = reduced if level >= 2 else gradient
                    found.append(ParameterLayouts(used, cut if level == 3 else stored, kept, cut))
        return found or [ParameterLayouts(used, stored, gradient, stored)]

    def _sharded(self, tensor: Tensor, stored: Layout) -> Layout | None:
        """``stored`` with its replicated shard axes split along one dimension, rather one that no axis splits."""
        axes = self.mesh.axes
        free = [i for i, (name, size) in enumerate(axes) if name in self.shard_axes and size > 1 and stored[i] == R]
        taken = {p.dim for p in stored if isinstance(p, Split)}
        for dim in sorted(range(len(tensor.shape)), key=lambda d: (d in taken, d)) if free else ():
            layout = tuple(Split(dim) if i in free else p for i, p in enumerate(stored))
            if layout_problem(tensor.shape, layout, self.mesh) is None:
                return layout
        return None


def _read_pair(strategy: Strategy, index: int, wants: bool) -> Pair:
    gradient = tuple(delivered_gradient(c.inputs, c.outputs)[index] for c in strategy) if wants else None
    return input_layouts(strategy)[index], gradient


def with_gradient(graph: Graph) -> frozenset[str]:
    """Tensors whose gradient with respect to the loss is computed."""
    found = {graph.loss} if graph.loss and graph.tensor[graph.loss].requires_grad else set()
    for op in reversed(graph.operators):
        if any(name in found for name in op.outputs):
            found.update(name for name in op.inputs if graph.tensor[name].requires_grad)
    return frozenset(name for name in found if name)
