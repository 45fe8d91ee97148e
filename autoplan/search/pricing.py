"""Selection priced by the cost model."""

from __future__ import annotations

from math import prod

from autoplan.search.selection import Figures, ParameterLayouts
from autoplan.search.strategies import Strategy
from costmodel.model import CostModel
from costmodel.shards import shape_bytes
from searchspace.graph import Graph, Operator, Tensor
from searchspace.layout import Layout
from searchspace.mesh import Mesh
from searchspace.microbatch import TimeAxis


class ModelPricing:
    """The cost model's figures in selection's terms.

    What autograd saves is counted by storage: a tensor that several operators save, or views of it,
    counts for the first of them.
    """

    def __init__(self, model: CostModel) -> None:
        self.model = model
        self._saver = _first_savers(model.graph)

    def operator(self, op: Operator, strategy: Strategy, mesh: Mesh, time: TimeAxis) -> Figures:
        model = self.model
        cost = model.operator(op, strategy, mesh)
        saved = 0
        if cost.saved:
            use, names = model.footprint(op, strategy, mesh), op.inputs + op.outputs
            local = model.local_shapes(op, strategy, mesh)
            mine = {names[i]: i for i in use.saved if self._saver.get(names[i]) == op.name}
            saved = use.extra + sum(shape_bytes(local[i], model.dtypes[name]) for name, i in mine.items())
        return Figures(forward=cost.forward, backward=cost.backward, saved=float(saved))

    def parameter(self, tensor: Tensor, layouts: ParameterLayouts, mesh: Mesh) -> Figures:
        model = self.model
        step = 0.0
        if layouts.gradient is not None:
            count = prod(model.shard(tensor.name, layouts.optimizer, mesh))
            step += model.step(count, mesh, model.master_dtype(tensor.name))
            if layouts.optimizer == layouts.stored:
                step += model.refresh(tensor.name, (mesh, layouts.optimizer), (mesh, layouts.stored))
        held_bytes = model.parameter_bytes(tensor.name, mesh, layouts.stored, layouts.gradient, layouts.optimizer)
        return Figures(step=step, resident=float(held_bytes.total))

    def shard_bytes(self, tensor: Tensor, layout: Layout, mesh: Mesh, time: TimeAxis) -> float:
        return float(self.model.bytes(tensor.name, layout, mesh, time.placement[tensor.name]))


def _first_savers(graph: Graph) -> dict[str, str]:
    """For each activation, the first operator that saves its storage (views share one)."""
    root: dict[str, str] = {}
    for op in graph.operators:
        if op.family == "view" and op.inputs:
            root.update((name, root.get(op.inputs[0], op.inputs[0])) for name in op.outputs)
    first: dict[str, str] = {}
    for op in graph.operators:
        for name in op.saved:
            if graph.tensor[name].kind == "activation":
                first.setdefault(root.get(name, name), op.name)
    return {t.name: first[root.get(t.name, t.name)] for t in graph.tensors if root.get(t.name, t.name) in first}
