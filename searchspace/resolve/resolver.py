"""The resolver: checks a plan and derives layouts and adapters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from searchspace.errors import IllegalPlanError
from searchspace.graph import Graph, Operator
from searchspace.layout import Layout, P, Placement, R, Split, canonical, demanded_gradient
from searchspace.mesh import Mesh
from searchspace.microbatch import time_axis
from searchspace.plan import Plan
from searchspace.resolve.gradients import deferred_axes, delivered, with_gradient
from searchspace.resolve.legality import can_replicate, split_problem
from searchspace.resolve.parameters import place_parameters
from searchspace.resolve.resolution import EVERYWHERE, Adapter, ParameterHome, Resolution, StageIndex, Version
from searchspace.resolve.segments import Segmentation, in_graph_order
from searchspace.rule import Choice

Purpose = Literal["step", "outputs", "evaluation"]


def resolve(graph: Graph, plan: Plan, *, purpose: Purpose = "step") -> Resolution:
    """Spell ``plan`` out for ``graph``.

    ``purpose`` selects what every rank receives, and what is computed: ``"step"`` is the whole graph by the
    plan's recipe (in training the loss, with gradients; in inference all outputs); the others are forwards
    without gradients, and without the operators that they do not need: ``"outputs"`` gives the outputs and
    updates buffers, ``"evaluation"`` gives the loss (the outputs of a graph without one) and does not.
    Raises IllegalPlanError naming the operator and the rule that the plan contradicts.
    """
    return _Resolver(graph, plan, purpose).run()


@dataclass
class _Resolver:
    graph: Graph
    plan: Plan
    purpose: Purpose
    choices: dict[tuple[StageIndex, str], tuple[Choice, ...]] = field(default_factory=dict)
    reads: dict[tuple[StageIndex, str], tuple[Version, ...]] = field(default_factory=dict)
    produces: dict[tuple[StageIndex, str], tuple[Version, ...]] = field(default_factory=dict)
    adapters: dict[Version, Adapter] = field(default_factory=dict)
    buffers: dict[str, dict[StageIndex, Version]] = field(default_factory=dict)

    def run(self) -> Resolution:
        graph, plan = self.graph, self.plan
        self.time = time_axis(graph, plan.transformation.micro_batches)
        trains = plan.recipe.mode == "train" and self.purpose == "step"
        self.gradients = with_gradient(graph) if trains else frozenset()
        self.stages_of = self._assign()
        for index, stage in enumerate(plan.placement.stages):
            for name in in_graph_order(graph, stage.operators):
                self.choices[index, name] = self._choose(index, stage.mesh, graph.operator[name])
        self.deferred = deferred_axes(graph, self.choices, self.gradients)
        for stage_index, name in self.choices:
            self._versions(stage_index, graph.operator[name])
        parameters = place_parameters(graph, plan, self.reads)  # where they live does not depend on the purpose
        self._leave_out()
        self._adapt(parameters)
        results = self._results()
        segmentation = Segmentation(graph, plan, self.time, self.reads, self.produces, self.adapters)
        segments = tuple(segmentation.of_stage(s, results) for s in range(len(plan.placement.stages)))
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

    def _versions(self, stage: StageIndex, op: Operator) -> None:
        choices = self.choices[stage, op.name]
        mesh = self.plan.placement.stages[stage].mesh

        def settled(name: str, layout: Layout, time: Placement) -> Layout:
            return canonical(self.graph.tensor[name].shape, layout, mesh.shape, time, self.time.micro_batches)

        passed = self.deferred.get((stage, op.outputs[0])) if op.outputs else None
        gradients = delivered(choices, op, passed)
        differentiable = any(name in self.gradients for name in op.outputs)
        reads = []
        for i, name in enumerate(op.inputs):
            time = self.time.consumed(op, i)
            layout = settled(name, tuple(c.inputs[i] for c in choices), time)
            gradient = settled(name, gradients[i], time) if name in self.gradients and differentiable else None
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

    def _wanted(self) -> list[str]:
        """The tensors that every rank receives."""
        graph = self.graph
        wanted = [graph.loss] if graph.loss and self.purpose != "outputs" else []
        if not wanted or (self.purpose == "step" and self.plan.recipe.mode == "inference"):
            wanted += [name for name in dict.fromkeys(graph.outputs) if name not in wanted]
        return wanted

    def _leave_out(self) -> None:
        """Forget the operators that the purpose does not need."""
        if self.purpose == "step":
            return
        needed = set(self._wanted())
        if self.purpose == "outputs":
            needed.update(new for _, new in self.graph.buffer_updates)
        for op in reversed(self.graph.operators):
            if not needed.isdisjoint(op.outputs):
                needed.update(op.inputs)
        for versions in (self.choices, self.reads, self.produces):
            for key in [key for key in versions if needed.isdisjoint(self.graph.operator[key[1]].outputs)]:
                del versions[key]

    # -- adapters --------------------------------------------------------------------------------

    def _adapt(self, parameters: Mapping[str, ParameterHome]) -> None:
        for (stage, name), versions in self.reads.items():
            self.reads[stage, name] = tuple(
                self._connect(version, self._source(version.tensor, stage, parameters), name) for version in versions
            )
        self._share()

    def _share(self) -> None:
        """Who needs no gradient reads what was converted for a reader that does, if that lies alike."""
        converted: dict[Version, Version] = {}
        for target in self.adapters:
            if target.gradient is not None:
                converted.setdefault(replace(target, gradient=None), target)
        for key, versions in self.reads.items():
            self.reads[key] = tuple(converted[v] if v in self.adapters and v in converted else v for v in versions)
        for version in converted:
            self.adapters.pop(version, None)

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
        results = {}
        for name in self._wanted():
            if graph.tensor[name].kind == "activation":
                op = graph.producer[name]
                stage = self.stages_of[op.name][-1]
                source = self.produces[stage, op.name][op.outputs.index(name)]
                target = Version(name, EVERYWHERE, (R,), None, source.time)
                self.adapters[target] = Adapter(source, target)
                results[name] = target
        return results
