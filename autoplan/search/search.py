"""The search: candidates by estimate, the promising ones explored, the best few built and refereed."""

from __future__ import annotations

import heapq
import importlib.metadata
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

from autoplan.search.assembly import StageDraft, assemble
from autoplan.search.bound import step_bound
from autoplan.search.candidates import Candidate
from autoplan.search.context import Context, SearchOptions
from autoplan.search.explore import Exploration
from autoplan.search.known import known_plans
from autoplan.search.referee import Judged, Referee
from autoplan.search.screening import Screening
from autoplan.search.stages import Pipeline
from autoplan.search.uniform import named_plan
from costmodel.cluster import Cluster
from searchspace.errors import IllegalPlanError, InfeasibleError, SearchError
from searchspace.graph import Graph
from searchspace.plan import ClusterInfo, Plan, Prediction, Recipe, RunnerUp, SearchRecord
from searchspace.quantity_text import bytes_text

Progress = Callable[[str, float | None], None]

BEHIND = 1.15
"""A family this far behind the best has to promise more than its estimates."""

SLACK = 1.02
"""Estimates within this factor of the best are still worth a look: they are that inexact."""


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
        time_limit: seconds after which the best plan so far is returned (so does Ctrl-C); it does not
            end the search before there is one.
        work_limit: number of candidates to explore; makes the result independent of the machine's speed.
        progress: called with a text and the share that is done.

    Raises InfeasibleError when no plan fits (by how much, and what would make it fit), SearchError
    when a limit ended the search before any plan was found.
    """
    limits = Limits(time.monotonic(), time_limit, work_limit)
    if not graph.operators:
        return _nothing_to_do(graph, cluster, recipe, seed)
    context = Context(graph, cluster, recipe, memory_limit, global_batch, options or SearchOptions())
    search = _Search(context, limits, progress)
    best = search.run()
    return _recorded(context, best, search, seed)


@dataclass
class Limits:
    """When to stop: ``explored`` counts candidates, ``status`` says which limit ended the search."""

    start: float
    seconds: float | None
    work: int | None
    explored: int = 0
    status: str = "complete"

    def exploring_is_over(self) -> bool:
        """Exploring leaves a part of the time for building plans."""
        if self.work is not None and self.explored >= self.work:
            self.status = "work limit"
            return True
        return self._late(0.6)

    def is_over(self) -> bool:
        return self._late(1.0)

    def _late(self, share: float) -> bool:
        if self.seconds is not None and time.monotonic() - self.start > share * self.seconds:
            self.status = "time limit"
            return True
        return False


@dataclass(order=True)
class _Found:
    """An explored candidate that fits, as estimated."""

    seconds: float
    number: int
    exploration: Exploration = field(compare=False)
    pipeline: Pipeline = field(compare=False)


class _Family:
    """Candidates of one mesh, by number of micro-batches; ``pending`` are those worth a look, best estimate first."""

    def __init__(self, members: list[tuple[float, Candidate]]) -> None:
        self.members = members
        start = min(range(len(members)), key=lambda i: members[i])
        self.pending = [(members[start][0], start)]
        self.best = float("inf")
        self._seen = {start}
        self._excess = float("inf")

    def promise(self) -> float:
        """What the next member may reach: its estimate, with half (on a logarithmic scale) of the least excess so far.

        Estimates leave communication out, of which other numbers of micro-batches need less or more.
        """
        return self.pending[0][0] * (1.0 if self._excess == float("inf") else max(1.0, self._excess) ** 0.5)

    def unseen(self) -> list[int]:
        """Members that nobody has looked at."""
        waiting = {at for _, at in self.pending}
        return [at for at in range(len(self.members)) if at not in self._seen or at in waiting]

    def note(self, at: int, seconds: float | None) -> None:
        """Member ``at`` reached ``seconds`` (None: does not fit); its neighbours follow while that improves."""
        if seconds is not None:
            self._excess = min(self._excess, seconds / max(self.members[at][0], 1e-12))
        if seconds is not None and seconds >= self.best:
            return
        self.best = self.best if seconds is None else seconds
        for neighbour in (at - 1, at + 1):
            if 0 <= neighbour < len(self.members) and neighbour not in self._seen:
                self._seen.add(neighbour)
                heapq.heappush(self.pending, (self.members[neighbour][0], neighbour))


class _Search:
    def __init__(self, context: Context, limits: Limits, progress: Progress | None) -> None:
        self.context, self.limits, self.progress = context, limits, progress
        self.referee = Referee(context)
        self.found: list[_Found] = []
        self.built: set[int] = set()
        """Numbers of what was found and judged."""
        self.tight: list[Exploration] = []
        """Explored candidates that do not fit, as estimated."""
        self.slow: list[Exploration] = []
        """Those that cannot be fast, whatever the memory."""
        self.families: list[_Family] = []

    def run(self) -> Judged:
        """Explore, build, compare; Ctrl-C keeps the best plan so far."""
        try:
            self._explore()
            self._build()
            if self.context.options.runners_up:
                self._compare()
        except KeyboardInterrupt:
            self.limits.status = "interrupted"
            if self.referee.best is None:
                self._build()
        if self.referee.best is None:
            self._last_resort()
        return self.referee.best or self._fail()

    # -- exploring -------------------------------------------------------------------------------

    def _explore(self) -> None:
        """Family by family (one mesh each), along the number of micro-batches while it improves.

        A first round looks at the most promising member of each family, so that the second, over all
        families from the best to the worst, has something to prune with.
        """
        self.families = [_Family(members) for members in Screening(self.context).families()]
        total = sum(len(family.members) for family in self.families)
        for family in self.families:
            self._advance(family, total, steps=1)
        for family in sorted(self.families, key=lambda f: f.best):
            self._advance(family, total, steps=len(family.members))
        self.found.sort()

    def _advance(self, family: _Family, total: int, steps: int) -> None:
        for _ in range(steps):
            best = self.found_best()
            over = bool(self.found) and self.limits.exploring_is_over()
            if over or not family.pending or family.pending[0][0] >= best * SLACK:
                return
            if family.best > best * BEHIND and family.promise() >= best * SLACK:
                return
            _, at = heapq.heappop(family.pending)
            candidate = family.members[at][1]
            reached = f", best so far {best:.4g} s" if self.found else ""
            self._say(f"{candidate}{reached}", self.limits.explored / total)
            family.note(at, self._look(candidate, best))

    def _look(self, candidate: Candidate, best: float) -> float | None:
        """The estimate of an explored candidate (of its bound when that is hopeless); None when it does not fit."""
        self.limits.explored += 1
        exploration = self.context.exploration(candidate)
        bound = exploration.bound()
        if bound >= best * SLACK:
            self.slow.append(exploration)
            return bound
        return self._note(exploration, exploration.pipeline(cutoff=min(best, sys.float_info.max)))

    def _note(self, exploration: Exploration, pipeline: Pipeline | None) -> float | None:
        if pipeline is None:
            self.tight.append(exploration)
            return None
        self.found.append(_Found(pipeline.seconds, len(self.found), exploration, pipeline))
        return pipeline.seconds

    def found_best(self) -> float:
        return min((f.seconds for f in self.found), default=float("inf"))

    # -- building --------------------------------------------------------------------------------

    def _build(self) -> None:
        """Referee the best estimates that nobody has judged; more of them only while nothing fits."""
        count = 0
        for found in sorted(self.found):
            best = self.referee.best
            if best is not None and (
                count >= self.context.options.referees
                or self.limits.is_over()
                or found.seconds >= best.evaluation.seconds
            ):
                return
            if found.number not in self.built:
                self.built.add(found.number)
                count += 1
                self._say(f"building {found.exploration.candidate}", None)
                self.referee.judge(found.exploration, found.pipeline)

    def _compare(self) -> None:
        """Price well-known plans; one that is better than all others is taken."""
        context = self.context
        for known in known_plans(context, self.found[0].exploration.candidate if self.found else None):
            model = context.model(known.micro_batches)
            if model is None or self.limits.is_over():
                continue
            self._say(f"pricing {known.name}", None)
            try:
                plan = named_plan(
                    context.graph, context.info, context.recipe, folding=context.folding, **known.settings
                )
                self.referee.price(known.name, plan, model)
            except IllegalPlanError:
                continue  # too small a model or batch for it

    def _fail(self) -> NoReturn:
        context = self.context
        if self.limits.status != "complete" and not self.referee.judged:
            raise SearchError(f"the search ended ({self.limits.status}) before any plan was found")
        need, name = min((max(j.evaluation.peak_bytes), j.name) for j in self.referee.judged)
        devices = context.cluster.size
        while need * context.cluster.size > context.limit * devices:
            devices *= 2  # as if everything could be spread further
        raise InfeasibleError(
            f"no plan for {context.graph.name} fits in the memory of {context.cluster.name}: the smallest ({name}) "
            f"needs {bytes_text(need)} per device, the limit is {bytes_text(context.limit)}, so "
            f"{bytes_text(need - context.limit)} are missing. It would fit in devices with {bytes_text(need)}, "
            f"or in about {devices} devices of this kind; a smaller batch also needs less",
            missing_bytes=round(need - context.limit),
        )

    def _last_resort(self) -> None:
        """Nothing that looked fast fits: look at all that was passed over, then at what needs least memory."""
        for exploration in self.slow:
            self._note(exploration, exploration.pipeline())
        self.slow.clear()
        for family in self.families:
            for at in family.unseen():
                if self.limits.is_over():
                    break
                self._say(f"{family.members[at][1]}, for its memory", None)
                self._look(family.members[at][1], float("inf"))
        self._build()
        if self.referee.best is None:
            self._smallest()

    def _smallest(self) -> None:
        """Referee the plans that need least memory by estimate."""
        explored = self.tight + [found.exploration for found in self.found]
        needs = sorted((e.least_bytes(), i) for i, e in enumerate(explored))
        for need, i in needs[:3]:
            exploration = explored[i]
            for share in (1.0, 1.02, 1.05):
                exploration.limit = need * share * (1 + 1e-6)
                pipeline = exploration.pipeline()
                if pipeline is not None:
                    plan = exploration.plan(pipeline, self.context.info, self.context.recipe)
                    self.referee.price(str(exploration.candidate), plan, exploration.model)
            exploration.limit = self.context.limit

    def _say(self, text: str, share: float | None) -> None:
        if self.progress is not None:
            self.progress(text, share)


def _nothing_to_do(graph: Graph, cluster: Cluster, recipe: Recipe, seed: int) -> Plan:
    """The plan of a graph without operators."""
    draft = StageDraft({"dp": cluster.size}, tuple(cluster.devices), (), {})
    plan = assemble(graph, ClusterInfo(name=cluster.name, devices=cluster.size), recipe, [draft], 1)
    return plan.replace(prediction=Prediction(seconds=0.0), search=SearchRecord(seed=seed, gap=0.0, status="complete"))


def _recorded(context: Context, best: Judged, search: _Search, seed: int) -> Plan:
    """The plan with the record of how it was found."""
    seconds = best.evaluation.seconds
    bound = min(step_bound(context.graph, context.cluster, context.recipe, context.prices), seconds)
    others: dict[str, RunnerUp] = {}
    for judged in sorted(search.referee.judged, key=lambda j: (not j.fits, j.evaluation.seconds)):
        if judged.name != best.name:
            peak = max(judged.evaluation.peak_bytes)
            runner = RunnerUp(name=judged.name, seconds=judged.evaluation.seconds, peak_bytes=peak, fits=judged.fits)
            others.setdefault(judged.name, runner)
    record = SearchRecord(
        seed=seed,
        seconds=time.monotonic() - search.limits.start,
        bound_seconds=bound,
        gap=(seconds - bound) / seconds if seconds > 0 else 0.0,
        status=search.limits.status,
        versions={name: _version(name) for name in ("autoplan-torch", "numpy", "ortools", "scipy")},
        runners_up=tuple(others.values()),
    )
    return best.plan.replace(prediction=best.plan.prediction, search=record)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
