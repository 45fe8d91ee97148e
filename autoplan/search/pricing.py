"""Selection priced by the cost model."""

from __future__ import annotations

from math import prod

from autoplan.search.figures import Figures, ParameterLayouts
from autoplan.search.strategies import Strategy
from costmodel.model import CostModel
from costmodel.shards import shape_bytes
from searchspace.graph import Operator, Tensor
from searchspace.layout import Layout, R
from searchspace.mesh import Mesh
from searchspace.microbatch import TimeAxis


class ModelPricing:
    """The cost model's figures in selection's terms.

    What autograd saves is counted by storage, with the operator that produces it: a tensor that several
    operators save, or views of it, counts once.
    """

    def __init__(self, model: CostModel) -> None:
        self.model = model
        self._root: dict[str, str] = {}
        for op in model.graph.operators:
            if op.family == "view" and op.inputs and op.name not in model.copies:
                self._root.update((name, self._root.get(op.inputs[0], op.inputs[0])) for name in op.outputs)

    def operator(self, op: Operator, strategy: Strategy, mesh: Mesh, time: TimeAxis) -> Figures:
        model = self.model
        cost, use = model.operator(op, strategy, mesh), model.footprint(op, strategy, mesh)
        local = model.local_shapes(op, strategy, mesh)
        wanted = sum(
            shape_bytes(shape, model.dtypes[name])
            for name, shape, want in zip(op.inputs, local, use.wants, strict=False)
            if want
        )
        working = sum(use.sizes) + wanted + use.transient
        return Figures(cost.forward, cost.backward, saved=float(cost.saved), working=float(working))

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
        return float(self.model.bytes(tensor.name, layout, mesh, time.placement.get(tensor.name, R)))

    def saved_by_maker(self, tensor: Tensor) -> bool:
        return self._root.get(tensor.name, tensor.name) in self.model.kept

    def accumulate(self, tensor: Tensor, held: Layout, mesh: Mesh) -> float:
        model = self.model
        master = model.master_dtype(tensor.name)
        if model.time.micro_batches == 1 and master == tensor.dtype:
            return 0.0
        return model.add_seconds(model.bytes(tensor.name, held, mesh, dtype=master), mesh)
