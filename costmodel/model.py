"""The cost model of one graph on one cluster: what the search asks, and what the evaluation adds up.

Every price has one formula, in this file's imports; ``evaluate`` only sums what these methods return.
Seconds are those of one micro-batch on the largest shard unless stated otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from costmodel.aliasing import copying_views
from costmodel.cluster import Cluster
from costmodel.collectives import CommunicationPrices
from costmodel.compute import copy_seconds, operator_seconds, work_fraction
from costmodel.device import DeviceSpec
from costmodel.memory import ParameterBytes, StorageUse, parameter_bytes
from costmodel.optimizer import step_seconds
from costmodel.precision import FLOATS, arithmetic_dtype, tensor_dtypes
from costmodel.shards import largest_shard
from costmodel.units import Bytes, Seconds
from searchspace.conversion import cheapest_path
from searchspace.conversion.moves import Placed
from searchspace.graph import DTYPE_BYTES, Graph, Operator
from searchspace.layout import Layout, Placement, R, Shape
from searchspace.materialize import optimizer_dtype
from searchspace.mesh import Mesh
from searchspace.microbatch import TimeAxis
from searchspace.plan import Recipe
from searchspace.rule import Choice

_UNCAST = tuple(dtype for dtype in DTYPE_BYTES if dtype not in FLOATS)


@dataclass(frozen=True)
class OperatorCost:
    """One operator on the largest shard, for one micro-batch: seconds, and bytes kept for backward.

    ``saved`` counts the operator's own outputs that it, a reader, or a reader of a view of them saves, and
    what it saves besides; so it adds up over operators to what autograd keeps.  Copies that adapters make, and
    which the runtime keeps as inputs and outputs of segments, are for the edges: see ``evaluate``.
    """

    forward: Seconds
    backward: Seconds
    saved: Bytes


@dataclass(frozen=True)
class ParameterCost:
    """What keeping a parameter costs on one mesh, beyond the operators that read it.

    ``gather_forward`` and ``gather_backward`` are per reading task and micro-batch, ``accumulate`` per
    micro-batch; ``synchronise``, ``step`` and ``refresh`` once per step.
    """

    gather_forward: Seconds
    gather_backward: Seconds
    accumulate: Seconds
    synchronise: Seconds
    step: Seconds
    refresh: Seconds
    bytes: ParameterBytes


class CostModel:
    """Prices of ``graph`` on ``cluster`` under ``recipe``, its batch cut as ``time`` says.

    Immutable but for its memo; ``prices`` is the plug for conversions.
    """

    def __init__(
        self,
        graph: Graph,
        cluster: Cluster,
        recipe: Recipe,
        time: TimeAxis,
        prices: CommunicationPrices | None = None,
    ) -> None:
        self.graph, self.cluster, self.recipe, self.time = graph, cluster, recipe, time
        self.prices = prices or CommunicationPrices(cluster)
        self.dtypes = tensor_dtypes(graph, recipe.precision)
        self.training = recipe.mode == "train"
        self._specs: dict[Mesh, tuple[DeviceSpec, ...]] = {}
        self._twins: dict[object, tuple[Mesh, Mesh]] = {}
        self._twin_of: dict[tuple[Mesh, Mesh], tuple[Mesh, Mesh]] = {}
        self._operators: dict[object, tuple[OperatorCost, StorageUse]] = {}
        self._conversions: dict[object, Seconds] = {}

    # -- devices and shapes ----------------------------------------------------------------------

    def specs(self, mesh: Mesh) -> tuple[DeviceSpec, ...]:
        """The kinds of device on a mesh."""
        found = self._specs.get(mesh)
        if found is None:
            found = self._specs[mesh] = tuple(dict.fromkeys(self.cluster.device(d) for d in mesh.devices))
        return found

    def shard(self, tensor: str, layout: Layout, mesh: Mesh, time: Placement = R) -> Shape:
        """The largest shard of a tensor in one micro-batch."""
        return largest_shard(self.graph.tensor[tensor].shape, layout, mesh.shape, time, self.time.micro_batches)

    def bytes(self, tensor: str, layout: Layout, mesh: Mesh, time: Placement = R, dtype: str | None = None) -> Bytes:
        """Bytes of the largest shard, in the tensor's own type or ``dtype``."""
        return prod(self.shard(tensor, layout, mesh, time)) * DTYPE_BYTES[dtype or self.dtypes[tensor]]

    def master_dtype(self, tensor: str) -> str:
        """The data type of a parameter's master copy, gradient and optimizer state."""
        return optimizer_dtype(self.graph.tensor[tensor], self.recipe.precision)

    # -- operators -------------------------------------------------------------------------------

    def placements(self, op: Operator) -> tuple[Placement, ...]:
        """Placements on the time axis of inputs, then outputs."""
        consumed = tuple(self.time.consumed(op, i) for i in range(len(op.inputs)))
        return consumed + tuple(self.time.placement[name] for name in op.outputs)

    def local_shapes(self, op: Operator, choices: Sequence[Choice], mesh: Mesh) -> tuple[Shape, ...]:
        """Largest local shapes of inputs, then outputs, in one micro-batch."""
        layouts = [tuple(c.inputs[i] for c in choices) for i in range(len(op.inputs))]
        layouts += [tuple(c.outputs[i] for c in choices) for i in range(len(op.outputs))]
        tensor, sizes, count = self.graph.tensor, mesh.shape, self.time.micro_batches
        return tuple(
            largest_shard(tensor[name].shape, layout, sizes, time, count)
            for name, layout, time in zip(op.inputs + op.outputs, layouts, self.placements(op), strict=True)
        )

    def operator(self, op: Operator, choices: Sequence[Choice], mesh: Mesh) -> OperatorCost:
        """The cost of ``op`` under one choice per axis of ``mesh``."""
        return self._entry(op, choices, mesh)[0]

    def footprint(self, op: Operator, choices: Sequence[Choice], mesh: Mesh) -> StorageUse:
        """``op`` as memory sees it; buffers are called by their position among inputs, then outputs."""
        return self._entry(op, choices, mesh)[1]

    def _entry(self, op: Operator, choices: Sequence[Choice], mesh: Mesh) -> tuple[OperatorCost, StorageUse]:
        specs = self.specs(mesh)
        key = (op.name, tuple(c.label for c in choices), mesh.axes, specs)
        found = self._operators.get(key)
        if found is None:
            found = self._operators[key] = self._priced(op, self.local_shapes(op, choices, mesh), specs)
        return found

    def _priced(
        self, op: Operator, local: Sequence[Shape], specs: Sequence[DeviceSpec]
    ) -> tuple[OperatorCost, StorageUse]:
        if op.name in self.copies:
            op = replace(op, family="data")
        names = op.inputs + op.outputs
        dtypes = [self.dtypes[name] for name in names]
        wants = self.wants(op)
        whole = self.graph.shapes(op)
        arithmetic = arithmetic_dtype(op, self.recipe.precision)
        times = [operator_seconds(op, whole, local, dtypes, wants, spec, arithmetic) for spec in specs]
        sizes = [prod(s) * DTYPE_BYTES[d] for s, d in zip(local, dtypes, strict=True)]
        use = self._storage_use(op, whole, local, dtypes, sizes, wants, arithmetic)
        kept = 0 if use.view else sum(s for n, s in zip(op.outputs, use.sizes, strict=True) if n in self.kept)
        return OperatorCost(max(f for f, _ in times), max(b for _, b in times), kept + use.extra), use

    @cached_property
    def copies(self) -> frozenset[str]:
        """Operators of the view family that copy."""
        return copying_views(self.graph)

    @cached_property
    def kept(self) -> frozenset[str]:
        """Tensors whose storage some operator saves, itself or through a view."""
        root: dict[str, str] = {}
        found: dict[str, None] = {}
        for op in self.graph.operators:
            if op.family == "view" and op.inputs and op.name not in self.copies:
                root.update(dict.fromkeys(op.outputs, root.get(op.inputs[0], op.inputs[0])))
            names = op.inputs + op.outputs
            found.update((root.get(names[i], names[i]), None) for i in self._saved(op))
        return frozenset(found)

    def _saved(self, op: Operator) -> tuple[int, ...]:
        """Positions among inputs, then outputs, of what autograd saves as it is (autocast saves its casts instead)."""
        if not any(self.wants(op)):
            return ()
        forced = arithmetic_dtype(op, self.recipe.precision)
        return tuple(
            i
            for i, name in enumerate(op.inputs + op.outputs)
            if name in op.saved and (forced is None or self.dtypes[name] in (forced, *_UNCAST))
        )

    def wants(self, op: Operator) -> tuple[bool, ...]:
        """Which inputs of ``op`` get a gradient."""
        tensor = self.graph.tensor
        if not self.training or not any(tensor[name].requires_grad for name in op.outputs):
            return (False,) * len(op.inputs)
        return tuple(tensor[name].requires_grad for name in op.inputs)

    def _storage_use(
        self,
        op: Operator,
        whole: Sequence[Shape],
        local: Sequence[Shape],
        dtypes: Sequence[str],
        sizes: Sequence[Bytes],
        wants: tuple[bool, ...],
        arithmetic: str | None,
    ) -> StorageUse:
        count = len(op.inputs)
        extra = transient = 0
        saved = self._saved(op)
        if any(wants):
            if op.saved_extra_bytes:
                extra = round(op.saved_extra_bytes * work_fraction(op.rule, whole, local))
            for i, (name, own) in enumerate(zip(op.inputs + op.outputs, dtypes, strict=True)):
                if name in op.saved and i not in saved and arithmetic is not None:
                    extra += sizes[i] // DTYPE_BYTES[own] * DTYPE_BYTES[arithmetic]
            if op.family == "loss" and saved:
                # Exponentials in float32 beside the logits (autoplan's cross entropy recomputes them).
                transient = max(prod(shape) for shape in local) * 4
        return StorageUse(
            tuple(range(count)),
            tuple(range(count, len(sizes))),
            tuple(sizes[count:]),
            saved,
            extra,
            transient,
            op.family == "view",
            wants,
        )

    # -- communication ---------------------------------------------------------------------------

    def convert(self, shape: Shape, dtype: str, source: Placed, target: Placed) -> Seconds:
        """The cheapest conversion of a buffer that the meshes hold whole in ``shape``; 0 for an alias.

        Meshes whose devices lie alike on the cluster cost alike, and are asked once.
        """
        (from_mesh, have), (to_mesh, want) = source, target
        if have == want and from_mesh == to_mesh:
            return 0.0
        meshes = self._twin_of.get((from_mesh, to_mesh)) or self._twin(from_mesh, to_mesh)
        key = (shape, DTYPE_BYTES[dtype], meshes, have, want)
        seconds = self._conversions.get(key)
        if seconds is None:
            path = cheapest_path(shape, DTYPE_BYTES[dtype], (meshes[0], have), (meshes[1], want), self.prices)
            seconds = self._conversions[key] = path.seconds
        return seconds

    def _twin(self, first: Mesh, second: Mesh) -> tuple[Mesh, Mesh]:
        """The pair of meshes, known already, whose devices lie on nodes as these do."""
        cluster = self.cluster
        nodes: dict[int, int] = {}
        domains: dict[int, int] = {}
        devices: dict[int, int] = {}
        where = []
        for device in first.devices + second.devices:
            node = cluster.node_of(device)
            where.append(
                (
                    devices.setdefault(device, len(devices)),
                    nodes.setdefault(node, len(nodes)),
                    domains.setdefault(cluster.domain_of_node(node), len(domains)),
                )
            )
        kinds = tuple(cluster.nodes[node] for node in nodes)
        pattern = (first.axes, second.axes, tuple(where), kinds)
        twin = self._twin_of[first, second] = self._twins.setdefault(pattern, (first, second))
        return twin

    def base(self, tensor: str, time: Placement) -> Shape:
        """The shape that a mesh holds of a tensor in the largest micro-batch."""
        return largest_shard(self.graph.tensor[tensor].shape, (), (), time, self.time.micro_batches)

    def forward_edge(
        self, tensor: str, source: Placed, target: Placed, times: tuple[Placement, Placement] = (R, R)
    ) -> Seconds:
        """Forward half of an adapter: from the producer's layout to the reader's.

        ``times`` are the placements on the time axis at source and target; where they differ, a
        micro-batch is first sliced from (or placed into) the whole.
        """
        before, after = times
        dtype = self.graph.tensor[tensor].dtype
        seconds = self.convert(self.base(tensor, after), dtype, source, target)
        if before != after and not seconds:
            seconds = self.prices.local(self.bytes(tensor, target[1], target[0], after, dtype))
        return seconds

    def backward_edge(
        self,
        tensor: str,
        source: tuple[Mesh, Layout | None],
        target: tuple[Mesh, Layout | None],
        times: tuple[Placement, Placement] = (R, R),
    ) -> Seconds:
        """Backward half: from the gradient that the reader delivers to the one that the producer wants, and its sum.

        0 where either has no gradient, or readers add to the producer's own buffer.
        """
        (to_mesh, wanted), (from_mesh, delivered) = source, target
        if wanted is None or delivered is None:
            return 0.0
        before, after = times
        if (from_mesh, delivered, after) == (to_mesh, wanted, before):
            return 0.0
        dtype = self.graph.tensor[tensor].dtype
        seconds = self.convert(self.base(tensor, after), dtype, (from_mesh, delivered), (to_mesh, wanted))
        return seconds + self.add_seconds(self.bytes(tensor, wanted, to_mesh, before, dtype), to_mesh)

    def add_seconds(self, bytes: Bytes, mesh: Mesh) -> Seconds:
        """Add a buffer into another."""
        return max(copy_seconds(bytes, spec, passes=3) for spec in self.specs(mesh))

    # -- parameters ------------------------------------------------------------------------------

    def gather(self, tensor: str, mesh: Mesh, stored: Layout, used: Layout) -> Seconds:
        """From the stored layout of a parameter to the one in which a segment reads it (ZeRO-3)."""
        whole = self.graph.tensor[tensor]
        return self.convert(whole.shape, whole.dtype, (mesh, stored), (mesh, used))

    def accumulate(self, tensor: str, mesh: Mesh, delivered: Layout, held: Layout) -> Seconds:
        """One micro-batch's gradient of a parameter into where it accumulates."""
        master = self.master_dtype(tensor)
        seconds = 0.0
        if delivered != held:
            seconds = self.convert(self.graph.tensor[tensor].shape, master, (mesh, delivered), (mesh, held))
        if self.time.micro_batches > 1 or master != self.graph.tensor[tensor].dtype:
            seconds += self.add_seconds(self.bytes(tensor, held, mesh, R, master), mesh)
        return seconds

    def synchronise(self, tensor: str, held: Placed, optimizer: Placed) -> Seconds:
        """From the gradient that a stage holds after the last micro-batch to the optimizer's shard."""
        if held == optimizer:
            return 0.0
        return self.convert(self.graph.tensor[tensor].shape, self.master_dtype(tensor), held, optimizer)

    def refresh(self, tensor: str, optimizer: Placed, stored: Placed) -> Seconds:
        """From the optimizer's shard to a stored parameter, after the step."""
        own = self.graph.tensor[tensor].dtype
        if optimizer == stored:
            same = self.master_dtype(tensor) == own
            return 0.0 if same else self.prices.local(self.bytes(tensor, stored[1], stored[0], R, own))
        return self.convert(self.graph.tensor[tensor].shape, own, optimizer, stored)

    def step(self, elements: int, mesh: Mesh, dtype: str = "float32") -> Seconds:
        """The optimizer's step on a device that updates ``elements`` parameters."""
        return max(step_seconds(elements, self.recipe.optimizer, spec, dtype) for spec in self.specs(mesh))

    def parameter_bytes(
        self, tensor: str, mesh: Mesh, stored: Layout, held: Layout | None, optimizer: Layout | None
    ) -> ParameterBytes:
        """Bytes on the fullest device of ``mesh``; ``optimizer`` is None where the home is another stage."""
        own, master = self.graph.tensor[tensor].dtype, self.master_dtype(tensor)

        def elements(layout: Layout) -> int:
            return prod(self.shard(tensor, layout, mesh))

        gradients = [elements(held)] if held is not None else []
        if held is not None and optimizer is not None and held != optimizer:
            gradients.append(elements(optimizer))
        trained = self.training and self.graph.tensor[tensor].requires_grad
        return parameter_bytes(
            elements(stored),
            gradients,
            elements(optimizer) if optimizer is not None and trained else 0,
            dtype=own,
            master_dtype=master,
            shared=own == master and optimizer == stored,
            optimizer=self.recipe.optimizer,
        )

    def parameter(
        self,
        tensor: str,
        mesh: Mesh,
        *,
        used: Layout,
        delivered: Layout | None,
        stored: Layout,
        held: Layout | None,
        optimizer: Layout,
    ) -> ParameterCost:
        """Everything that one parameter costs on one stage that is its home (what a search compares).

        ``used`` and ``delivered`` are the layouts in which its reader reads it and delivers its gradient,
        ``stored``, ``held`` and ``optimizer`` those between uses, of the accumulated gradient, and of the
        optimizer's state.
        """
        gather = self.gather(tensor, mesh, stored, used)
        memory = self.parameter_bytes(tensor, mesh, stored, held, optimizer)
        if delivered is None or held is None:
            return ParameterCost(gather, 0.0, 0.0, 0.0, 0.0, 0.0, memory)
        return ParameterCost(
            gather_forward=gather,
            gather_backward=gather,
            accumulate=self.accumulate(tensor, mesh, delivered, held),
            synchronise=self.synchronise(tensor, (mesh, held), (mesh, optimizer)),
            step=self.step(prod(self.shard(tensor, optimizer, mesh)), mesh, self.master_dtype(tensor)),
            refresh=self.refresh(tensor, (mesh, optimizer), (mesh, stored)),
            bytes=memory,
        )
