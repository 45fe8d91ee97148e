"""The search: candidates by lower bound, the promising ones explored, the best few built and refereed."""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from autoplan.search.bound import step_bound
from autoplan.search.candidates import Candidate, candidates
from autoplan.search.explore import Exploration
from autoplan.search.folding import Folding, fold
from autoplan.search.stages import Pipeline
from autoplan.search.strategies import Allow, everything
from autoplan.search.uniform import named_plan
from autoplan.search.wiring import with_gradient
from costmodel.cluster import Cluster
from costmodel.collectives import CommunicationPrices
from costmodel.evaluate import Evaluation, evaluate
from costmodel.model import CostModel
from costmodel.units import bytes_text
from searchspace.errors import AutoplanError, IllegalPlanError, InfeasibleError, SearchError
from searchspace.graph import Graph, Operator
from searchspace.mesh import Mesh
from searchspace.microbatch import TimeAxis, time_axis
from searchspace.plan import ClusterInfo, Plan, Recipe, RunnerUp, SearchRecord
from searchspace.rebatch import rebatch
from searchspace.resolve import resolve

Progress = Callable[[str, float | None], None]


@dataclass(frozen=True)
class SearchOptions:
    """What is searched, and how hard."""

    zero: tuple[int, ...] = (0, 1, 2, 3)
    """ZeRO levels that each parameter may choose from."""
    recompute: bool = True
    """Whether layers may be recomputed in backward."""
    stages: tuple[int, ...] | None = None
    """Numbers of pipeline stages to consider; all that divide the devices by default."""
    micro_batches: tuple[int, ...] | None = None
    """Numbers of micro-batches to consider; powers of two of samples by default."""
    pins: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Choices that must be kept: operator, then mesh axis, to the rule's label ("" for replication)."""
    referees: int = 4
    """How many candidates are built as complete plans and priced by the cost model's evaluation."""
    fold: bool = True
    """Whether repeated layers share one strategy."""
    runners_up: bool = True
    """Whether well-known uniform plans are priced for comparison."""


def search_plan(
    graph: Graph,
    cluster: Cluster,
    recipe: Recipe,
    *,
    memory_limit: float | None = None,
    global_batch: int | None = None,
    time_limit: float | None = None,
    work_limit: int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    options: SearchOptions | None = None,
) -> Plan:
    """The plan with the shortest predicted step for ``graph`` on all devices of ``cluster``.

    Parameters
        memory_limit: bytes per device, if less than the device has.
        global_batch: samples of one step; default: the recipe's, else the graph's own batch.
        time_limit: seconds after which the best plan so far is returned (so does Ctrl-C).
        work_limit: number of candidates to explore; makes the result independent of the machine's speed.
        progress: called with a text and the share that is done.

    Raises InfeasibleError when no plan fits (by how much, and what would make it fit), SearchError
    when a limit ended the search before any plan was found.
    """
    return _Search(
        graph,
        cluster,
        recipe,
        memory_limit,
        global_batch,
        time_limit,
        work_limit,
        seed,
        progress,
        options or SearchOptions(),
    ).run()


@dataclass(frozen=True)
class _Judged:
    """A complete plan and what the referee says of it."""

    name: str
    plan: Plan
    evaluation: Evaluation
    fits: bool


