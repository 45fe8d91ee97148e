"""The referee's side of the search: complete plans, resolved and priced by the cost model's evaluation."""

from __future__ import annotations

from dataclasses import dataclass

from autoplan.search.context import Context
from autoplan.search.explore import Exploration
from autoplan.search.stages import Pipeline
from costmodel.evaluate import Evaluation, evaluate
from costmodel.model import CostModel
from searchspace.plan import Plan
from searchspace.resolve import resolve

ROUNDS = 4
"""How often a candidate is cut anew with the error of the estimated memory reserved."""


@dataclass(frozen=True)
class Judged:
    """A complete plan, what the referee says of it, and what it is called."""

    name: str
    plan: Plan
    evaluation: Evaluation
    fits: bool


class Referee:
    """Builds and prices plans; ``judged`` holds all of them.  ``reserve`` bytes were estimated too low so far."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.judged: list[Judged] = []
        self.reserve = 0.0

    @property
    def best(self) -> Judged | None:
        """The fastest plan that fits; the first among equals."""
        fitting = [j for j in self.judged if j.fits]
        return min(fitting, key=lambda j: j.evaluation.seconds) if fitting else None

    def price(self, name: str, plan: Plan, model: CostModel) -> Judged:
        """Resolve and evaluate ``plan``; raises IllegalPlanError when it is not legal."""
        context = self.context
        evaluation = evaluate(resolve(context.graph, plan), context.cluster, context.recipe, model=model)
        fits = evaluation.fits and max(evaluation.peak_bytes) <= context.limit
        judged = Judged(name, plan.replace(prediction=evaluation.prediction()), evaluation, fits)
        self.judged.append(judged)
        return judged

    def judge(self, exploration: Exploration, pipeline: Pipeline) -> None:
        """Build and price a candidate's pipeline, and cut again where its memory was estimated wrongly.

        A plan that does not fit is cut again with the missing bytes reserved (at most what the smallest
        plan leaves); one that memory made slower and that leaves room is cut again with less reserved.
        """
        limit, reserve = self.context.limit, 0.0
        step = 0.01 * limit
        if self.reserve > 0:
            again = exploration.pipeline(self.reserve)
            if again is not None:
                pipeline, reserve = again, self.reserve
        rival = self.best
        for _ in range(ROUNDS):
            plan = exploration.plan(pipeline, self.context.info, self.context.recipe)
            judged = self.price(str(exploration.candidate), plan, exploration.model)
            peaks = judged.evaluation.peak_bytes
            spare = limit - max(peaks)
            if judged.fits and (spare < 2 * step or not exploration.squeezed(pipeline)):
                break
            if rival is not None and judged.evaluation.seconds >= rival.evaluation.seconds and not judged.fits:
                return  # less memory does not make it faster
            if judged.fits:
                reserve = max(0.0, reserve - 0.7 * spare)
                again = exploration.pipeline(reserve)
            else:
                excess = max(peak - stage.bytes for peak, stage in zip(peaks, pipeline.stages, strict=True))
                before, reserve = reserve, max(reserve, excess) + step / 2
                again = exploration.pipeline(reserve)
                most = limit - exploration.least_bytes() * (1 + 1e-6)
                if again is None and before < most < reserve:
                    reserve, again = most, exploration.pipeline(most)
            if again is None or again == pipeline:
                break
            pipeline = again
            self.reserve = max(0.0, reserve)
        if judged.fits and exploration.squeezed(pipeline):
            better = exploration.exact(pipeline, reserve)
            if better is not None:
                plan = exploration.plan(better, self.context.info, self.context.recipe)
                self.price(str(exploration.candidate), plan, exploration.model)
