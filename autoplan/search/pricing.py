"""Selection priced by the cost model."""

from __future__ import annotations

from math import prod

from autoplan.search.selection import Figures, ParameterLayouts
from autoplan.search.strategies import Strategy
from costmodel.model import CostModel
from searchspace.graph import Operator, Tensor
from searchspace.layout import Layout
from searchspace.mesh import Mesh
from searchspace.microbatch import TimeAxis


class ModelPricing:
    """The cost model's figures in selection's terms.

    What autograd saves is counted by storage, with the operator that produces it: a tensor that several
    operators save, or views of it, counts once.
    """

    def __init__(self, model: CostModel) -> None:
        self.model = model

    def operator(self, op: Operator, strategy: Strategy, mesh: Mesh, time: TimeAxis) -> Figures:
        cost = self.model.operator(op, strategy, mesh)
        return Figures(forward=cost.forward, backward=cost.backward, saved=float(cost.saved))

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
