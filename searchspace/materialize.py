"""Materialization: from a resolution to programs.

Dependency preserving, SuperScaler's third phase: every communication is derived here and none is
chosen.  The emitter walks the global order of tasks.  Forward of a stage runs its segments in
order, each followed by the adapters of what it produced; backward runs them in reverse, each
preceded by the backward half of the same adapters.  Recomputation emits a region's forward a second
time.  Named strategies appear nowhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from searchspace.conversion import Prices, cheapest_path, lower
from searchspace.errors import IllegalPlanError
from searchspace.graph import DTYPE_BYTES, Argument, Graph, LocalEnd, LocalOffset, Tensor
from searchspace.layout import (
    Layout,
    P,
    Partial,
    Placement,
    R,
    Region,
    Split,
    intersect,
    local_shape,
    region_of,
    relative,
)
from searchspace.liveness import insert_frees
from searchspace.mesh import Mesh
from searchspace.order import global_order
from searchspace.plan import Plan
from searchspace.program import (
    ONCE,
    Accumulate,
    Alias,
    Backward,
    BoundOperator,
    Exchange,
    Forward,
    Instruction,
    Key,
    Ones,
    ParameterBinding,
    Program,
    Rank,
    SegmentCode,
    Slot,
    SlotName,
    Step,
)
from searchspace.resolve import EVERYWHERE, Adapter, ParameterHome, Resolution, Segment, Version, resolve


def train_program(graph: Graph, plan: Plan, prices: Prices) -> Program:
    """Forward, backward and gradient synchronisation of one step; the loss ends on every rank."""
    return _Emitter(resolve(graph, plan, results="loss"), prices).train()


def forward_program(graph: Graph, plan: Plan, prices: Prices) -> Program:
    """Forward only; loss (if the graph has one) and outputs end on every rank."""
    return _Emitter(resolve(graph, plan, results="all"), prices).forward()


def refresh_program(graph: Graph, plan: Plan, prices: Prices) -> Program:
    """From the optimizer's shards to the stored parameters: what an optimizer step entails."""
    return _Emitter(resolve(graph, plan, results="loss"), prices).refresh()


def optimizer_dtype(tensor: Tensor, precision: str) -> str:
    """The dtype that the optimizer steps on: float32 master weights where the recipe computes in bf16."""
    return "float32" if precision == "bf16" and tensor.dtype in ("bfloat16", "float16") else tensor.dtype


