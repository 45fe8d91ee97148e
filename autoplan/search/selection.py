"""Strategy selection of a folded model on one mesh: from graph to problem, and back to a plan's entries.

Nodes are groups of operators (see ``folding.py``), of tensors with several readers, and of
parameters; edges are adapters.  A tensor with several readers is a node of its own, whose strategies
are the pairs (forward layout, gradient layout) that a reader may want: readers that agree share
one adapter and its gradient's, as they do in a resolved plan.  Parameters are nodes whose strategies
are stored, gradient and optimizer layouts (ZeRO); tied parameters have several readers.

Costs are seconds per micro-batch on the busiest device, forward and backward; what happens once per
step counts for its share.  Usages are bytes: parameters with their states, activations saved per
micro-batch.  Weights say how many members of a group a stage holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from autoplan.search.conversions import Conversions
from autoplan.search.folding import Folding, Group
from autoplan.search.problem import Assignment, Costs, Edge, Node, Problem
from autoplan.search.strategies import (
    Allow,
    Strategy,
    everything,
    input_layouts,
    output_layouts,
    strategies,
)
from costmodel.shards import largest_shard
from searchspace.graph import DTYPE_BYTES, Graph, Operator, Tensor
from searchspace.layout import Layout, P, Partial, R, Shape, Split, delivered_gradient, demanded_gradient
from searchspace.mesh import Mesh
from searchspace.microbatch import TimeAxis
from searchspace.resolve import layout_problem

Pair = tuple[Layout, Layout | None]
"""Forward layout and gradient layout (None: no gradient)."""

Readers = tuple[tuple[Group, int], ...]
"""Who reads a parameter: groups of operators and the index of the input, ascending."""


@dataclass(frozen=True)
class ParameterLayouts:
    """One way to keep a parameter: as operators use it, and between uses."""

    used: Pair
    stored: Layout
    gradient: Layout | None
    optimizer: Layout


@dataclass(frozen=True)
class Figures:
    """What a strategy costs: forward and backward seconds per micro-batch, seconds per step, bytes."""

    forward: float = 0.0
    backward: float = 0.0
    step: float = 0.0
    resident: float = 0.0
    saved: float = 0.0


class Pricing(Protocol):
    """What selection asks about compute and memory; conversions are priced by :class:`Conversions`.

    Equal storages that several operators save must be counted once, at one of them.
    """

    def operator(self, op: Operator, strategy: Strategy, mesh: Mesh, time: TimeAxis) -> Figures:
        """Compute seconds, and bytes that stay saved until backward."""
        ...

    def parameter(self, tensor: Tensor, layouts: ParameterLayouts, mesh: Mesh) -> Figures:
        """Seconds per step of the optimizer (gradients and weights are moved besides), and bytes that stay."""
        ...

    def shard_bytes(self, tensor: Tensor, layout: Layout, mesh: Mesh, time: TimeAxis) -> float:
        """Bytes of an activation on the fullest device in the fullest micro-batch."""
        ...


NodeKey = tuple[str, object]


@dataclass(frozen=True, eq=False)
class _Node:
    """Strategies of one node and their figures, arrays of shape (K,).

    ``carried`` are bytes of what its block reads from other blocks, which recomputation starts from.
    """

    key: NodeKey
    strategies: tuple[object, ...]
    forward: Costs
    backward: Costs
    step: Costs
    resident: Costs
    saved: Costs
    carried: Costs
    members: Counter[tuple[int, ...]]
    """How many members lie in these blocks (by index; -1: outside of blocks)."""

    def weight(self, inside: set[int]) -> int:
        """How many members a stage with the blocks ``inside`` has."""
        return sum(count for blocks, count in self.members.items() if not inside.isdisjoint(blocks))


@dataclass(frozen=True, eq=False)
class _Link:
    """Adapters between two nodes: seconds, bytes they keep, and where they occur (producing, reading block)."""

    source: int
    target: int
    forward: Costs
    backward: Costs
    kept: Costs
    occurrences: Counter[tuple[int, int]]


@dataclass(frozen=True)
class Terms:
    """How figures become one cost.

    ``micro_batches`` share a step; with ``recompute`` a block's forward runs twice and only what it
    reads from other blocks is kept; ``in_flight`` micro-batches are between forward and backward.
    Prices are seconds per byte.
    """

    micro_batches: int = 1
    recompute: bool = False
    in_flight: int = 1
    price_resident: float = 0.0
    price_saved: float = 0.0


@dataclass(frozen=True, eq=False)
class KindFigures:
    """Per block of each kind, arrays of shape (kinds,): seconds per micro-batch and per step, bytes.

    ``saved`` is kept per micro-batch in flight, ``interior`` is what a block keeps without recomputation,
    ``carried`` what it reads from other blocks.
    """

    seconds: Costs
    step: Costs
    resident: Costs
    saved: Costs
    interior: Costs
    carried: Costs


@dataclass(eq=False)
class Selection:
    """The selection problem of ``graph`` on ``mesh``; build once, weigh for any stage.

    ``zero`` are the ZeRO levels that parameters may choose from, over the axes ``shard_axes``.
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
    optimizer_bytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes of one element of a parameter's gradient and master copy, by tensor name; else as the tensor."""

    def __post_init__(self) -> None:
        self.nodes: list[_Node] = []
        self.links: list[_Link] = []
        self._index: dict[NodeKey, int] = {}
        self._carrying: set[tuple[Group, int]] = set()
        self._block_of = {name: i for i, b in enumerate(self.folding.blocks) for name in b.operators}
        self._add_operators()
        self._connect()

    # -- problems --------------------------------------------------------------------------------

    def problem(self, terms: Terms, blocks: Iterable[int] | None = None, limit: float = np.inf) -> Problem:
        """The problem of a stage that holds ``blocks`` (indices; all by default).

        Its one resource is bytes: resident, and saved by ``terms.in_flight`` micro-batches.
        """
        inside = set(range(len(self.folding.blocks)) if blocks is None else blocks) | {-1}
        shown: dict[int, int] = {}
        nodes = []
        extra: dict[int, Costs] = {}
        edges = []
        weights = [node.weight(inside) for node in self.nodes]
        for i, (node, weight) in enumerate(zip(self.nodes, weights, strict=True)):
            if weight:
                shown[i] = len(shown)
                extra[i] = self._cost(node, terms) * weight
        for link in self.links:
            weight = sum(c for (a, b), c in link.occurrences.items() if a in inside and b in inside)
            if not weight:
                continue
            table = ((1 + terms.recompute) * link.forward + link.backward) * weight
            kept = None
            if not terms.recompute and link.kept.any():
                kept = link.kept[:, :, None] * weight * terms.in_flight
                table = table + terms.price_saved * weight * link.kept
            if link.source == link.target:
                extra[link.source] = extra[link.source] + np.diagonal(table)
            else:
                edges.append(Edge(shown[link.source], shown[link.target], table, kept))
        for i in shown:
            node = self.nodes[i]
            usage = (node.resident + terms.in_flight * (node.carried if terms.recompute else node.saved)) * weights[i]
            nodes.append(Node(str(node.key), extra[i], usage[:, None]))
        return Problem(tuple(nodes), tuple(edges), np.array([limit]))

    def shown(self, blocks: Iterable[int] | None = None) -> list[int]:
        """Which nodes :meth:`problem` shows, in its order."""
        inside = set(range(len(self.folding.blocks)) if blocks is None else blocks) | {-1}
        return [i for i, node in enumerate(self.nodes) if node.weight(inside)]

    def _cost(self, node: _Node, terms: Terms) -> Costs:
        seconds = (1 + terms.recompute) * node.forward + node.backward + node.step / terms.micro_batches
        saved = node.carried if terms.recompute else node.saved
        return seconds + terms.price_resident * node.resident + terms.price_saved * saved

    # -- figures ---------------------------------------------------------------------------------

    def by_kind(self, assignment: Assignment, recompute: bool) -> KindFigures:
        """What an assignment of the whole model costs per block of each kind (averages over equal blocks).

        An adapter belongs to the block that reads; what lies outside of blocks is shared out.
        """
        kinds = [block.kind for block in self.folding.blocks]
        counts = np.bincount(kinds)
        columns = {
            name: np.zeros(len(counts)) for name in ("seconds", "step", "resident", "saved", "interior", "carried")
        }
        outside = dict.fromkeys(columns, 0.0)

        def add(name: str, kind: int, value: float) -> None:
            if kind < 0:
                outside[name] += value
            else:
                columns[name][kind] += value / counts[kind]

        for node, s in zip(self.nodes, assignment, strict=True):
            seconds = (1 + recompute) * node.forward[s] + node.backward[s]
            saved = node.carried[s] if recompute else node.saved[s]
            for blocks, count in node.members.items():
                kind = kinds[blocks[0]] if blocks[0] >= 0 else -1
                add("seconds", kind, count * seconds)
                add("step", kind, count * node.step[s])
                add("saved", kind, count * saved)
                add("interior", kind, count * node.saved[s])
                add("carried", kind, count * node.carried[s])
                for block in blocks:
                    add("resident", kinds[block] if block >= 0 else -1, count * node.resident[s])
        for link in self.links:
            at = assignment[link.source], assignment[link.target]
            seconds = (1 + recompute) * link.forward[at] + link.backward[at]
            kept = link.kept[at]
            if seconds or kept:
                for (_, reading), count in link.occurrences.items():
                    kind = kinds[reading] if reading >= 0 else -1
                    add("seconds", kind, count * seconds)
                    add("saved", kind, 0.0 if recompute else count * kept)
                    add("interior", kind, count * kept)
        for name, value in outside.items():
            columns[name] += value / max(len(kinds), 1)
        return KindFigures(**columns)

    # -- decoding --------------------------------------------------------------------------------

    def labels(self, assignment: Assignment, blocks: Iterable[int] | None = None) -> dict[Group, dict[str, str]]:
        """For each group of operators the label by axis, replicated axes left out."""
        found: dict[Group, dict[str, str]] = {}
        for i, s in zip(self.shown(blocks), assignment, strict=True):
            node = self.nodes[i]
            if node.key[0] == "operator":
                strategy: Strategy = node.strategies[s]  # type: ignore[assignment]
                found[node.key[1]] = {  # type: ignore[index]
                    axis: choice.label
                    for axis, choice in zip(self.mesh.axis_names, strategy, strict=True)
                    if choice.label
                }
        return found

    def parameters(
        self, assignment: Assignment, blocks: Iterable[int] | None = None
    ) -> dict[Readers, ParameterLayouts]:
        """For each group of parameters (by its readers) the chosen layouts."""
        return {
            self.nodes[i].key[1]: self.nodes[i].strategies[s]  # type: ignore[misc]
            for i, s in zip(self.shown(blocks), assignment, strict=True)
            if self.nodes[i].key[0] == "parameter"
        }

    # -- nodes -----------------------------------------------------------------------------------

    def _add(
        self, key: NodeKey, options: Sequence[object], figures: Sequence[Figures], members: Counter[tuple[int, ...]]
    ) -> int:
        self._index[key] = len(self.nodes)

        def column(name: str) -> Costs:
            return np.array([getattr(f, name) for f in figures], dtype=float)

        self.nodes.append(
            _Node(
                key, tuple(options), column("forward"), column("backward"), column("step"), column("resident"),
                column("saved"), np.zeros(len(figures)), members,
            )
        )  # fmt: skip
        return len(self.nodes) - 1

    def _add_operators(self) -> None:
        members: dict[Group, Counter[tuple[int, ...]]] = {}
        self._representative: dict[Group, Operator] = {}
        for op in self.graph.operators:
            group = self.folding.groups[op.name]
            self._representative.setdefault(group, op)
            members.setdefault(group, Counter())[(self._block_of.get(op.name, -1),)] += 1
        for group, op in self._representative.items():
            options = strategies(self.graph, op, self.mesh, self.time, self.allow)
            figures = [self.pricing.operator(op, s, self.mesh, self.time) for s in options]
            self._add(("operator", group), options, figures, members[group])

    # -- links -----------------------------------------------------------------------------------

    def _connect(self) -> None:
        """One pass over all tensors: who produces, who reads, and where."""
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
        node = self.nodes[self._index["operator", group]]
        op = self._representative[group]
        wants = tensor.name in self.gradients and any(name in self.gradients for name in op.outputs)
        return [_read_pair(strategy, i, wants) for strategy in node.strategies]  # type: ignore[arg-type]

    def _link_activation(
        self, tensor: Tensor, source: tuple[Group, int], found: Mapping[tuple[Group, int], Counter[tuple[int, int]]]
    ) -> None:
        made = self.nodes[self._index["operator", source[0]]]
        wants = tensor.name in self.gradients
        produced = []
        for strategy in made.strategies:
            layout = output_layouts(strategy)[source[1]]  # type: ignore[arg-type]
            produced.append((layout, demanded_gradient(layout) if wants else None))
        shape = largest_shard(tensor.shape, (), (), self.time.placement[tensor.name], self.time.micro_batches)
        pairs = {reader: self._read_pairs(reader, tensor) for reader in found}
        origin = self._index["operator", source[0]]
        if len(found) > 1:
            options = tuple(dict.fromkeys((*produced, *(p for pp in pairs.values() for p in pp))))
            shared = self._add(("tensor", source), options, [Figures()] * len(options), made.members)
            made_in = Counter({(block, block): count for (block,), count in made.members.items()})
            self._link(origin, shared, tensor, shape, produced, options, made_in)
            origin, produced = shared, list(options)
        carriers: dict[int, tuple[Group, int]] = {}
        for reader, where in found.items():
            self._link(origin, self._index["operator", reader[0]], tensor, shape, produced, pairs[reader], where)
            if any(a != b for a, b in where) and reader[0][0] >= 0:
                kind = reader[0][0]
                carriers[kind] = min(carriers.get(kind, reader), reader, key=lambda r: r[0][1])
        for group, i in carriers.values():
            if (group, i) not in self._carrying:
                self._carrying.add((group, i))
                sizes = self._sizes(tensor, pairs[group, i])
                self.nodes[self._index["operator", group]].carried[:] += sizes

    def _sizes(self, tensor: Tensor, pairs: Sequence[Pair]) -> Costs:
        known = {f: self.pricing.shard_bytes(tensor, f, self.mesh, self.time) for f, _ in pairs}
        return np.array([known[f] for f, _ in pairs])

    def _link(
        self, a: int, b: int, tensor: Tensor, shape: Shape, have: Sequence[Pair], want: Sequence[Pair],
        where: Counter[tuple[int, int]],
    ) -> None:  # fmt: skip
        """What an adapter reads and what it makes is kept until backward, unless an operator saves it anyway."""
        forward, backward = self._adapter(tensor, shape, have, want)
        if not forward.any() and not backward.any():
            return
        kept = np.zeros_like(forward)
        if any(g is not None for _, g in want):
            if self.nodes[a].key[0] == "operator" and not self._saves(a, tensor):
                kept = kept + self._sizes(tensor, have)[:, None]
            if not self._saves(b, tensor):
                kept = kept + self._sizes(tensor, want)[None, :]
            kept = np.where(forward > 0, kept, 0.0)
        self.links.append(_Link(a, b, forward, backward, kept, where))

    def _saves(self, node: int, tensor: Tensor) -> bool:
        kind, group = self.nodes[node].key
        if kind != "operator":
            return False
        op = self._representative[group]  # type: ignore[index]
        return any(
            self.graph.tensor[name].shape == tensor.shape and self.graph.tensor[name].dtype == tensor.dtype
            for name in op.saved
        )

    def _adapter(self, tensor: Tensor, shape: Shape, have: Sequence[Pair], want: Sequence[Pair]) -> tuple[Costs, Costs]:
        """Seconds of adapters from each pair of ``have`` to each of ``want``, forward and backward."""
        size = DTYPE_BYTES[tensor.dtype]
        forward = self.conversions.table(shape, size, [f for f, _ in have], [f for f, _ in want])
        if not any(g is not None for _, g in want) or not any(g is not None for _, g in have):
            return forward, np.zeros_like(forward)
        none = (R,) * len(self.mesh.axes)
        given, demanded = [g or none for _, g in want], [g or none for _, g in have]
        backward = self.conversions.table(shape, size, given, demanded).T.copy()
        backward[[g is None for _, g in have], :] = 0.0
        backward[:, [g is None for _, g in want]] = 0.0
        return forward, backward

    # -- parameters ------------------------------------------------------------------------------

    def _link_parameter(self, readers: Readers, names: Sequence[str]) -> None:
        tensor = self.graph.tensor[names[0]]
        pairs = {reader: self._read_pairs(reader, tensor) for reader in readers}
        wanted = dict.fromkeys(p for pp in pairs.values() for p in pp)
        options = list(dict.fromkeys(o for used in wanted for o in self._parameter_layouts(tensor, used)))
        master = self.optimizer_bytes.get(tensor.name, DTYPE_BYTES[tensor.dtype])
        figures = []
        for option in options:
            own = self.pricing.parameter(tensor, option, self.mesh)
            sync = 0.0
            if option.gradient is not None and option.gradient != option.optimizer:
                sync += float(self.conversions.table(tensor.shape, master, [option.gradient], [option.optimizer])[0, 0])
            if option.optimizer != option.stored:
                size = DTYPE_BYTES[tensor.dtype]
                sync += float(self.conversions.table(tensor.shape, size, [option.optimizer], [option.stored])[0, 0])
            figures.append(Figures(own.forward, own.backward, own.step + sync, own.resident, own.saved))
        members: Counter[tuple[int, ...]] = Counter()
        for name in names:
            members[tuple(sorted({self._block_of.get(op.name, -1) for op, _ in self.graph.consumers[name]}))] += 1
        node = self._add(("parameter", readers), options, figures, members)
        for reader in readers:
            where: Counter[tuple[int, int]] = Counter()
            for name in names:
                for op, i in self.graph.consumers[name]:
                    if (self.folding.groups[op.name], i) == reader:
                        block = self._block_of.get(op.name, -1)
                        where[block, block] += 1
            self._link_use(node, reader, tensor, options, pairs[reader], master, where)

    def _link_use(
        self, node: int, reader: tuple[Group, int], tensor: Tensor, options: Sequence[ParameterLayouts],
        pairs: Sequence[Pair], master: int, where: Counter[tuple[int, int]],
    ) -> None:  # fmt: skip
        """Gathering for each use, forward and backward; gradients converted to how they accumulate."""
        size = DTYPE_BYTES[tensor.dtype]
        gather = self.conversions.table(tensor.shape, size, [o.stored for o in options], [f for f, _ in pairs])
        reduce = np.zeros_like(gather)
        if tensor.name in self.gradients:
            none = (R,) * len(self.mesh.axes)
            reduce = self.conversions.table(
                tensor.shape, master, [g or none for _, g in pairs], [o.gradient or none for o in options]
            ).T
        nothing = np.zeros_like(gather)
        self.links.append(_Link(node, self._index["operator", reader[0]], gather, gather + reduce, nothing, where))

    def _parameter_layouts(self, tensor: Tensor, used: Pair) -> list[ParameterLayouts]:
        """Ways to keep a parameter that is used as ``used``, for each ZeRO level that shards something."""
        forward, gradient = used
        stored = tuple(R if isinstance(p, Partial) else p for p in forward)
        found = []
        for level in self.zero if gradient is not None else (level for level in self.zero if level in (0, 3)):
            if level == 0:
                found.append(ParameterLayouts(used, stored, gradient, stored))
                continue
            for cut in self._sharded(tensor, stored):
                reduced = None
                if gradient is not None:
                    reduced = tuple(
                        c if g == P and isinstance(c, Split) else g for g, c in zip(gradient, cut, strict=True)
                    )
                found.append(
                    ParameterLayouts(used, cut if level == 3 else stored, reduced if level >= 2 else gradient, cut)
                )
        return found or [ParameterLayouts(used, stored, gradient, stored)]

    def _sharded(self, tensor: Tensor, stored: Layout) -> list[Layout]:
        """``stored`` with its replicated shard axes split, along one dimension for all of them."""
        free = [
            i
            for i, (name, size) in enumerate(self.mesh.axes)
            if name in self.shard_axes and size > 1 and stored[i] == R
        ]
        if not free:
            return []
        taken = {p.dim for p in stored if isinstance(p, Split)}
        found = []
        for dim in sorted(range(len(tensor.shape)), key=lambda d: (d in taken, d)):
            layout = tuple(Split(dim) if i in free else p for i, p in enumerate(stored))
            if layout_problem(tensor.shape, layout, self.mesh) is None:
                found.append(layout)
        return found[:2]


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
