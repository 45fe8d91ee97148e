"""Where parameters live: stored, accumulated and updated, by the plan or as their readers suggest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from searchspace.errors import IllegalPlanError
from searchspace.graph import Graph, Tensor
from searchspace.layout import Layout, P, Partial, Placement, R, canonical, parse_placement
from searchspace.mesh import Mesh
from searchspace.plan import ParameterPlan, Plan
from searchspace.resolve.legality import layout_problem
from searchspace.resolve.resolution import ParameterHome, Site, StageIndex, Version


def place_parameters(
    graph: Graph, plan: Plan, reads: Mapping[tuple[StageIndex, str], tuple[Version, ...]]
) -> dict[str, ParameterHome]:
    """The home of every parameter, given how the operators read it."""
    readers: dict[str, dict[StageIndex, list[Version]]] = {}
    for (stage, _), versions in reads.items():
        for version in versions:
            if graph.tensor[version.tensor].kind == "parameter":
                readers.setdefault(version.tensor, {}).setdefault(stage, []).append(version)
    placed = plan.transformation.parameters
    found = {}
    for tensor in graph.parameters:
        names = [n for n in (tensor.source, *tensor.aliases) if n in placed]
        found[tensor.name] = _home(
            plan, tensor, placed[names[0]] if names else ParameterPlan(), readers.get(tensor.name, {})
        )
    return found


def _home(
    plan: Plan, tensor: Tensor, placed: ParameterPlan, readers: Mapping[StageIndex, Sequence[Version]]
) -> ParameterHome:
    stages = sorted(readers) or [0]
    home = stages[0] if placed.home is None else placed.home
    if home not in stages:
        raise IllegalPlanError(f"parameter {tensor.source!r} has its home at stage {home}; stages {stages} use it")
    for stage in placed.sites:
        if stage not in stages:
            raise IllegalPlanError(f"parameter {tensor.source!r} is placed on stage {stage}; stages {stages} use it")
    sites = {}
    for stage in stages:
        mesh = plan.placement.stages[stage].mesh
        given = placed.sites.get(stage)
        uses = readers.get(stage, ())
        stored = _layout(tensor, mesh, given.stored if given else {}, _stored_default(uses, mesh))
        gradient = None
        if any(use.gradient is not None for use in uses):
            default = _gradient_default(uses, mesh)
            gradient = _layout(tensor, mesh, given.gradient if given else {}, default)
        sites[stage] = Site(Version(tensor.name, stage, stored, gradient, R), gradient)
    mesh = plan.placement.stages[home].mesh
    optimizer = _layout(tensor, mesh, placed.optimizer, sites[home].stored.layout)
    for what, layout in (("optimizer", optimizer), *(("stored", s.stored.layout) for s in sites.values())):
        if any(isinstance(placement, Partial) for placement in layout):
            raise IllegalPlanError(f"parameter {tensor.source!r}: {what} placements must be R or S, got a partial sum")
    return ParameterHome(tensor.name, home, optimizer, sites)


def _layout(tensor: Tensor, mesh: Mesh, given: Mapping[str, str], default: Layout) -> Layout:
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