@dataclass
class _Emitter:
    resolution: Resolution
    prices: Prices
    slots: dict[SlotName, Slot] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    names: dict[object, SlotName] = field(default_factory=dict)
    taken: dict[str, int] = field(default_factory=dict)
    ready: set[Key] = field(default_factory=set)
    borrowed: set[Key] = field(default_factory=set)
    codes: dict[object, SegmentCode] = field(default_factory=dict)

    # -- programs --------------------------------------------------------------------------------

    def train(self) -> Program:
        if self.graph.loss is None or self.graph.loss not in self.resolution.gradients:
            raise IllegalPlanError(f"{self.graph.name} has no loss with a gradient; nothing can be trained")
        self._prologue()
        backward = {s: self._gradients_from(s) for s in self.stages if self._backward_segments(s)}
        pending = self._pending_parameters()
        last = self.micro_batches - 1
        finished: dict[int, int] = {}
        for task in global_order(self.plan, self._reads(), backward):
            if task.phase == "F":
                self._forward(task.stage, task.micro_batch, train=True)
            elif task.stage in backward:
                finished[task.stage] = finished.get(task.stage, -1) + 1
                self._backward(task.stage, task.micro_batch, pending if finished[task.stage] == last else None)
        for tensor in list(pending):
            self._synchronise(tensor)
        loss = self._results()[self.graph.loss]
        return self._program({}, loss)

    def forward(self) -> Program:
        self._prologue()
        for task in global_order(self.plan, self._reads(), None):
            self._forward(task.stage, task.micro_batch, train=False)
        found = self._results()
        outputs = {name: found[name] for name in self.graph.outputs if name in found}
        for name in self.graph.outputs:
            if name not in outputs and self.graph.tensor[name].kind == "parameter":
                outputs[name] = self._whole_parameter(name)
            elif name not in outputs:
                outputs[name] = self._slot(self._external(name))
        return self._program(outputs, found.get(self.graph.loss or ""))

    def refresh(self) -> Program:
        for home in self.resolution.parameters.values():
            for stage, site in home.sites.items():
                if not self._shared(home, stage):
                    self._convert(ONCE, (self._optimizer_slot(home), ONCE), (self._slot(site.stored), ONCE))
        return self._program({}, None, update=False)

    def _program(self, outputs: Mapping[str, SlotName], loss: SlotName | None, update: bool = True) -> Program:
        graph = self.graph
        bindings = tuple(self._binding(home) for home in self.resolution.parameters.values())
        inputs = {name: self._slot(self._external(name)) for name in graph.inputs}
        buffers = {t.name: self._slot(self._external(t.name)) for t in graph.of_kind("buffer")}
        constants = {t.name: self._slot(self._external(t.name)) for t in graph.of_kind("constant")}
        updates = self._buffer_updates() if update else ()
        keep = [*inputs.values(), *buffers.values(), *constants.values(), *outputs.values()]
        keep += [slot for b in bindings for slot in (b.optimizer, b.gradient, *b.stored) if slot is not None]
        keep += [loss] if loss else []
        keep += [key[0] for key, _ in updates]
        return Program(
            self.slots,
            insert_frees(self.steps, frozenset(keep)),
            self.plan.devices,
            inputs,
            bindings,
            buffers,
            constants,
            outputs,
            loss,
            updates,
        )

    # -- shorthands ------------------------------------------------------------------------------

    @property
    def graph(self) -> Graph:
        return self.resolution.graph

    @property
    def plan(self) -> Plan:
        return self.resolution.plan

    @property
    def micro_batches(self) -> int:
        return self.resolution.time.micro_batches

    @property
    def stages(self) -> range:
        return range(len(self.plan.placement.stages))

    def _emit(self, ranks: Mapping[Rank, Instruction]) -> None:
        if ranks:
            self.steps.append(Step(ranks))

    def _everywhere(self, stage: int, make: Callable[[Rank], Instruction]) -> None:
        self._emit({rank: make(rank) for rank in self.resolution.mesh(stage).devices})

    # -- slots and keys --------------------------------------------------------------------------

    def _new_slot(
        self, label: str, tensor: str, mesh: Mesh, layout: Layout, dtype: str, time: Placement, gradient: bool = False
    ) -> SlotName:
        number = self.taken.get(label, 0)
        self.taken[label] = number + 1
        name = label if number == 0 else f"{label}~{number}"
        self.slots[name] = Slot(name, tensor, mesh, layout, dtype, time, gradient)
        return name

    def _slot(self, version: Version) -> SlotName:
        """The slot of a version's data; inputs, buffers and constants have one on all ranks."""
        tensor = self.graph.tensor[version.tensor]
        untouched = version.time == R and all(placement == R for placement in version.layout)
        if tensor.kind in ("input", "buffer", "constant") and untouched:
            version = self._external(version.tensor)
        if version not in self.names:
            mesh = self.resolution.mesh(version.stage)
            at = "" if version.stage == EVERYWHERE else f"@{version.stage}"
            self.names[version] = self._new_slot(
                f"{version.tensor}{at}", version.tensor, mesh, version.layout, tensor.dtype, version.time
            )
        return self.names[version]

    def _external(self, name: str) -> Version:
        return Version(name, EVERYWHERE, (R,), None, R)

    def _gradient_slot(self, version: Version) -> SlotName:
        name = ("gradient", version)
        if name not in self.names:
            assert version.gradient is not None
            tensor = self.graph.tensor[version.tensor]
            dtype = tensor.dtype
            if tensor.kind == "parameter":
                dtype = optimizer_dtype(tensor, self.plan.recipe.precision)
            self.names[name] = self._new_slot(
                f"d_{version.tensor}@{version.stage}",
                version.tensor,
                self.resolution.mesh(version.stage),
                version.gradient,
                dtype,
                version.time,
                gradient=True,
            )
        return self.names[name]

    def _optimizer_slot(self, home: ParameterHome, gradient: bool = False) -> SlotName:
        name = ("optimizer", home.tensor, gradient)
        if name not in self.names:
            tensor = self.graph.tensor[home.tensor]
            self.names[name] = self._new_slot(
                f"{'grad' if gradient else 'optimizer'}.{home.tensor}",
                home.tensor,
                self.resolution.mesh(home.home),
                home.optimizer,
                optimizer_dtype(tensor, self.plan.recipe.precision),
                R,
                gradient,
            )
        return self.names[name]

    def _once(self, version: Version) -> bool:
        """Whether the version is the same buffer for all micro-batches."""
        adapter = self.resolution.adapters.get(version)
        if adapter is not None:
            if adapter.source.tensor in self.resolution.parameters:
                return False
            return version.time == R and (adapter.source.time != R or self._once(adapter.source))
        op = self.graph.producer.get(version.tensor)
        return op is None or op.name in self.resolution.time.once

    def _key(self, version: Version, micro_batch: int) -> Key:
        return (self._slot(version), ONCE if self._once(version) else micro_batch)

    def _base(self, tensor: str, time: Placement, micro_batch: int) -> Region:
        return self.resolution.time.base(tensor, time, micro_batch)

    # -- conversions -----------------------------------------------------------------------------

    def _convert(self, micro_batch: int, source: Key, target: Key) -> None:
        """Emit what turns the buffer ``source`` into ``target``, on the time axis and on the meshes."""
        have, want = self.slots[source[0]], self.slots[target[0]]
        if have.time == want.time:
            self._path(self._base(have.tensor, have.time, micro_batch), source, target)
            return
        before = self._base(have.tensor, have.time, micro_batch)
        after = self._base(have.tensor, want.time, micro_batch)
        anywhere = all(p == R for p in have.layout) and not any(isinstance(p, Partial) for p in want.layout)
        if isinstance(want.time, Split) and anywhere and set(want.mesh.devices) <= set(have.mesh.devices):
            self._copy(before, after, source, target)
            return
        # Slicing or placing a micro-batch is local where no axis splits the batch dimension.
        cut = want.time if isinstance(want.time, Split) else have.time
        flat = tuple(
            R if isinstance(p, Split) and isinstance(cut, Split) and p.dim == cut.dim else p for p in have.layout
        )
        at = source
        if flat != have.layout:
            at = (self._via(want, have.mesh, flat, have.time), source[1])
            self._path(before, source, at)
        direct = (want.mesh, want.layout) == (have.mesh, flat)
        to = target if direct else (self._via(want, have.mesh, flat, want.time), target[1])
        nothing = have.time == R and isinstance(want.time, Partial) and micro_batch > 0
        self._copy(None if nothing else before, after, at, to)
        if not direct:
            self._path(after, to, target)

    def _via(self, want: Slot, mesh: Mesh, layout: Layout, time: Placement) -> SlotName:
        return self._new_slot(f"{want.name}.via", want.tensor, mesh, layout, want.dtype, time, want.gradient)

    def _path(self, base: Region, source: Key, target: Key) -> None:
        """The cheapest path between two layouts of ``base``, in the target's dtype."""
        have, want = self.slots[source[0]], self.slots[target[0]]
        path = cheapest_path(
            local_shape(base), DTYPE_BYTES[want.dtype], (have.mesh, have.layout), (want.mesh, want.layout), self.prices
        )
        if not path.moves and have.dtype == want.dtype:
            self._emit({rank: Alias(source, target) for rank in want.mesh.devices})
        elif not path.moves:
            self._copy(base, base, source, target)
        at = source
        for number, move in enumerate(path.moves):
            last = number == len(path.moves) - 1
            to = target if last else (self._via(want, move.target_mesh, move.target, want.time), target[1])
            self._emit(lower(move, base, at, to, want.dtype))
            at = to

    def _copy(self, before: Region | None, after: Region, source: Key, target: Key) -> None:
        """Each rank copies what its source (part of ``before``) and its target (of ``after``) share."""
        have, want = self.slots[source[0]], self.slots[target[0]]
        found: dict[Rank, Instruction] = {}
        for rank in want.mesh.devices:
            goal = region_of(after, want.layout, want.mesh, rank)
            send: tuple[tuple[Rank, Region], ...] = ()
            receive: tuple[tuple[Rank, Region], ...] = ()
            if before is not None:
                held = region_of(before, have.layout, have.mesh, rank)
                common = intersect(held, goal)
                if common is not None:
                    send, receive = ((rank, relative(common, held)),), ((rank, relative(common, goal)),)
            found[rank] = Exchange("local", (rank,), source, target, send, receive, None, local_shape(goal), want.dtype)
        self._emit(found)

    def _accumulate(self, source: Key, target: Key) -> None:
        mesh = self.slots[target[0]].mesh
        self._emit({rank: Accumulate(source, target) for rank in mesh.devices})

    def _add_converted(self, micro_batch: int, source: Key, target: Key) -> None:
        """Add ``source``, converted to the layout of ``target``, to ``target``."""
        want = self.slots[target[0]]
        have = self.slots[source[0]]
        if (have.mesh, have.layout, have.time) == (want.mesh, want.layout, want.time):
            self._accumulate(source, target)
            return
        via = (self._via(want, want.mesh, want.layout, want.time), micro_batch)
        self._convert(micro_batch, source, via)
        self._accumulate(via, target)

    # -- forward ---------------------------------------------------------------------------------

    def _prologue(self) -> None:
        """What does not depend on the micro-batch, and sums over all micro-batches of what depends on data."""
        resolution = self.resolution
        for stage in self.stages:
            for segment in resolution.segments[stage]:
                if segment.kind == "once":
                    self._run(segment, ONCE, keep=False)
        for micro_batch in range(self.micro_batches):
            for stage in self.stages:
                for segment in resolution.segments[stage]:
                    if segment.kind == "prologue":
                        self._run(segment, micro_batch, keep=False)
        totals: dict[Version, Key] = {}
        for adapter in resolution.adapters.values():
            source, target = adapter.source, adapter.target
            if not _sums_over_time(adapter) or target.stage == EVERYWHERE:
                continue
            if source not in totals:
                totals[source] = self._total(source)
            key = self._key(target, ONCE)
            self._convert(ONCE, totals[source], key)
            self.ready.add(key)

    def _total(self, source: Version) -> Key:
        """The sum of a version over all micro-batches."""
        if source.time != P:
            raise IllegalPlanError(f"{source.tensor}: only sums, not {source.time}, combine micro-batches")
        slot = self.slots[self._slot(source)]
        total = (self._new_slot(f"{slot.name}.total", slot.tensor, slot.mesh, slot.layout, slot.dtype, R), ONCE)
        for micro_batch in range(self.micro_batches):
            self._accumulate(self._key(source, micro_batch), total)
        return total

    def _forward(self, stage: int, micro_batch: int, train: bool) -> None:
        for segment in self.resolution.segments[stage]:
            if segment.kind == "main":
                self._run(segment, micro_batch, keep=train and _differentiable(segment) and segment.region is None)
        self._drop_gathered()

    def _run(self, segment: Segment, micro_batch: int, keep: bool, again: bool = False) -> None:
        inputs = tuple(self._read(version, micro_batch) for version in segment.inputs)
        outputs = tuple(self._key(version, micro_batch) for version in segment.outputs)
        released: tuple[int, ...] = ()
        if keep and not again:
            released = tuple(i for i, version in enumerate(segment.inputs) if self._gathered(version))
        self._everywhere(
            segment.stage,
            lambda rank: Forward(
                self._code(segment, rank, micro_batch, keep), micro_batch, inputs, outputs, keep, released
            ),
        )
        self.ready.update(outputs)
        for version in segment.outputs:
            for adapter in self.resolution.adapters_from.get(version, ()):
                target = adapter.target
                inside = target.stage == segment.stage and (not again or self._read_in(target, segment))
                early = segment.kind != "once" and _sums_over_time(adapter)
                if target.stage == EVERYWHERE or early or (again and not inside):
                    continue
                if segment.kind == "once" and not self._once(target):
                    continue
                self._adapt(adapter, micro_batch)

    def _read_in(self, version: Version, segment: Segment) -> bool:
        """Whether a segment of the same recompute region reads the version."""
        return any(
            version in other.inputs
            for other in self.resolution.segments[segment.stage]
            if other.region == segment.region
        )

    def _gathered(self, version: Version) -> bool:
        adapter = self.resolution.adapters.get(version)
        return (
            adapter is not None
            and version.tensor in self.resolution.parameters
            and adapter.source.layout != version.layout
        )

    def _drop_gathered(self) -> None:
        """Parameters are gathered anew for each task."""
        self.ready = {key for key in self.ready if key not in self.borrowed}
        self.borrowed.clear()

    def _read(self, version: Version, micro_batch: int) -> Key:
        """The key of a version, made by its adapter if it is not there yet."""
        key = self._key(version, micro_batch)
        adapter = self.resolution.adapters.get(version)
        if adapter is None or key in self.ready:
            return key
        if _sums_over_time(adapter):
            raise IllegalPlanError(
                f"{version.tensor} needs a sum over micro-batches that itself needs one; micro_batches must be 1"
            )
        self._adapt(adapter, micro_batch)
        return key

    def _adapt(self, adapter: Adapter, micro_batch: int) -> None:
        key = self._key(adapter.target, micro_batch)
        self._convert(micro_batch, self._read(adapter.source, micro_batch), key)
        self.ready.add(key)
        if adapter.source.tensor in self.resolution.parameters:
            self.borrowed.add(key)

    def _code(self, segment: Segment, rank: Rank, micro_batch: int, keep: bool) -> SegmentCode:
        count = (self.graph.batch or 1) // self.resolution.time.granule
        larger = 0 <= micro_batch < count % self.micro_batches
        operators = [self.graph.operator[name] for name in segment.operators]
        offsets = any(_uses_offset(op.args) or _uses_offset(tuple(v for _, v in op.kwargs)) for op in operators)
        key = (segment.name, rank, micro_batch if offsets else larger, keep)
        if key in self.codes:
            return self.codes[key]
        mesh = self.resolution.mesh(segment.stage)
        variables = {version: i for i, version in enumerate(segment.inputs)}
        bound = []
        for op in operators:
            reads = self.resolution.reads[segment.stage, op.name]
            produces = self.resolution.produces[segment.stage, op.name]
            for version in produces:
                variables[version] = len(variables)
            regions = tuple(
                region_of(self._base(v.tensor, v.time, micro_batch), v.layout, mesh, rank) for v in reads + produces
            )
            bound.append(
                BoundOperator(
                    op,
                    tuple(variables[v] for v in reads),
                    tuple(variables[v] for v in produces),
                    regions,
                    self.graph.shapes(op),
                )
            )
        code = SegmentCode(
            segment.name,
            tuple(bound),
            len(segment.inputs),
            tuple(variables[version] for version in segment.outputs),
            tuple(keep and version.gradient is not None for version in segment.inputs),
            tuple(keep and version.gradient is not None for version in segment.outputs),
        )
        self.codes[key] = code
        return code

    # -- backward --------------------------------------------------------------------------------

    def _backward(self, stage: int, micro_batch: int, pending: dict[str, set[str]] | None) -> None:
        """Backward of one task; with ``pending``, parameters are synchronised as soon as they are complete."""
        recomputed: set[int] = set()
        for segment in reversed(self._backward_segments(stage)):
            if segment.region is not None and segment.region not in recomputed:
                recomputed.add(segment.region)
                self._recompute(stage, segment.region, micro_batch)
            self._collect(segment, micro_batch)
            self._differentiate(segment, micro_batch)
            if pending is not None:
                self._finish(segment, pending)
        for adapter in self.resolution.adapters.values():
            if adapter.target.stage == stage and adapter.crosses and adapter.target.gradient is not None:
                self._return(adapter, micro_batch)
        self._drop_gathered()

    def _recompute(self, stage: int, region: int, micro_batch: int) -> None:
        for segment in self.resolution.segments[stage]:
            if segment.region == region and segment.kind == "main":
                self._run(segment, micro_batch, keep=_differentiable(segment), again=True)

    def _collect(self, segment: Segment, micro_batch: int) -> None:
        """Complete the gradients of a segment's outputs: the seed of the loss, adapters backward."""
        for version in segment.outputs:
            if version.gradient is None:
                continue
            if version.tensor == self.graph.loss and (version.time != R or micro_batch <= 0):
                self._seed(version, micro_batch)
            for adapter in self.resolution.adapters_from.get(version, ()):
                if not adapter.crosses and adapter.target.gradient is not None and not self._direct(adapter):
                    self._return(adapter, micro_batch)

    def _seed(self, version: Version, micro_batch: int) -> None:
        slot = self.slots[self._gradient_slot(version)]
        seed = (self._via(slot, slot.mesh, slot.layout, slot.time), micro_batch)
        shape = self.graph.tensor[version.tensor].shape
        self._everywhere(version.stage, lambda rank: Ones(seed, shape, slot.dtype))
        self._accumulate(seed, (slot.name, micro_batch))

    def _direct(self, adapter: Adapter) -> bool:
        """Whether readers add their gradient to the source's own buffer."""
        source, target = adapter.source, adapter.target
        return (
            not adapter.crosses
            and target.gradient is not None
            and source.gradient == target.gradient
            and source.time == target.time
        )

    def _return(self, adapter: Adapter, micro_batch: int) -> None:
        """The backward half of an adapter."""
        source, target = adapter.source, adapter.target
        if source.gradient is None or (source.time == R and isinstance(target.time, Partial) and micro_batch > 0):
            return
        self._add_converted(
            micro_batch, self._gradient_key(target, micro_batch), self._gradient_key(source, micro_batch)
        )

    def _gradient_key(self, version: Version, micro_batch: int) -> Key:
        home = self.resolution.parameters.get(version.tensor)
        if home is not None:
            site = home.sites[version.stage]
            if version.gradient == site.gradient and version.time == R:
                return (self._held(home, version.stage), ONCE)
        adapter = self.resolution.adapters.get(version)
        if adapter is not None and self._direct(adapter):
            return self._gradient_key(adapter.source, micro_batch)
        return (self._gradient_slot(version), micro_batch)

    def _differentiate(self, segment: Segment, micro_batch: int) -> None:
        outputs = tuple(
            None if version.gradient is None else self._gradient_key(version, micro_batch)
            for version in segment.outputs
        )
        inputs = tuple(
            None if version.gradient is None else self._gradient_key(version, micro_batch) for version in segment.inputs
        )
        fetched: tuple[Key, ...] = ()
        if segment.region is None:
            fetched = tuple(self._read(version, micro_batch) for version in segment.inputs if self._gathered(version))
        self._everywhere(segment.stage, lambda rank: Backward(segment.name, micro_batch, outputs, inputs, fetched))
        for version, key in zip(segment.inputs, inputs, strict=True):
            home = self.resolution.parameters.get(version.tensor)
            if home is not None and key is not None and key[1] != ONCE:
                self._add_converted(micro_batch, key, (self._held(home, version.stage), ONCE))

    def _backward_segments(self, stage: int) -> list[Segment]:
        return [s for s in self.resolution.segments[stage] if s.kind == "main" and _differentiable(s)]

    # -- parameters ------------------------------------------------------------------------------

    def _pending_parameters(self) -> dict[str, set[str]]:
        """For each parameter with a gradient, the segments that add to it."""
        found: dict[str, set[str]] = {}
        for stage in self.stages:
            for segment in reversed(self._backward_segments(stage)):
                for version in segment.inputs:
                    if version.gradient is not None and version.tensor in self.resolution.parameters:
                        found.setdefault(version.tensor, set()).add(segment.name)
        return found

    def _finish(self, segment: Segment, pending: dict[str, set[str]]) -> None:
        for version in segment.inputs:
            waiting = pending.get(version.tensor)
            if waiting is not None and segment.name in waiting:
                waiting.discard(segment.name)
                if not waiting:
                    self._synchronise(version.tensor)
                    del pending[version.tensor]

    def _held(self, home: ParameterHome, stage: int) -> SlotName:
        """Where a site's gradient accumulates: the optimizer's own buffer if nothing remains to be done."""
        site = home.sites[stage]
        contributing = [s for s, other in home.sites.items() if other.gradient is not None]
        if contributing == [home.home] == [stage] and site.gradient == home.optimizer:
            return self._optimizer_slot(home, gradient=True)
        return self._gradient_slot(site.stored)

    def _synchronise(self, tensor: str) -> None:
        """From what the sites hold to the gradient of the optimizer's shard."""
        home = self.resolution.parameters[tensor]
        final = (self._optimizer_slot(home, gradient=True), ONCE)
        for stage, site in home.sites.items():
            if site.gradient is not None:
                held = (self._held(home, stage), ONCE)
                if held != final:
                    self._add_converted(ONCE, held, final)

    def _shared(self, home: ParameterHome, stage: int) -> bool:
        tensor = self.graph.tensor[home.tensor]
        same = optimizer_dtype(tensor, self.plan.recipe.precision) == tensor.dtype
        return same and stage == home.home and home.sites[stage].stored.layout == home.optimizer

    def _binding(self, home: ParameterHome) -> ParameterBinding:
        tensor = self.graph.tensor[home.tensor]
        stored = {stage: self._slot(site.stored) for stage, site in home.sites.items()}
        trained = any(site.gradient is not None for site in home.sites.values())
        return ParameterBinding(
            tensor.name,
            tensor.source,
            self._optimizer_slot(home),
            self._optimizer_slot(home, gradient=True) if trained else None,
            tuple(stored.values()),
            tuple(slot for stage, slot in stored.items() if self._shared(home, stage)),
        )

    # -- results ---------------------------------------------------------------------------------

    def _results(self) -> dict[str, SlotName]:
        """Bring results to every rank, whole."""
        found = {}
        for name, target in self.resolution.results.items():
            source = self.resolution.adapters[target].source
            slot = self._new_slot(
                f"result.{name}",
                name,
                self.resolution.mesh(EVERYWHERE),
                target.layout,
                self.graph.tensor[name].dtype,
                R,
            )
            found[name] = slot
            if self._once(source) or self.micro_batches == 1 or source.time == R:
                self._convert(0, self._key(source, 0), (slot, ONCE))
            elif isinstance(source.time, Partial):
                self._convert(ONCE, self._total(source), (slot, ONCE))
            else:
                whole_slot = self.slots[slot]
                for micro_batch in range(self.micro_batches):
                    part = (self._via(whole_slot, whole_slot.mesh, whole_slot.layout, P), micro_batch)
                    self._convert(micro_batch, self._key(source, micro_batch), part)
                    self._accumulate(part, (slot, ONCE))
        return found

    def _whole_parameter(self, name: str) -> SlotName:
        home = self.resolution.parameters[name]
        slot = self._new_slot(
            f"result.{name}", name, self.resolution.mesh(EVERYWHERE), (R,), self.graph.tensor[name].dtype, R
        )
        self._convert(ONCE, (self._slot(home.sites[home.home].stored), ONCE), (slot, ONCE))
        return slot

    def _buffer_updates(self) -> tuple[tuple[Key, SlotName], ...]:
        updates = []
        for buffer, new in self.graph.buffer_updates:
            slot = self._slot(self._external(buffer))
            op = self.graph.producer.get(new)
            if op is None:
                source: Key = (self._slot(self._external(new)), ONCE)
            else:
                stage = next(s for s in self.stages if (s, op.name) in self.resolution.produces)
                version = self.resolution.produces[stage, op.name][op.outputs.index(new)]
                source = self._key(version, 0)
            target = (
                self._new_slot(
                    f"new.{buffer}", new, self.resolution.mesh(EVERYWHERE), (R,), self.graph.tensor[buffer].dtype, R
                ),
                ONCE,
            )
            self._convert(ONCE, source, target)
            updates.append((target, slot))
        return tuple(updates)

    # -- stages ----------------------------------------------------------------------------------

    def _reads(self) -> dict[int, list[int]]:
        """The stages that each stage reads from."""
        found: dict[int, set[int]] = {s: set() for s in self.stages}
        for adapter in self.resolution.adapters.values():
            if adapter.crosses and adapter.target.stage != EVERYWHERE:
                found[adapter.target.stage].add(adapter.source.stage)
        return {s: sorted(others) for s, others in found.items()}

    def _gradients_from(self, stage: int) -> list[int]:
        """The stages that return gradients to a stage."""
        return sorted(
            {
                adapter.target.stage
                for adapter in self.resolution.adapters.values()
                if adapter.crosses and adapter.source.stage == stage and adapter.target.gradient is not None
            }
        )


def _differentiable(segment: Segment) -> bool:
    return any(version.gradient is not None for version in segment.outputs)


def _sums_over_time(adapter: Adapter) -> bool:
    return isinstance(adapter.source.time, Partial) and adapter.target.time == R


def _uses_offset(arguments: Iterable[Argument]) -> bool:
    return any(isinstance(a, LocalOffset | LocalEnd) or (isinstance(a, tuple) and _uses_offset(a)) for a in arguments)
