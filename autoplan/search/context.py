"""What one search works on: graph, cluster, recipe, limits, and what is made once for all candidates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from autoplan.search.candidates import Candidate
from autoplan.search.explore import Exploration
from autoplan.search.folding import Folding, fold
from autoplan.search.lineage import batch_labels
from autoplan.search.strategies import Allow, everything
from autoplan.search.wiring import with_gradient
from costmodel.cluster import Cluster
from costmodel.collectives import CommunicationPrices
from costmodel.model import CostModel
from searchspace.errors import IllegalPlanError, SearchError
from searchspace.graph import Graph, Operator
from searchspace.microbatch import time_axis
from searchspace.plan import ClusterInfo, Recipe
from searchspace.rebatch import rebatch


@dataclass(frozen=True)
class SearchOptions:
    """What is searched, and how hard."""

    zero: tuple[int, ...] = (0, 1, 2, 3)
    """ZeRO levels that each parameter may choose from."""
    recompute: bool = True
    """Whether layers may be recomputed in backward."""
    stages: tuple[int, ...] | None = None
    """Numbers of pipeline stages to consider; all that divide the devices by default."""
    inner: tuple[int, ...] | None = None
    """Sizes of a mesh's inner axis to consider; ``(1,)`` for meshes with one axis."""
    micro_batches: tuple[int, ...] | None = None
    """Numbers of micro-batches to consider; powers of two of samples by default."""
    pins: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Choices that must be kept: operator, then mesh axis, to the rule's label ("" for replication)."""
    referees: int = 3
    """How many candidates are built as complete plans and priced by the cost model's evaluation."""
    fold: bool = True
    """Whether repeated layers share one strategy."""
    runners_up: bool = True
    """Whether well-known uniform plans are priced for comparison."""


class Context:
    """Everything that candidates share; cost models are kept by number of micro-batches."""

    def __init__(
        self, graph: Graph, cluster: Cluster, recipe: Recipe, memory_limit: float | None, global_batch: int | None,
        options: SearchOptions,
    ) -> None:  # fmt: skip
        batch = next((b for b in (global_batch, recipe.global_batch) if b is not None), graph.batch)
        if batch is not None and batch < 1:
            raise SearchError(f"expected a global batch >= 1, got {batch}")
        self.graph = graph if batch is None or batch == graph.batch else rebatch(graph, batch)
        self.cluster, self.options = cluster, options
        self.recipe = recipe.model_copy(update={"global_batch": batch})
        self.info = ClusterInfo(name=cluster.name, devices=cluster.size)
        usable = min(node.device.usable_memory for node in cluster.nodes)
        self.limit = float(min(usable, usable if memory_limit is None else memory_limit))
        if self.limit <= 0:
            raise SearchError(f"expected a memory limit > 0 bytes, got {memory_limit}")
        self.training = recipe.mode == "train"
        self.prices = CommunicationPrices(cluster)
        self.gradients = with_gradient(self.graph) if self.training else frozenset()
        self.folding: Folding = fold(self.graph, repeats=options.fold)
        self.allow = pinned(self.graph, self.folding, options.pins)
        self.batch = batch_labels(self.graph)
        self.refused: dict[int, str] = {}
        """Why some numbers of micro-batches are impossible."""
        self._models: dict[int, CostModel | None] = {}

    def model(self, micro_batches: int) -> CostModel | None:
        """The cost model at this number of micro-batches; None when the model refuses it (see ``refused``)."""
        if micro_batches not in self._models:
            try:
                axis = time_axis(self.graph, micro_batches)
                self._models[micro_batches] = CostModel(self.graph, self.cluster, self.recipe, axis, self.prices)
            except IllegalPlanError as error:
                self._models[micro_batches] = None
                self.refused[micro_batches] = str(error)
        return self._models[micro_batches]

    @cached_property
    def everywhere(self) -> int:
        """Bytes that every device holds whatever the plan: inputs, buffers, constants, communication buffers."""
        held = sum(t.bytes for t in self.graph.of_kind("input", "buffer", "constant"))
        if self.cluster.size > 1:
            held += max(node.device.communication for node in self.cluster.nodes)
        return held

    @cached_property
    def granule(self) -> int:
        """Samples that stay together when the batch is cut."""
        model = self.model(2)
        return 1 if model is None else model.time.granule

    def exploration(self, candidate: Candidate) -> Exploration:
        """The candidate with its fastest strategies."""
        model = self.model(candidate.micro_batches)
        if model is None:
            raise IllegalPlanError(self.refused[candidate.micro_batches])
        recompute = self.options.recompute and self.training
        return Exploration(
            candidate, self.graph, self.folding, model, self.gradients, self.allow, self.options.zero, recompute,
            self.limit, float(self.everywhere), self.batch,
        )  # fmt: skip


def pinned(graph: Graph, folding: Folding, pins: Mapping[str, Mapping[str, str]]) -> Allow:
    """``everything`` within what ``pins`` fix; a pin holds for all operators of the group."""
    fixed: dict[object, dict[str, str]] = {}
    for name, entry in pins.items():
        if name not in graph.operator:
            raise SearchError(f"pinned operator {name!r} is not in the model")
        rule = graph.operator[name].rule
        for axis, label in entry.items():
            if label not in rule.choices:
                raise SearchError(
                    f"operator {name!r} cannot be pinned to {label!r} on axis {axis!r}: "
                    f"its rule {rule.text!r} allows {sorted(rule.choices)}"
                )
        fixed.setdefault(folding.groups[name], {}).update(entry)

    def allow(op: Operator, axis: str, label: str) -> bool:
        entry = fixed.get(folding.groups[op.name], {})
        return label == entry[axis] if axis in entry else everything(op, axis, label)

    return allow
