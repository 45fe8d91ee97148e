"""Resolution: what a plan means for a graph, before any instruction exists.

``resolve(graph, plan)`` checks that the plan is legal and derives, for every operator of every
stage, the layouts of its inputs and outputs; for every edge the *adapter* between producer and
consumer, forward and backward; for every parameter where it is stored, accumulated and updated; and
the communication-free *segments*.  The cost model prices a resolution, the materializer turns it
into a program: both see the same communication.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from searchspace.errors import IllegalPlanError
from searchspace.graph import Graph, Operator, Tensor
from searchspace.layout import (
    Layout,
    P,
    Partial,
    Placement,
    R,
    Split,
    canonical,
    delivered_gradient,
    demanded_gradient,
    parse_placement,
)
from searchspace.mesh import Mesh
from searchspace.microbatch import TimeAxis, time_axis
from searchspace.plan import ParameterPlan, Plan
from searchspace.rule import Choice

StageIndex = int
EVERYWHERE: StageIndex = -1
"""The pseudo-stage of results that every rank receives."""

Kind = Literal["once", "main"]


@dataclass(frozen=True)
class Version:
    """A tensor as one stage holds it: forward layout, gradient layout (None: no gradient), time axis."""

    tensor: str
    stage: StageIndex
    layout: Layout
    gradient: Layout | None
    time: Placement


@dataclass(frozen=True)
class Adapter:
    """Makes ``target`` from ``source`` (forward), and the gradient of ``source`` from that of ``target``."""

    source: Version
    target: Version

    @property
    def crosses(self) -> bool:
        """Whether it connects two stages."""
        return self.source.stage != self.target.stage


@dataclass(frozen=True)
class Site:
    """A parameter (or buffer) on one stage: how it is stored, and how its gradient accumulates there."""

    stored: Version
    gradient: Layout | None


@dataclass(frozen=True)
class ParameterHome:
    """Where a parameter lives: its sites by stage, and the layout of its optimizer state at ``home``."""

    tensor: str
    home: StageIndex
    optimizer: Layout
    sites: Mapping[StageIndex, Site]


@dataclass(frozen=True)
class Segment:
    """A run of operators of one stage without communication inside.

    ``inputs`` are versions made elsewhere (activations after their adapters, parameters as used),
    ``outputs`` the versions produced here that somebody else reads.  ``region`` is the index of
    the recompute region, or None.
    """

    name: str
    stage: StageIndex
    kind: Kind
    operators: tuple[str, ...]
    inputs: tuple[Version, ...]
    outputs: tuple[Version, ...]
    region: int | None = None


@dataclass(frozen=True)
class Resolution:
    """A legal plan, spelled out.

    Fields
        reads[stage, operator]: the version of each input; produces[...]: of each output.
        choices[stage, operator]: the rule's choice on each axis of the stage's mesh.
        adapters: by target version; identical versions need none.
        segments: by stage, in forward order.
        results: versions on every rank: of the loss (training) or of loss and outputs (inference).
        gradients: tensors whose gradient is computed.
    """

    graph: Graph
    plan: Plan
    time: TimeAxis
    choices: Mapping[tuple[StageIndex, str], tuple[Choice, ...]]
    reads: Mapping[tuple[StageIndex, str], tuple[Version, ...]]
    produces: Mapping[tuple[StageIndex, str], tuple[Version, ...]]
    adapters: Mapping[Version, Adapter]
    parameters: Mapping[str, ParameterHome]
    buffers: Mapping[str, Mapping[StageIndex, Version]]
    segments: tuple[tuple[Segment, ...], ...]
    results: Mapping[str, Version]
    gradients: frozenset[str]

    @property
    def training(self) -> bool:
        return self.plan.recipe.mode == "train"

    @property
    def stages(self) -> range:
        return range(len(self.plan.placement.stages))

    def mesh(self, stage: StageIndex) -> Mesh:
        """The mesh of a stage; of ``EVERYWHERE`` all devices on one axis."""
        if stage == EVERYWHERE:
            return self._world
        return self.plan.placement.stages[stage].mesh

    @cached_property
    def _world(self) -> Mesh:
        return Mesh((("world", len(self.plan.devices)),), self.plan.devices)

    @cached_property
    def adapters_from(self) -> Mapping[Version, tuple[Adapter, ...]]:
        """Adapters by source version."""
        found: dict[Version, list[Adapter]] = {}
        for adapter in self.adapters.values():
            found.setdefault(adapter.source, []).append(adapter)
        return {source: tuple(adapters) for source, adapters in found.items()}


def resolve(graph: Graph, plan: Plan, *, results: Literal["loss", "all"] = "loss") -> Resolution:
    """Spell ``plan`` out for ``graph``.

    ``results`` selects what every rank receives: the loss of a training step, or the loss and all
    outputs of a forward without gradients.
    Raises IllegalPlanError naming the operator and the rule that the plan contradicts.
    """
    return _Resolver(graph, plan, results).run()


@dataclass
class _Resolver:
    graph: Graph
    plan: Plan
    want: str
    choices: dict[tuple[StageIndex, str], tuple[Choice, ...]] = field(default_factory=dict)
    reads: dict[tuple[StageIndex, str], tuple[Version, ...]] = field(default_factory=dict)
    produces: dict[tuple[StageIndex, str], tuple[Version, ...]] = field(default_factory=dict)
    adapters: dict[Version, Adapter] = field(default_factory=dict)
    buffers: dict[str, dict[StageIndex, Version]] = field(default_factory=dict)

    def run(self) -> Resolution:
        graph, plan = self.graph, self.plan
        self.time = time_axis(graph, plan.transformation.micro_batches)
        trains = plan.recipe.mode == "train" and self.want == "loss"
        self.gradients = _with_gradient(graph) if trains else frozenset()
        self.stages_of = self._assign()
        for index, stage in enumerate(plan.placement.stages):
            for name in _in_graph_order(graph, stage.operators):
                self.choices[index, name] = self._choose(index, stage.mesh, graph.operator[name])
        self.deferred = self._deferred()
        for stage_index, name in self.choices:
            self._versions(stage_index, graph.operator[name])
        parameters = self._parameters()
        self._adapt(parameters)
        results = self._results()
        segments = tuple(self._segments(index, results) for index in range(len(plan.placement.stages)))
        return Resolution(
            graph,
            plan,
            self.time,
            self.choices,
            self.reads,
            self.produces,
            self.adapters,
            parameters,
            self.buffers,
            segments,
            results,
            self.gradients,
        )

    # -- op-assign -------------------------------------------------------------------------------

    def _assign(self) -> dict[str, tuple[StageIndex, ...]]:
        graph, plan = self.graph, self.plan
        found: dict[str, list[StageIndex]] = {op.name: [] for op in graph.operators}
        for index, stage in enumerate(plan.placement.stages):
            for name in stage.operators:
                if name not in found:
                    raise IllegalPlanError(f"stage {index} has an operator {name!r} that the model does not have")
                if index in found[name]:
                    raise IllegalPlanError(f"stage {index} lists operator {name!r} twice")
                found[name].append(index)
        for op in graph.operators:
            if not found[op.name]:
                raise IllegalPlanError(f"operator {op.name!r} is in no stage")
            if len(found[op.name]) > 1 and not can_replicate(graph, op):
                raise IllegalPlanError(
                    f"operator {op.name!r} is in stages {found[op.name]}; only an operator that needs no "
                    "gradient, draws no random numbers and reads no parameter may be in several stages"
                )
        for name in plan.transformation.operators:
            if name not in found:
                raise IllegalPlanError(f"the transformation splits {name!r}, which the model does not have")
        known = {alias: t for t in graph.parameters for alias in (t.source, *t.aliases)}
        for name in plan.transformation.parameters:
            if name not in known:
                raise IllegalPlanError(f"the transformation places parameter {name!r}, which the model does not have")
        return {name: tuple(stages) for name, stages in found.items()}

    # -- op-trans --------------------------------------------------------------------------------

    def _choose(self, stage: StageIndex, mesh: Mesh, op: Operator) -> tuple[Choice, ...]:
        labels = self.plan.transformation.operators.get(op.name, {})
        for axis in labels:
            if axis not in mesh.axis_names and len(self.stages_of[op.name]) == 1:
                raise IllegalPlanError(
                    f"operator {op.name!r} is split over axis {axis!r}; its stage {stage} has axes {mesh.axis_names}"
                )
        chosen = []
        for axis in mesh.axis_names:
            label = labels.get(axis, "") if mesh.axes[mesh.axis_index(axis)][1] > 1 else ""
            if label not in op.rule.choices:
                raise IllegalPlanError(
                    f"operator {op.name!r} ({op.target}) cannot be split along {label!r} over axis {axis!r}: "
                    f"its rule {op.rule.text!r} allows {sorted(op.rule.choices)}"
                )
            chosen.append(op.rule.choices[label])
        choices = tuple(chosen)
        problem = split_problem(self.graph, op, choices, mesh, self.time)
        if problem:
            raise IllegalPlanError(f"operator {op.name!r} ({op.target}): {problem}")
        return choices

    def _deferred(self) -> dict[tuple[StageIndex, str], tuple[bool, ...]]:
        """Axes on which the gradient of a tensor stays partial until it reaches the parameters.

        Backward is linear in the gradient, so an operator that is replicated may pass partial sums
        on.  Worth it where only parameters lie behind it (a position embedding): they are
        synchronised once a step anyway.
        """
        graph = self.graph
        data = {tensor.name for tensor in graph.of_kind("input")}
        derived: set[str] = set()
        for op in graph.operators:
            if op.random or any(name in data for name in op.inputs):
                data.update(op.outputs)
            else:
                derived.update(name for name in op.outputs if name in self.gradients)
        found: dict[tuple[StageIndex, str], tuple[bool, ...]] = {}
        for (stage, name), choices in reversed(self.choices.items()):
            op = graph.operator[name]
            if len(op.outputs) != 1 or op.outputs[0] not in derived:
                continue
            readers = [
                (reader, i) for reader, i in graph.consumers[op.outputs[0]] if reader.outputs[0] in self.gradients
            ]
            if all((stage, reader.name) in self.choices for reader, _ in readers):
                partial = [self._delivered(stage, reader, found)[i] for reader, i in readers]
                found[stage, op.outputs[0]] = tuple(
                    not choice.label and any(layout[axis] == P for layout in partial)
                    for axis, choice in enumerate(choices)
                )
        return found

    def _delivered(
        self, stage: StageIndex, op: Operator, deferred: Mapping[tuple[StageIndex, str], tuple[bool, ...]]
    ) -> list[Layout]:
        """The gradient layout that an operator delivers for each of its inputs."""
        choices = self.choices[stage, op.name]
        passed = deferred.get((stage, op.outputs[0]), (False,) * len(choices)) if op.outputs else ()
        by_axis = [
            (P,) * len(op.inputs) if partial else delivered_gradient(choice.inputs, choice.outputs)
            for choice, partial in zip(choices, passed, strict=True)
        ]
        return [tuple(axis[i] for axis in by_axis) for i in range(len(op.inputs))]

    def _versions(self, stage: StageIndex, op: Operator) -> None:
        choices = self.choices[stage, op.name]
        mesh = self.plan.placement.stages[stage].mesh

        def settled(name: str, layout: Layout, time: Placement) -> Layout:
            return canonical(self.graph.tensor[name].shape, layout, mesh.shape, time, self.time.micro_batches)

        delivered = self._delivered(stage, op, self.deferred)
        differentiable = any(name in self.gradients for name in op.outputs)
        reads = []
        for i, name in enumerate(op.inputs):
            time = self.time.consumed(op, i)
            layout = settled(name, tuple(c.inputs[i] for c in choices), time)
            gradient = settled(name, delivered[i], time) if name in self.gradients and differentiable else None
            reads.append(Version(name, stage, layout, gradient, time))
        produces = []
        for i, name in enumerate(op.outputs):
            layout = settled(name, tuple(c.outputs[i] for c in choices), self.time.placement[name])
            partial = self.deferred.get((stage, name), (False,) * len(layout))
            demanded = tuple(P if d else g for g, d in zip(demanded_gradient(layout), partial, strict=True))
            gradient = demanded if name in self.gradients else None
            produces.append(Version(name, stage, layout, gradient, self.time.placement[name]))
        self.reads[stage, op.name] = tuple(reads)
        self.produces[stage, op.name] = tuple(produces)

    # -- parameters ------------------------------------------------------------------------------

    def _parameters(self) -> dict[str, ParameterHome]:
        readers: dict[str, dict[StageIndex, list[Version]]] = {}
        for (stage, _), versions in self.reads.items():
            for version in versions:
                if self.graph.tensor[version.tensor].kind == "parameter":
                    readers.setdefault(version.tensor, {}).setdefault(stage, []).append(version)
        placed: dict[str, ParameterPlan] = self.plan.transformation.parameters
        found = {}
        for tensor in self.graph.parameters:
            names = [n for n in (tensor.source, *tensor.aliases) if n in placed]
            found[tensor.name] = self._parameter(
                tensor, placed[names[0]] if names else ParameterPlan(), readers.get(tensor.name, {})
            )
        return found

    def _parameter(
        self, tensor: Tensor, plan: ParameterPlan, readers: Mapping[StageIndex, Sequence[Version]]
    ) -> ParameterHome:
        stages = sorted(readers) or [0]
        home = stages[0] if plan.home is None else plan.home
        if home not in stages:
            raise IllegalPlanError(f"parameter {tensor.source!r} has its home at stage {home}; stages {stages} use it")
        for stage in plan.sites:
            if stage not in stages:
                raise IllegalPlanError(
                    f"parameter {tensor.source!r} is placed on stage {stage}; stages {stages} use it"
                )
        sites = {}
        for stage in stages:
            mesh = self.plan.placement.stages[stage].mesh
            given = plan.sites.get(stage)
            uses = readers.get(stage, ())
            stored = self._layout(tensor, mesh, given.stored if given else {}, _stored_default(uses, mesh))
            gradient = None
            if any(use.gradient is not None for use in uses):
                default = _gradient_default(uses, mesh)
                gradient = self._layout(tensor, mesh, given.gradient if given else {}, default)
            sites[stage] = Site(Version(tensor.name, stage, stored, gradient, R), gradient)
        mesh = self.plan.placement.stages[home].mesh
        optimizer = self._layout(tensor, mesh, plan.optimizer, sites[home].stored.layout)
        for what, layout in (("optimizer", optimizer), *(("stored", s.stored.layout) for s in sites.values())):
            if any(isinstance(placement, Partial) for placement in layout):
                raise IllegalPlanError(
                    f"parameter {tensor.source!r}: {what} placements must be R or S, got a partial sum"
                )
        return ParameterHome(tensor.name, home, optimizer, sites)

    def _layout(self, tensor: Tensor, mesh: Mesh, given: Mapping[str, str], default: Layout) -> Layout:
        for axis in given:
            if axis not in mesh.axis_names:
                raise IllegalPlanError(
                    f"parameter {tensor.source!r} is placed on axis {axis!r}; the mesh has {mesh.axis_names}"
                )
        layout = tuple(
            parse_placement(given[axis]) if axis in given else default[i] for i, axis in enumerate(mesh.axis_names)
        )
        problem = layout_problem(tensor.shape, layout, mesh)
        if problem:
            raise IllegalPlanError(f"parameter {tensor.source!r}: {problem}")
        return canonical(tensor.shape, layout, mesh.shape)

    # -- adapters --------------------------------------------------------------------------------

    def _adapt(self, parameters: Mapping[str, ParameterHome]) -> None:
        for (stage, name), versions in self.reads.items():
            self.reads[stage, name] = tuple(
                self._connect(version, self._source(version.tensor, stage, parameters), name) for version in versions
            )

    def _source(self, name: str, stage: StageIndex, parameters: Mapping[str, ParameterHome]) -> Version:
        tensor = self.graph.tensor[name]
        if tensor.kind == "parameter":
            return parameters[name].sites[stage].stored
        if tensor.kind != "activation":
            version = Version(name, stage, (R,) * len(self.plan.placement.stages[stage].axes), None, R)
            if tensor.kind == "buffer":
                self.buffers.setdefault(name, {})[stage] = version
            return version
        op = self.graph.producer[name]
        stages = self.stages_of[op.name]
        origin = stage if stage in stages else stages[0]
        if origin > stage >= 0:
            raise IllegalPlanError(
                f"stage {stage} reads {name} of operator {op.name!r} in the later stage {origin}; "
                "stages must be in forward order"
            )
        return self.produces[origin, op.name][op.outputs.index(name)]

    def _connect(self, target: Version, source: Version, reader: str) -> Version:
        """The version to read: the source itself where nothing has to be converted either way."""
        same = (source.stage, source.layout, source.time) == (target.stage, target.layout, target.time)
        if same and target.gradient in (None, source.gradient):
            return source
        if target in self.adapters:
            return target
        if isinstance(source.time, Split) and source.time != target.time:
            raise IllegalPlanError(
                f"operator {reader!r} needs all micro-batches of {source.tensor} at once; micro_batches must be 1"
            )
        self.adapters[target] = Adapter(source, target)
        return target

    def _results(self) -> dict[str, Version]:
        graph = self.graph
        wanted = [graph.loss] if graph.loss else []
        if self.want == "all" or self.plan.recipe.mode == "inference":
            wanted += [name for name in graph.outputs if name not in wanted]
        results = {}
        for name in wanted:
            if graph.tensor[name].kind == "activation":
                op = graph.producer[name]
                stage = self.stages_of[op.name][-1]
                source = self.produces[stage, op.name][op.outputs.index(name)]
                target = Version(name, EVERYWHERE, (R,), None, source.time)
                self.adapters[target] = Adapter(source, target)
                results[name] = target
        return results

    # -- segments --------------------------------------------------------------------------------

    def _segments(self, stage: StageIndex, results: Mapping[str, Version]) -> tuple[Segment, ...]:
        graph = self.graph
        names = _in_graph_order(graph, self.plan.placement.stages[stage].operators)
        kinds = {name: self._kind(name) for name in names}
        recompute = self.plan.transformation.recompute
        regions = _regions(graph, names, (*recompute, *self.plan.transformation.separate))
        levels = self._levels(stage, names, kinds, regions)
        order: dict[Kind, int] = {"once": 0, "main": 1}
        groups: dict[tuple[int, int, int], list[str]] = {}
        for name in names:
            region = regions.get(name)
            key = (order[kinds[name]], levels[name], -1 if region is None else region)
            groups.setdefault(key, []).append(name)
        segments = []
        needed = self._read_elsewhere(stage, results)
        where = {name: key for key, members in groups.items() for name in members}
        for number, key in enumerate(sorted(groups)):
            members = groups[key]
            inputs: dict[Version, None] = {}
            outputs: dict[Version, None] = {}
            inside = {version for name in members for version in self.produces[stage, name]}
            for name in members:
                for version in self.reads[stage, name]:
                    if version not in inside:
                        inputs.setdefault(version)
                for version in self.produces[stage, name]:
                    readers = needed.get(version, [])
                    if any(reader is None or where[reader] != key for reader in readers):
                        outputs.setdefault(version)
            kind = next(k for k, i in order.items() if i == key[0])
            segments.append(
                Segment(
                    f"stage{stage}_{number}",
                    stage,
                    kind,
                    tuple(members),
                    tuple(inputs),
                    tuple(outputs),
                    key[2] if 0 <= key[2] < len(recompute) else None,
                )
            )
        return tuple(segments)

    def _kind(self, name: str) -> Kind:
        return "once" if name in self.time.once else "main"

    def _levels(
        self, stage: StageIndex, names: Sequence[str], kinds: Mapping[str, Kind], regions: Mapping[str, int]
    ) -> dict[str, int]:
        """As soon as possible; what depends on no activation moves down to its first reader."""
        graph = self.graph
        levels: dict[str, int] = {}
        anchored: set[str] = set()
        readers: dict[str, list[tuple[str, int]]] = {name: [] for name in names}
        for name in names:
            level = 0
            for version in self.reads[stage, name]:
                op = graph.producer.get(version.tensor)
                if op is None:
                    if graph.tensor[version.tensor].kind == "input":
                        anchored.add(name)
                    continue
                if op.name not in levels or kinds[op.name] != kinds[name]:
                    anchored.add(name)
                    continue
                bump = int(version in self.adapters or regions.get(op.name) != regions.get(name))
                level = max(level, levels[op.name] + bump)
                readers[op.name].append((name, bump))
                if op.name in anchored:
                    anchored.add(name)
            levels[name] = level
        for name in reversed(names):
            if name not in anchored and readers[name]:
                levels[name] = max(levels[name], min(levels[reader] - bump for reader, bump in readers[name]))
        return levels

    def _read_elsewhere(self, stage: StageIndex, results: Mapping[str, Version]) -> dict[Version, list[str | None]]:
        """For each version of this stage who reads it: operators directly, None for adapters and results."""
        found: dict[Version, list[str | None]] = {}
        for (where, name), versions in self.reads.items():
            if where == stage:
                for version in versions:
                    found.setdefault(version, []).append(name)
        for adapter in self.adapters.values():
            if adapter.source.stage == stage:
                found.setdefault(adapter.source, []).append(None)
        updated = {new for _, new in self.graph.buffer_updates}
        for (where, _), versions in self.produces.items():
            if where == stage:
                for version in versions:
                    if version.tensor in updated or version.tensor == self.graph.loss:
                        found.setdefault(version, []).append(None)
        return found


# -- predicates --------------------------------------------------------------------------------------


def can_replicate(graph: Graph, op: Operator) -> bool:
    """Whether several stages may each run ``op``: cheap to repeat, and the same everywhere."""
    return (
        not op.random
        and not any(graph.tensor[name].requires_grad for name in op.outputs)
        and not any(graph.tensor[name].kind == "parameter" for name in op.inputs)
    )


def split_problem(
    graph: Graph, op: Operator, choices: Sequence[Choice], mesh: Mesh, time: TimeAxis | None = None
) -> str | None:
    """Why ``op`` cannot be split by ``choices`` over ``mesh``, or None when it can.

    Every identifier needs at least as many whole units as parts, also in the smallest micro-batch.
    """
    parts: dict[str, int] = {}
    for choice, size in zip(choices, mesh.shape, strict=True):
        if choice.label and not choice.label.startswith("+") and size > 1:
            parts[choice.label] = parts.get(choice.label, 1) * size
    for identifier, count in parts.items():
        units = op.rule.units(identifier, graph.shapes(op))
        if time is not None and time.micro_batches > 1 and time.labels[op.name] == identifier:
            groups = (graph.batch or 1) // time.granule
            units = units * (groups // time.micro_batches) // groups
        if units < count:
            return (
                f"its rule {op.rule.text!r} has {units} units of {identifier!r}"
                f"{' in a micro-batch' if time is not None and time.labels.get(op.name) == identifier else ''}"
                f" for {count} parts (a part would be empty)"
            )
    return None


def layout_problem(shape: Sequence[int], layout: Layout, mesh: Mesh) -> str | None:
    """Why a tensor of ``shape`` cannot lie in ``layout`` on ``mesh``, or None when it can."""
    parts: dict[int, int] = {}
    for placement, size in zip(layout, mesh.shape, strict=True):
        if isinstance(placement, Split):
            if placement.dim >= len(shape):
                return f"{placement} splits a dimension that shape {list(shape)} does not have"
            if shape[placement.dim] % placement.unit:
                return f"{placement} cuts whole units of {placement.unit} in an extent of {shape[placement.dim]}"
            parts[placement.dim] = parts.get(placement.dim, 1) * size
            if shape[placement.dim] // placement.unit < parts[placement.dim]:
                return (
                    f"{placement} cuts an extent of {shape[placement.dim]} into {parts[placement.dim]} parts "
                    "(a part would be empty)"
                )
    return None


def _with_gradient(graph: Graph) -> frozenset[str]:
    """Tensors whose gradient with respect to the loss is computed."""
    found = {graph.loss} if graph.loss and graph.tensor[graph.loss].requires_grad else set()
    for op in reversed(graph.operators):
        if any(name in found for name in op.outputs):
            found.update(name for name in op.inputs if graph.tensor[name].requires_grad)
    return frozenset(name for name in found if name is not None)


def _stored_default(uses: Sequence[Version], mesh: Mesh) -> Layout:
    """As the first reader reads it; a partial or disputed axis is replicated."""
    if not uses:
        return (R,) * len(mesh.axes)
    agreed = [p if all(u.layout[i] == p for u in uses) else R for i, p in enumerate(uses[0].layout)]
    return tuple(R if isinstance(p, Partial) else p for p in agreed)


def _gradient_default(uses: Sequence[Version], mesh: Mesh) -> Layout:
    """Partial where a reader delivers partial sums, else as all readers deliver it."""
    delivered = [use.gradient for use in uses if use.gradient is not None]
    placements: list[Placement] = []
    for axis in range(len(mesh.axes)):
        seen = [layout[axis] for layout in delivered]
        same = all(p == seen[0] for p in seen)
        placements.append(seen[0] if same else P if P in seen else R)
    return tuple(placements)


def _regions(graph: Graph, names: Sequence[str], patterns: Sequence[str]) -> dict[str, int]:
    """The region of each operator that is in one (a stage's share of a region is a region)."""
    found: dict[str, int] = {}
    position = {op.name: i for i, op in enumerate(graph.operators)}
    for index, pattern in enumerate(patterns):
        first, dots, last = pattern.partition("..")
        for end in (first, last):
            if dots and end not in position:
                raise IllegalPlanError(f"region {pattern!r} names an operator {end!r} that the model lacks")
        hit = False
        for name in position if not dots else ():
            path = graph.operator[name].module
            if name == pattern or path == pattern or path.startswith(pattern + "."):
                hit = True
        if not dots and not hit:
            raise IllegalPlanError(f"region {pattern!r} matches no operator or module")
        for name in names:
            path = graph.operator[name].module
            if (
                position[first] <= position[name] <= position[last]
                if dots
                else name == pattern or path == pattern or path.startswith(pattern + ".")
            ):
                found.setdefault(name, index)
    return found


def _in_graph_order(graph: Graph, names: Iterable[str]) -> list[str]:
    wanted = set(names)
    return [op.name for op in graph.operators if op.name in wanted]
