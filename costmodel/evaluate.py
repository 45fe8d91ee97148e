"""The referee: what a complete plan costs, whoever found it.

``evaluate`` walks a resolution as the materializer does and adds up the cost model's prices: operators
on the largest shard, adapters forward and backward, parameters gathered, recomputation, gradients
accumulated and synchronised, transfers between stages, the optimizer's step and what it entails; then it
simulates the order of tasks.  Communication is not overlapped with computation, as the runtime executes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from math import prod

from costmodel.cluster import Cluster
from costmodel.memory import ParameterBytes, SegmentUse, activation_memory, with_allowance
from costmodel.model import CostModel
from costmodel.optimizer import step_bytes
from costmodel.pipeline import StageMemory, Timeline, memory_over_time, simulate
from costmodel.units import Bytes, Seconds
from searchspace.layout import Partial, R
from searchspace.mesh import Mesh
from searchspace.plan import Prediction, Recipe
from searchspace.resolve import EVERYWHERE, Adapter, ParameterHome, Resolution, Segment, Version
from searchspace.schedule import Phase


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of one step that a stage spends on each kind of work; ``bubble`` is waiting."""

    forward: Seconds = 0.0
    backward: Seconds = 0.0
    recompute: Seconds = 0.0
    communication: Seconds = 0.0
    transfer: Seconds = 0.0
    gather: Seconds = 0.0
    accumulate: Seconds = 0.0
    synchronise: Seconds = 0.0
    optimizer: Seconds = 0.0
    refresh: Seconds = 0.0
    bubble: Seconds = 0.0


@dataclass(frozen=True)
class Evaluation:
    """What a plan costs.

    Fields
        seconds: of one step, optimizer and refresh included.
        peak_bytes: by stage, on its fullest device, allocator losses and communication buffers included.
        limits: by stage, bytes that its smallest device can allocate.
        stages: where the time of each stage goes.
        parameters: by stage, bytes of parameters, gradients and optimizer state.
        timeline: the simulated order of tasks.
    """

    seconds: Seconds
    peak_bytes: tuple[Bytes, ...]
    limits: tuple[Bytes, ...]
    stages: tuple[StageSeconds, ...]
    parameters: tuple[ParameterBytes, ...]
    timeline: Timeline

    @property
    def fits(self) -> bool:
        """Whether every stage's peak is within its devices' memory."""
        return all(peak <= limit for peak, limit in zip(self.peak_bytes, self.limits, strict=True))

    @property
    def breakdown(self) -> Mapping[str, Seconds]:
        """The stages' mean seconds by kind of work; they add up to the step."""
        count = len(self.stages)
        return {f.name: sum(getattr(s, f.name) for s in self.stages) / count for f in fields(StageSeconds)}

    def prediction(self) -> Prediction:
        """As a plan carries it."""
        return Prediction(seconds=self.seconds, peak_bytes=self.peak_bytes, breakdown=dict(self.breakdown))


def evaluate(
    resolution: Resolution, cluster: Cluster, recipe: Recipe | None = None, *, model: CostModel | None = None
) -> Evaluation:
    """The cost of the plan that ``resolution`` spells out, on ``cluster``.

    ``recipe`` defaults to the plan's; ``model`` carries memoised prices from one evaluation to the next
    (same graph, cluster, recipe and number of micro-batches).  Raises ClusterError when the plan uses
    devices that the cluster lacks, IllegalPlanError when its order contradicts itself.
    """
    recipe = recipe or resolution.plan.recipe
    cluster.node_of(max(resolution.plan.devices))
    return _Evaluation(resolution, model or CostModel(resolution.graph, cluster, recipe, resolution.time)).run()


@dataclass
class _Tally:
    """Seconds of one stage: per micro-batch in tasks, once before the first and once after the last."""

    task: dict[Phase, Seconds] = field(default_factory=lambda: {"F": 0.0, "B": 0.0})
    before: Seconds = 0.0
    kinds: dict[str, Seconds] = field(default_factory=dict)

    def add(self, kind: str, phase: Phase, seconds: Seconds, micro_batches: int) -> None:
        self.task[phase] += seconds
        self.kinds[kind] = self.kinds.get(kind, 0.0) + seconds * micro_batches

    def once(self, kind: str, seconds: Seconds) -> None:
        self.kinds[kind] = self.kinds.get(kind, 0.0) + seconds


