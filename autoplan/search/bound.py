"""A lower bound on the step time of every plan in the declared space, under the cost model.

All operators of the whole batch have to run, forward and backward, on the cluster's devices.  The cost
model charges a launch for each part of an operator, fills and wave losses that do not shrink with
the part, and bytes that are read again by each part; so cutting an operator, in space or in time,
never lowers the sum of its parts below its cost in one piece.  Spread without loss over all devices
of the fastest kind this is what no plan can beat; the optimizer's traffic likewise.
"""

from __future__ import annotations

from autoplan.search.wiring import with_gradient
from costmodel.cluster import Cluster
from costmodel.collectives import CommunicationPrices
from costmodel.model import CostModel
from searchspace.graph import Graph
from searchspace.mesh import Mesh
from searchspace.microbatch import time_axis
from searchspace.plan import Recipe


def step_bound(graph: Graph, cluster: Cluster, recipe: Recipe, prices: CommunicationPrices) -> float:
    """Seconds that any plan for ``graph`` on all devices of ``cluster`` needs for one step."""
    model = CostModel(graph, cluster, recipe, time_axis(graph, 1), prices)
    fastest = float("inf")
    gradients = with_gradient(graph) if recipe.mode == "train" else frozenset()
    for device in _one_of_each_kind(cluster):
        mesh = Mesh((("dp", 1),), (device,))
        seconds = 0.0
        for op in graph.operators:
            cost = model.operator(op, (op.rule.choices[""],), mesh)
            seconds += cost.forward + cost.backward
        elements: dict[str, int] = {}
        for tensor in graph.parameters:
            if tensor.name in gradients:
                dtype = model.master_dtype(tensor.name)
                elements[dtype] = elements.get(dtype, 0) + tensor.elements
        seconds += sum(model.step(count, mesh, dtype) for dtype, count in elements.items())
        fastest = min(fastest, seconds)
    return fastest / cluster.size


def _one_of_each_kind(cluster: Cluster) -> list[int]:
    """A device of each kind, the first of its kind."""
    found: dict[object, int] = {}
    for device in cluster.devices:
        found.setdefault(cluster.device(device), device)
    return list(found.values())