class _Search:
    def __init__(
        self, graph: Graph, cluster: Cluster, recipe: Recipe, memory_limit: float | None, global_batch: int | None,
        time_limit: float | None, work_limit: int | None, seed: int, progress: Progress | None, options: SearchOptions,
    ) -> None:  # fmt: skip
        self.start = time.monotonic()
        batch = global_batch or recipe.global_batch or graph.batch
        self.graph = graph if batch is None or batch == graph.batch else rebatch(graph, batch)
        self.cluster, self.options, self.seed, self.progress = cluster, options, seed, progress
        self.recipe = recipe.model_copy(update={"global_batch": batch})
        self.info = ClusterInfo(name=cluster.name, devices=cluster.size)
        self.time_limit, self.work_limit = time_limit, work_limit
        usable = min(node.device.usable_memory for node in cluster.nodes)
        self.limit = float(min(usable, memory_limit if memory_limit is not None else usable))
        if self.limit <= 0:
            raise SearchError(f"expected a memory limit > 0 bytes, got {memory_limit}")
        self.prices = CommunicationPrices(cluster)
        self.gradients = with_gradient(self.graph) if recipe.mode == "train" else frozenset()
        self.folding: Folding = fold(self.graph, repeats=options.fold)
        self.allow = _pinned(self.graph, self.folding, options.pins)
        self.models: dict[int, CostModel | None] = {}
        self.refused: dict[int, str] = {}
        self.judged: list[_Judged] = []
        self.status = "complete"

    # -- the whole -------------------------------------------------------------------------------

    def run(self) -> Plan:
        found: list[tuple[float, Exploration, Pipeline]] = []
        tight: list[Exploration] = []
        try:
            self._explore(found, tight)
            self._referee(found)
            if self.options.runners_up:
                self._uniform(found)
        except KeyboardInterrupt:
            self.status = "interrupted"
            if not any(j.fits for j in self.judged) and found:
                self._judge_first(found)
        fitting = [j for j in self.judged if j.fits]
        if not fitting:
            self._fail(found, tight)
        best = min(fitting, key=lambda j: j.evaluation.seconds)
        return self._finish(best)

    # -- exploring -------------------------------------------------------------------------------

    def _explore(self, found: list[tuple[float, Exploration, Pipeline]], tight: list[Exploration]) -> None:
        ranked = self._ranked()
        best = float("inf")
        for done, (bound, candidate) in enumerate(ranked):
            if bound >= best * 1.02 or self._over(done):
                break
            self._say(
                f"{candidate}, best so far {best:.4g} s" if best < float("inf") else str(candidate), done / len(ranked)
            )
            exploration = self._exploration(candidate)
            if exploration.bound() >= best * 1.02:
                continue
            pipeline = exploration.pipeline()
            if pipeline is None:
                tight.append(exploration)
                continue
            found.append((pipeline.seconds, exploration, pipeline))
            best = min(best, pipeline.seconds)
        found.sort(key=lambda item: item[0])

    def _ranked(self) -> list[tuple[float, Candidate]]:
        """Candidates with a lower bound: all compute at this micro-batch size, and the pipeline's ramp."""
        blocks = len(self.folding.blocks)
        ranked = []
        for candidate in candidates(self.cluster, blocks, self.graph.batch, self._granule()):
            if self.options.stages is not None and candidate.stages not in self.options.stages:
                continue
            if self.options.micro_batches is not None and candidate.micro_batches not in self.options.micro_batches:
                continue
            model = self._model(candidate.micro_batches)
            if model is None:
                continue
            devices = candidate.outer * candidate.inner
            ramp = (candidate.micro_batches + candidate.stages - 1) / candidate.stages
            ranked.append((self._compute(candidate.micro_batches) / devices * ramp, candidate))
        if not ranked:
            raise SearchError(self._nothing_to_try())
        return sorted(ranked)

    def _granule(self) -> int:
        for count in (2,):
            model = self._model(count)
            if model is not None:
                return model.time.granule
        return 1

    def _nothing_to_try(self) -> str:
        reasons = "; ".join(f"{m} micro-batches: {why}" for m, why in list(self.refused.items())[:3])
        return (
            f"no candidate for {self.graph.name} with a batch of {self.graph.batch} on {self.cluster.size} devices"
            f" within the options given{': ' + reasons if reasons else ''}"
        )

    def _model(self, micro_batches: int) -> CostModel | None:
        """The cost model at this number of micro-batches; None when the model refuses it."""
        if micro_batches not in self.models:
            try:
                axis: TimeAxis = time_axis(self.graph, micro_batches)
                self.models[micro_batches] = CostModel(self.graph, self.cluster, self.recipe, axis, self.prices)
            except IllegalPlanError as error:
                self.models[micro_batches] = None
                self.refused[micro_batches] = str(error)
        return self.models[micro_batches]

    def _compute(self, micro_batches: int) -> float:
        """Seconds of one micro-batch on one device, layers counted by kind."""
        model = self._model(micro_batches)
        assert model is not None
        mesh = Mesh((("dp", 1),), (0,))
        counts = self.folding.counts
        seconds = 0.0
        for block in {b.kind: b for b in self.folding.blocks}.values():
            for name in block.operators:
                op = self.graph.operator[name]
                cost = model.operator(op, (op.rule.choices[""],), mesh)
                seconds += counts[block.kind] * (cost.forward + cost.backward)
        return seconds

    def _exploration(self, candidate: Candidate) -> Exploration:
        model = self._model(candidate.micro_batches)
        assert model is not None
        everywhere = sum(t.bytes for t in self.graph.of_kind("input", "buffer", "constant"))
        training = self.recipe.mode == "train"
        return Exploration(
            candidate, self.graph, self.folding, model, self.gradients, self.allow, self.options.zero,
            self.options.recompute and training, self.limit, float(everywhere),
        )  # fmt: skip

    def _over(self, done: int) -> bool:
        if self.work_limit is not None and done >= self.work_limit:
            self.status = "work limit"
            return True
        if self.time_limit is not None and time.monotonic() - self.start > 0.6 * self.time_limit:
            self.status = "time limit"
            return True
        return False

    # -- judging ---------------------------------------------------------------------------------

    def _referee(self, found: list[tuple[float, Exploration, Pipeline]]) -> None:
        for number, (_, exploration, pipeline) in enumerate(found):
            if number >= self.options.referees and any(j.fits for j in self.judged):
                return
            if any(j.fits for j in self.judged) and self._late():
                return
            self._say(f"building {exploration.candidate}", None)
            self._judge(exploration, pipeline)

    def _judge_first(self, found: list[tuple[float, Exploration, Pipeline]]) -> None:
        for _, exploration, pipeline in sorted(found, key=lambda item: item[0]):
            self._judge(exploration, pipeline)
            if any(j.fits for j in self.judged):
                return

    def _judge(self, exploration: Exploration, pipeline: Pipeline) -> None:
        """Build, price and, where the estimate of memory was wrong, cut again with the error reserved."""
        reserve = 0.0
        for _ in range(4):
            plan = exploration.plan(pipeline, self.info, self.recipe)
            judged = self._price(str(exploration.candidate), plan, exploration.model)
            self.judged.append(judged)
            excess = max(
                peak - stage.bytes for peak, stage in zip(judged.evaluation.peak_bytes, pipeline.stages, strict=True)
            )
            if judged.fits and excess >= reserve - 0.01 * self.limit:
                return
            if judged.fits and not pipeline_is_squeezed(exploration, pipeline):
                return
            reserve = max(excess, reserve + 0.01 * self.limit) if not judged.fits else excess
            again = exploration.pipeline(reserve)
            if again is None or again == pipeline:
                return
            pipeline = again

    def _price(self, name: str, plan: Plan, model: CostModel) -> _Judged:
        evaluation = evaluate(resolve(self.graph, plan), self.cluster, self.recipe, model=model)
        fits = evaluation.fits and max(evaluation.peak_bytes) <= self.limit
        return _Judged(name, plan.replace(prediction=evaluation.prediction()), evaluation, fits)

    def _late(self) -> bool:
        return self.time_limit is not None and time.monotonic() - self.start > self.time_limit

    # -- known plans -----------------------------------------------------------------------------

    def _uniform(self, found: list[tuple[float, Exploration, Pipeline]]) -> None:
        """Price what a person would try first; a plan that is better than all others is taken."""
        for name, settings in self._known_plans(found):
            if self._late():
                return
            self._say(f"pricing {name}", None)
            count = settings.get("micro_batches", 1)
            model = self._model(int(count))
            if model is None:
                continue
            try:
                plan = named_plan(self.graph, self.info, self.recipe, folding=self.folding, **settings)
                self.judged.append(self._price(name, plan, model))
            except AutoplanError:
                continue  # illegal for this model or batch

    def _known_plans(self, found: list[tuple[float, Exploration, Pipeline]]) -> list[tuple[str, dict[str, Any]]]:
        size, batch = self.cluster.size, self.graph.batch or 1
        per_node = min(node.count for node in self.cluster.nodes)
        if size == 1:
            return []
        train = self.recipe.mode == "train"
        plans: list[tuple[str, dict[str, Any]]] = [("DP", {"dp": size})]
        if train:
            plans.append(("FSDP", {"dp": size, "zero": 3, "recompute": self.options.recompute}))
        if size <= per_node:
            plans.append((f"Megatron TP{size}", {"tp": size}))
        elif batch > 1:
            stages = size // per_node
            plans.append(
                (
                    f"Megatron TP{per_node}xPP{stages}",
                    {"tp": per_node, "pp": stages, "micro_batches": batch, "sequence": True},
                )
            )
        if found:
            best = found[0][1].candidate
            shape = {"dp": best.outer, "tp": best.inner, "pp": best.stages, "micro_batches": best.micro_batches}
            name = "x".join(f"{k.upper()}{v}" for k, v in shape.items() if k != "micro_batches" and v > 1)
            plans.append(
                (
                    f"uniform {name or 'single device'}",
                    {**shape, "sequence": best.inner > 1, "zero": 1 if train and best.outer > 1 else 0},
                )
            )
        return plans

    # -- ending ----------------------------------------------------------------------------------

    def _finish(self, best: _Judged) -> Plan:
        seconds = best.evaluation.seconds
        bound = min(step_bound(self.graph, self.cluster, self.recipe, self.prices), seconds)
        names: dict[str, RunnerUp] = {}
        for judged in sorted(self.judged, key=lambda j: (not j.fits, j.evaluation.seconds)):
            if judged is not best:
                runner = RunnerUp(
                    name=judged.name,
                    seconds=judged.evaluation.seconds,
                    peak_bytes=max(judged.evaluation.peak_bytes),
                    fits=judged.fits,
                )
                names.setdefault(judged.name, runner)
        record = SearchRecord(
            seed=self.seed,
            seconds=time.monotonic() - self.start,
            bound_seconds=bound,
            gap=(seconds - bound) / seconds if seconds > 0 else 0.0,
            status=self.status,
            versions={name: _version(name) for name in ("autoplan-torch", "numpy", "ortools", "scipy")},
            runners_up=tuple(names.values()),
        )
        return best.plan.replace(prediction=best.plan.prediction, search=record)

    def _fail(self, found: list[tuple[float, Exploration, Pipeline]], tight: list[Exploration]) -> None:
        if self.status != "complete" and not self.judged:
            raise SearchError(f"the {self.status} ended the search before any plan was found")
        needs = [(e.least_bytes(), e.candidate) for e in tight] + [
            (float(max(j.evaluation.peak_bytes)), None) for j in self.judged
        ]
        need, candidate = min(needs, key=lambda item: item[0])
        devices = self.cluster.size
        while devices < 1 << 20 and need * self.cluster.size / devices > self.limit:
            devices *= 2
        raise InfeasibleError(
            f"no plan for {self.graph.name} fits in the memory of {self.cluster.name}: the smallest needs "
            f"{bytes_text(need)} per device{f' ({candidate})' if candidate else ''}, "
            f"the limit is {bytes_text(self.limit)}, so {bytes_text(need - self.limit)} are missing. "
            f"It would fit in devices with {bytes_text(need)}, or in about {devices} devices of this kind; "
            "a smaller batch also needs less"
        )

    def _say(self, text: str, share: float | None) -> None:
        if self.progress is not None:
            self.progress(text, share)


def pipeline_is_squeezed(exploration: Exploration, pipeline: Pipeline) -> bool:
    """Whether memory made some block slower than its fastest option."""
    fastest = min(float(o.figures.seconds[exploration.kinds].sum()) for o in exploration.options)
    used = 0.0
    for stage in pipeline.stages:
        for kind, option in zip(exploration.kinds[stage.first : stage.last], stage.options, strict=True):
            used += float(exploration.options[option].figures.seconds[kind])
    return used > fastest * 1.001


def _pinned(graph: Graph, folding: Folding, pins: Mapping[str, Mapping[str, str]]) -> Allow:
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


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