class _Evaluation:
    def __init__(self, resolution: Resolution, model: CostModel) -> None:
        self.resolution, self.model = resolution, model
        self.graph, self.plan = resolution.graph, resolution.plan
        self.count = resolution.time.micro_batches
        self.training = resolution.training
        self.tallies = [_Tally() for _ in resolution.stages]
        self._buffers: dict[object, int] = {}
        self._seen: dict[int, int] = {}
        """By identity; the resolution keeps its versions."""

    def run(self) -> Evaluation:
        for stage in self.resolution.stages:
            self._operators(stage)
        self._adapters()
        synchronise, shared = self._parameter_seconds()
        timeline = self._simulate(synchronise)
        step, refresh = self._after_step()
        stages = self.resolution.stages
        end = timeline.makespan + shared + self._results_seconds()
        seconds = end + max((step[s] + refresh[s] for s in stages), default=0.0)
        found = []
        for s in stages:
            kinds = dict(self.tallies[s].kinds)
            kinds |= {"synchronise": synchronise[s], "optimizer": step[s], "refresh": refresh[s]}
            found.append(StageSeconds(**kinds, bubble=max(0.0, seconds - sum(kinds.values()))))
        peaks, parameters = self._memory(timeline)
        limits = tuple(min(spec.usable_memory for spec in self.model.specs(self._mesh(s))) for s in stages)
        return Evaluation(seconds, peaks, limits, tuple(found), parameters, timeline)

    # -- shorthands ------------------------------------------------------------------------------

    def _mesh(self, stage: int) -> Mesh:
        return self.resolution.mesh(stage)

    def _add(self, stage: int, kind: str, phase: Phase, seconds: Seconds) -> None:
        self.tallies[stage].add(kind, phase, seconds, self.count)

    def _before(self, stage: int, kind: str, seconds: Seconds) -> None:
        self.tallies[stage].before += seconds
        self.tallies[stage].once(kind, seconds)

    def _is_parameter(self, version: Version) -> bool:
        return version.tensor in self.resolution.parameters

    def _has_backward(self, segment: Segment) -> bool:
        return segment.kind == "main" and any(v.gradient is not None for v in segment.outputs)

    @cached_property
    def _trained(self) -> tuple[bool, ...]:
        """Which stages have a backward."""
        return tuple(any(map(self._has_backward, segments)) for segments in self.resolution.segments)

    @cached_property
    def _produced_in(self) -> Mapping[Version, Segment]:
        """The segment that outputs each version."""
        return {v: segment for segments in self.resolution.segments for segment in segments for v in segment.outputs}

    def _once(self, version: Version) -> bool:
        """Whether a version is the same for all micro-batches (made before the first task)."""
        adapter = self.resolution.adapters.get(version)
        if adapter is not None:
            if self._is_parameter(version):
                return False
            return version.time == R and (adapter.source.time != R or self._once(adapter.source))
        op = self.graph.producer.get(version.tensor)
        return op is None or op.name in self.resolution.time.once

    def _gathered(self, version: Version) -> bool:
        adapter = self.resolution.adapters.get(version)
        return adapter is not None and self._is_parameter(version) and adapter.source.layout != version.layout

    # -- tasks -----------------------------------------------------------------------------------

    def _operators(self, stage: int) -> None:
        resolution, graph, model, mesh = self.resolution, self.graph, self.model, self._mesh(stage)
        gathered: dict[Phase, dict[Version, None]] = {"F": {}, "B": {}}
        for segment in resolution.segments[stage]:
            costs = [
                model.operator(graph.operator[name], resolution.choices[stage, name], mesh)
                for name in segment.operators
            ]
            forward = sum(c.forward for c in costs)
            if segment.kind != "main":
                self._before(stage, "forward", forward * (1 if segment.kind == "once" else self.count))
                continue
            self._add(stage, "forward", "F", forward)
            gathers = [v for v in segment.inputs if self._gathered(v)]
            gathered["F"].update(dict.fromkeys(gathers))
            if not self._has_backward(segment):
                continue
            self._add(stage, "backward", "B", sum(c.backward for c in costs))
            gathered["B"].update(dict.fromkeys(gathers))
            if segment.region is not None:
                self._add(stage, "recompute", "B", forward)
            for version in segment.inputs:
                if version.gradient is not None and self._is_parameter(version):
                    held = resolution.parameters[version.tensor].sites[stage].gradient
                    if held is not None:
                        seconds = model.accumulate(version.tensor, mesh, version.gradient, held)
                        self._add(stage, "accumulate", "B", seconds)
        phases: tuple[Phase, Phase] = ("F", "B")
        for phase in phases:
            for version in gathered[phase]:
                stored = resolution.adapters[version].source.layout
                self._add(stage, "gather", phase, model.gather(version.tensor, mesh, stored, version.layout))

    def _adapters(self) -> None:
        for adapter in self.resolution.adapters.values():
            source, target = adapter.source, adapter.target
            if self._is_parameter(source) or target.stage == EVERYWHERE:
                continue
            ends = (self._mesh(source.stage), source.layout), (self._mesh(target.stage), target.layout)
            times = (source.time, target.time)
            forward = self.model.forward_edge(source.tensor, *ends, times)
            summed = isinstance(source.time, Partial) and target.time == R
            if summed or self._once(target):
                self._before(target.stage, "communication", forward)
            else:
                self._add(source.stage, "transfer" if adapter.crosses else "communication", "F", forward)
                if self._remade(adapter):
                    self._add(source.stage, "recompute", "B", forward)
            if self.training and source.gradient is not None and target.gradient is not None:
                back = self.model.backward_edge(
                    source.tensor, (ends[0][0], source.gradient), (ends[1][0], target.gradient), times
                )
                self._add(target.stage, "transfer" if adapter.crosses else "communication", "B", back)

    def _remade(self, adapter: Adapter) -> bool:
        """Whether a recompute region runs the adapter again: made and read inside it."""
        segment = self._produced_in.get(adapter.source)
        return (
            segment is not None
            and not adapter.crosses
            and segment.region is not None
            and self._has_backward(segment)
            and (segment.stage, segment.region) in self._read_by_region.get(adapter.target, ())
        )

    @cached_property
    def _read_by_region(self) -> Mapping[Version, tuple[tuple[int, int], ...]]:
        found: dict[Version, dict[tuple[int, int], None]] = {}
        for segments in self.resolution.segments:
            for segment in segments:
                if segment.region is not None:
                    for version in segment.inputs:
                        found.setdefault(version, {})[segment.stage, segment.region] = None
        return {version: tuple(regions) for version, regions in found.items()}

    # -- parameters and the step -----------------------------------------------------------------

    def _parameter_seconds(self) -> tuple[list[Seconds], Seconds]:
        """Gradient synchronisation by stage, and of parameters that several stages share."""
        own = [0.0 for _ in self.resolution.stages]
        shared = 0.0
        for home in self.resolution.parameters.values():
            trained = [(s, site.gradient) for s, site in home.sites.items() if site.gradient is not None]
            for stage, gradient in trained:
                seconds = self.model.synchronise(
                    home.tensor, (self._mesh(stage), gradient), (self._mesh(home.home), home.optimizer)
                )
                if len(trained) == 1:
                    own[stage] += seconds
                else:
                    shared += seconds
        return own, shared

    def _after_step(self) -> tuple[list[Seconds], list[Seconds]]:
        """The optimizer's step, and the refresh of stored parameters, by stage."""
        stages = self.resolution.stages
        elements: list[dict[str, int]] = [{} for _ in stages]
        refresh = [0.0 for _ in stages]
        if not self.training:
            return [0.0 for _ in stages], refresh
        for home in self.resolution.parameters.values():
            if not self._updated(home):
                continue
            mesh, dtype = self._mesh(home.home), self.model.master_dtype(home.tensor)
            count = prod(self.model.shard(home.tensor, home.optimizer, mesh))
            elements[home.home][dtype] = elements[home.home].get(dtype, 0) + count
            for stage, site in home.sites.items():
                seconds = self.model.refresh(
                    home.tensor, (mesh, home.optimizer), (self._mesh(stage), site.stored.layout)
                )
                refresh[stage] += seconds
                if stage != home.home:
                    refresh[home.home] += seconds
        step = [sum(self.model.step(n, self._mesh(s), d) for d, n in elements[s].items()) for s in stages]
        return step, refresh

    def _updated(self, home: ParameterHome) -> bool:
        return any(site.gradient is not None for site in home.sites.values())

    def _results_seconds(self) -> Seconds:
        """Bringing loss (and outputs) to every rank; micro-batches are summed, or placed one by one."""
        seconds = 0.0
        for target in self.resolution.results.values():
            source = self.resolution.adapters[target].source
            ends = (self._mesh(source.stage), source.layout), (self._mesh(EVERYWHERE), target.layout)
            shape = self.graph.tensor[source.tensor].shape
            parts = 1 if source.time == R or isinstance(source.time, Partial) else self.count
            seconds += parts * self.model.convert(shape, self.graph.tensor[source.tensor].dtype, *ends)
        return seconds

    # -- order -----------------------------------------------------------------------------------

    def _simulate(self, synchronise: list[Seconds]) -> Timeline:
        lanes = [
            tuple(t for t in lane.parsed if t.phase == "F" or (self.training and self._trained[t.stage]))
            for lane in self.plan.order.lanes
        ]
        reads: dict[tuple[int, int], Seconds] = {}
        returns: dict[tuple[int, int], Seconds] = {}
        for adapter in self.resolution.adapters.values():
            source, target = adapter.source, adapter.target
            if adapter.crosses and target.stage != EVERYWHERE:
                # The producer's task includes the transfer.
                reads[source.stage, target.stage] = 0.0
                if target.gradient is not None and source.gradient is not None:
                    returns[source.stage, target.stage] = 0.0
        seconds = {(s, phase): t.task[phase] for s, t in enumerate(self.tallies) for phase in t.task}
        last = {task.stage: task for lane in lanes for task in lane if task.phase == "B"}
        extra = {task: synchronise[stage] for stage, task in last.items()}
        release = []
        for lane in self.plan.order.lanes:
            stages = [s for s in self.resolution.stages if set(self._mesh(s).devices) & set(lane.devices)]
            release.append(sum(self.tallies[s].before for s in stages))
        return simulate(lanes, seconds, reads, returns, release, extra)

    # -- memory ----------------------------------------------------------------------------------

    def _memory(self, timeline: Timeline) -> tuple[tuple[Bytes, ...], tuple[ParameterBytes, ...]]:
        resolution, model = self.resolution, self.model
        parameters = [ParameterBytes() for _ in resolution.stages]
        updated = [0 for _ in resolution.stages]
        for home in resolution.parameters.values():
            for stage, site in home.sites.items():
                at_home = stage == home.home
                optimizer = home.optimizer if at_home else None
                held = site.gradient if self.training else None
                parameters[stage] += model.parameter_bytes(
                    home.tensor, self._mesh(stage), site.stored.layout, held, optimizer
                )
                if at_home and self._updated(home):
                    elements = prod(model.shard(home.tensor, home.optimizer, self._mesh(stage)))
                    updated[stage] += step_bytes(elements, model.recipe.optimizer, model.master_dtype(home.tensor))
        everywhere = sum(t.bytes for t in self.graph.of_kind("input", "buffer", "constant"))
        activations = {s: self._activations(s) for s in resolution.stages}
        peaks = [0 for _ in resolution.stages]
        for lane, tasks in zip(self.plan.order.lanes, timeline.lanes, strict=True):
            here = [s for s in resolution.stages if set(self._mesh(s).devices) & set(lane.devices)]
            base = everywhere + sum(parameters[s].total for s in here)
            running = max(memory_over_time(tasks, activations), default=0)
            running = max(running, sum(updated[s] for s in here) if self.training else 0)
            peak = base + with_allowance(running)
            if len(self.plan.devices) > 1:
                peak += max(spec.communication for s in here for spec in model.specs(self._mesh(s)))
            for stage in here:
                peaks[stage] = max(peaks[stage], peak)
        return tuple(peaks), tuple(parameters)

    def _activations(self, stage: int) -> StageMemory:
        """What a micro-batch keeps and needs on a stage: from its segments in forward order."""
        resolution, graph, model, mesh = self.resolution, self.graph, self.model, self._mesh(stage)
        uses: list[SegmentUse] = []
        resident: dict[int, Bytes] = {}
        arrived: dict[int, None] = {}
        for segment in resolution.segments[stage]:
            if segment.kind != "main":
                continue
            operators = []
            for name in segment.operators:
                use = model.footprint(graph.operator[name], resolution.choices[stage, name], mesh)
                keys = tuple(map(self._key, resolution.reads[stage, name] + resolution.produces[stage, name]))
                count = len(use.inputs)
                operators.append(
                    replace(use, inputs=keys[:count], outputs=keys[count:], saved=tuple(keys[i] for i in use.saved))
                )
            arriving = []
            gathered = 0
            for version in segment.inputs:
                key = self._key(version)
                size = model.bytes(version.tensor, version.layout, mesh, version.time)
                if self._is_parameter(version):
                    resident[key] = model.bytes(
                        version.tensor, version.layout, mesh, R, model.master_dtype(version.tensor)
                    )
                    gathered += size if self._gathered(version) else 0
                elif self._once(version):
                    resident[key] = 0
                elif key not in arrived and (
                    version in resolution.adapters or graph.tensor[version.tensor].kind != "activation"
                ):
                    arrived[key] = None
                    adapter = resolution.adapters.get(version)
                    arriving.append((key, size, adapter is not None and self._remade(adapter)))
            kept = [self._key(v) for v in (*segment.inputs, *segment.outputs)] if self._has_backward(segment) else []
            uses.append(
                SegmentUse(tuple(operators), tuple(arriving), gathered, tuple(kept), segment.region)
            )  # fmt: skip
        memory = activation_memory(uses, resident, self.training and self._trained[stage])
        return StageMemory(memory.saved, memory.forward, memory.backward)

    def _key(self, version: Version) -> int:
        """The number of the buffer: versions with equal data are one."""
        found = self._seen.get(id(version))
        if found is None:
            data = (version.tensor, version.layout, version.time)
            found = self._seen[id(version)] = self._buffers.setdefault(data, len(self._buffers))
        return found
