"""One candidate explored: its options at several prices of memory, the best pipeline, and the plan of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from autoplan.search.assembly import RegionNames, StageDraft, assemble, gathering_blocks, stage_operators
from autoplan.search.candidates import Candidate
from autoplan.search.conversions import Conversions
from autoplan.search.figures import KindFigures, ParameterLayouts, Readers, Terms
from autoplan.search.folding import Folding
from autoplan.search.pricing import ModelPricing
from autoplan.search.problem import Assignment, Costs
from autoplan.search.reduction import narrowed
from autoplan.search.selection import Selection
from autoplan.search.solver import SolverOptions, solve
from autoplan.search.stages import Pipeline, StageProblem, step_seconds
from autoplan.search.strategies import Allow
from autoplan.search.wiring import Wiring
from costmodel.memory import FRAGMENTATION
from costmodel.model import CostModel
from searchspace.errors import InfeasibleError
from searchspace.graph import DTYPE_BYTES, Graph
from searchspace.plan import ClusterInfo, Plan, Recipe

PRICES = (0.0, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0)
"""Prices of memory, as shares of the step's seconds over the bytes that the fastest option needs."""

COARSE = (0.1, 1.0, 100.0)
"""The prices that show roughly what a candidate can reach."""

MAX_ENTRIES = 1 << 19
"""Widest table of a selection; wider ones are restricted to the strategies that look best."""

EXACT = SolverOptions(gap=5e-3, work_limit=0.1)
"""How hard selections under a memory limit are solved."""

TIE = 1e-6
"""The price that decides between options that are equally fast."""


@dataclass(frozen=True, eq=False)
class Option:
    """A selection of the whole model, with or without recomputation.

    Options of one ``family`` have the same assignment: blocks that mix them need no conversions.
    """

    family: int
    assignment: Assignment
    recompute: bool
    figures: KindFigures


@dataclass(eq=False)
class Exploration:
    """A candidate's options: ``fastest`` at once, the others when memory is short.

    ``fixed`` are bytes that every device holds whatever the plan, ``limit`` the bytes it has.
    """

    candidate: Candidate
    graph: Graph
    folding: Folding
    model: CostModel
    gradients: frozenset[str]
    allow: Allow
    zero: tuple[int, ...]
    recompute: bool
    limit: float
    fixed: float
    batch: Mapping[str, str]

    def __post_init__(self) -> None:
        mesh = self.candidate.mesh()
        self.selection = Selection(
            Wiring(
                self.graph, self.folding, mesh, self.model.time, ModelPricing(self.model),
                Conversions(mesh, self.model.prices), self.gradients, self.allow, self.zero,
                shard_axes=mesh.axis_names,
                master_bytes={t.name: DTYPE_BYTES[self.model.master_dtype(t.name)] for t in self.graph.parameters},
                batch=self.batch,
            )
        )  # fmt: skip
        self.kinds = [block.kind for block in self.folding.blocks]
        self.options: list[Option] = []
        self._families: dict[Assignment, int] = {}
        self._meetings: dict[tuple[int, int, int, int], float] = {}
        self._effort = 0
        self._unit = 0.0
        free = self._option(Terms(self.candidate.micro_batches))
        self._unit = self._price_unit(free)
        self._priced(TIE, 1, False)
        self.transfer = self._transfers(free)

    def bound(self) -> float:
        """The estimate of a step if memory did not matter."""
        return self._stages(np.inf).bound(self.candidate.stages)

    def in_flight(self) -> list[int]:
        """Micro-batches between forward and backward by stage, under 1F1B."""
        stages, count = self.candidate.stages, self.candidate.micro_batches
        if not self.model.training:
            return [1] * stages
        return [min(stages - s, count) for s in range(stages)]

    def pipeline(self, reserve: float = 0.0, cutoff: float = np.inf) -> Pipeline | None:
        """The best cut into stages that leaves ``reserve`` bytes free; None when nothing fits.

        Options are made as far as they are needed: the fastest while memory is plenty, some prices of
        memory to see whether the candidate fits and can reach ``cutoff`` seconds, then (or without a cutoff) all.
        """
        if self._effort == 0:
            ideal, roomy = self._cut(np.inf), self._cut(self.limit - reserve)
            if roomy is not None and ideal is not None and roomy.seconds <= ideal.seconds * 1.001:
                return roomy
            self._make_options(COARSE, self.in_flight()[:1])
            self._effort = 1
        if self._effort == 1:
            rough = self._cut(self.limit - reserve, cutoff)
            if cutoff < np.inf and (rough is None or rough.seconds >= cutoff * 1.05):
                return rough
            self._make_options(PRICES, (self.in_flight()[0], self.in_flight()[-1]))
            self._effort = 2
        return self._cut(self.limit - reserve, cutoff)

    def exact(self, pipeline: Pipeline, reserve: float) -> Pipeline | None:
        """A better cut with selections of the fullest stage under its memory limit (an integer program), or None."""
        if not self._exact_options(pipeline, reserve):
            return None
        found = self._cut(self.limit - reserve)
        return found if found is not None and found.seconds < pipeline.seconds else None

    def _cut(self, limit: float, cutoff: float = np.inf) -> Pipeline | None:
        """The better one of all options mixed at will, and of a single family that could stay below ``cutoff``."""
        best = self._solve(limit, range(len(self.options)))
        if best is None or len({self.options[o].family for s in best.stages for o in s.options}) == 1:
            return best
        best = self._with_meetings(best)
        members = [[i for i, o in enumerate(self.options) if o.family == f] for f in range(len(self._families))]
        bounds = [self._stages(limit, chosen).bound(self.candidate.stages) for chosen in members]
        for bound, chosen in sorted(zip(bounds, members, strict=True)):
            if bound >= min(best.seconds, cutoff):
                break
            found = self._solve(limit, chosen)
            if found is not None and found.seconds < best.seconds:
                best = found
        return best

    def _with_meetings(self, pipeline: Pipeline) -> Pipeline:
        """The pipeline with the conversions where blocks of different families meet."""
        stages = []
        for stage in pipeline.stages:
            extra = 0.0
            kinds = self.kinds[stage.first : stage.last]
            for at in range(1, len(kinds)):
                a, b = self.options[stage.options[at - 1]], self.options[stage.options[at]]
                if a.family != b.family:
                    key = (a.family, b.family, kinds[at - 1], kinds[at])
                    if key not in self._meetings:
                        pair = (kinds[at - 1], kinds[at])
                        self._meetings[key] = self.selection.meeting(a.assignment, b.assignment, pair)
                    extra += self._meetings[key]
            stages.append(replace(stage, seconds=stage.seconds + extra))
        return replace(pipeline, stages=tuple(stages), seconds=step_seconds(stages, self.candidate.micro_batches))

    def _solve(self, limit: float, chosen: Sequence[int]) -> Pipeline | None:
        found = self._stages(limit, chosen).solve(self.candidate.stages, self.in_flight())
        if found is None:
            return None
        stages = tuple(replace(s, options=tuple(chosen[o] for o in s.options)) for s in found.stages)
        return replace(found, stages=stages)

    def least_bytes(self) -> float:
        """Bytes per device that the smallest plan of this candidate needs, as estimated."""
        if self._effort == 0:
            self._make_options(COARSE, self.in_flight()[:1])
            self._effort = 1
        return self._stages(self.limit).least_bytes(self.candidate.stages, self.in_flight())

    def squeezed(self, pipeline: Pipeline) -> bool:
        """Whether memory made some block slower than its fastest option."""
        fastest = min(float(o.figures.seconds[self.kinds].sum()) for o in self.options)
        used = 0.0
        for stage in pipeline.stages:
            for kind, option in zip(self.kinds[stage.first : stage.last], stage.options, strict=True):
                used += float(self.options[option].figures.seconds[kind])
        return used > fastest * 1.001

    # -- options ---------------------------------------------------------------------------------

    def _option(self, terms: Terms) -> Option:
        restricted = narrowed(self.selection.problem(terms), MAX_ENTRIES)
        return self._keep(restricted.restore(solve(restricted.problem).assignment), terms.recompute)

    def _keep(self, assignment: Assignment, recompute: bool) -> Option:
        """The option of an assignment; a new assignment also gets its twin with, or without, recomputation."""
        if assignment not in self._families:
            family = self._families.setdefault(assignment, len(self._families))
            for again in (False, True) if self.recompute else (False,):
                figures = self.selection.by_kind(assignment, again)
                self.options.append(Option(family, assignment, again, figures))
        family = self._families[assignment]
        return next(o for o in self.options if o.family == family and o.recompute == recompute)

    def _price_unit(self, free: Option) -> float:
        kinds, figures = self.kinds, free.figures
        deepest = self.in_flight()[0]
        seconds = figures.seconds[kinds].sum() + figures.step[kinds].sum() / self.candidate.micro_batches
        held = figures.resident[kinds].sum() + deepest * figures.saved[kinds].sum()
        return float(seconds / max(held, 1.0))

    def _priced(self, price: float, in_flight: int, recompute: bool) -> None:
        price *= self._unit
        self._option(
            Terms(self.candidate.micro_batches, recompute, price_resident=price, price_saved=price * in_flight)
        )

    def _make_options(self, prices: Sequence[float], in_flight: Sequence[int]) -> None:
        for recompute in (False, True) if self.recompute else (False,):
            for k in dict.fromkeys(in_flight):
                for price in prices:
                    self._priced(max(price, TIE), k, recompute)

    def _exact_options(self, pipeline: Pipeline, reserve: float) -> bool:
        """Selections of the fullest stage's blocks under its memory limit, exact (CP-SAT where prices leave a gap).

        Returns whether there is a new option.
        """
        before = len(self.options)
        index = max(range(len(pipeline.stages)), key=lambda i: pipeline.stages[i].bytes)
        stage, in_flight = pipeline.stages[index], self.in_flight()[index]
        blocks = np.bincount(self.kinds[stage.first : stage.last], minlength=self.selection.kinds).astype(float)
        transient = self._stages(self.limit).transient_of(stage)
        room = self.limit - reserve - self.fixed - transient
        for recompute in dict.fromkeys(self.options[o].recompute for o in stage.options):
            terms = Terms(self.candidate.micro_batches, recompute, in_flight=in_flight * (1 + FRAGMENTATION))
            restricted = narrowed(self.selection.problem(terms, room, blocks), MAX_ENTRIES)
            with suppress(InfeasibleError):
                solution = solve(restricted.problem, EXACT)
                self._keep(restricted.restore(solution.assignment), recompute)
        return len(self.options) > before

    # -- stages ----------------------------------------------------------------------------------

    def _stages(self, limit: float, chosen: Sequence[int] | None = None) -> StageProblem:
        options = self.options if chosen is None else [self.options[i] for i in chosen]
        return StageProblem(
            self.kinds, [o.figures for o in options], [o.recompute for o in options],
            self.candidate.micro_batches, self.transfer, limit, self.fixed, FRAGMENTATION,
        )  # fmt: skip

    def _transfers(self, option: Option) -> Costs:
        """Seconds to hand one micro-batch to the next stage in front of each block."""
        count = len(self.kinds)
        if self.candidate.stages == 1:
            return np.zeros(count)
        size = self.candidate.mesh().size
        seconds = {
            kind: self.model.prices.transfer([(d, d + size, max(1, round(carried))) for d in range(size)])
            for kind, carried in enumerate(option.figures.carried)
        }
        return np.array([seconds[kind] for kind in self.kinds])

    # -- plans -----------------------------------------------------------------------------------

    def plan(self, pipeline: Pipeline, cluster: ClusterInfo, recipe: Recipe, schedule: str = "1f1b") -> Plan:
        """The pipeline written down as a plan."""
        blocks, groups = self.folding.blocks, self.folding.groups
        labels = [self.selection.labels(o.assignment) for o in self.options]
        layouts = [self.selection.parameters(o.assignment) for o in self.options]
        regions = RegionNames(self.graph)
        shared = labels[pipeline.stages[0].options[0]]
        rename = self._axis_names(pipeline)
        cuts = [[name for block in blocks[s.first : s.last] for name in block.operators] for s in pipeline.stages]
        drafts = []
        for index, (stage, names) in enumerate(
            zip(pipeline.stages, stage_operators(self.graph, self.folding, cuts), strict=True)
        ):
            chosen = {name: shared[groups[name]] for name in names if groups[name][0] < 0}
            recompute: list[str] = []
            option_of: dict[str, int] = {}
            for block, option in zip(blocks[stage.first : stage.last], stage.options, strict=True):
                chosen.update((name, labels[option][groups[name]]) for name in block.operators)
                option_of.update((name, option) for name in block.operators)
                if self.options[option].recompute and self._trained(block.operators):
                    recompute.append(regions.pattern(block.operators))
            mesh = self.candidate.mesh(index)
            parameters = self._parameters(option_of, layouts)
            own = [block.operators for block in blocks[stage.first : stage.last]]
            gathering = gathering_blocks(self.graph, own, parameters)
            drafts.append(
                StageDraft(
                    {rename[name]: size for name, size in mesh.axes},
                    mesh.devices,
                    names,
                    {name: {rename[a]: label for a, label in entry.items()} for name, entry in chosen.items()},
                    parameters,
                    tuple(recompute),
                    tuple(p for p in map(regions.pattern, gathering) if p not in recompute),
                )
            )
        return assemble(self.graph, cluster, recipe, drafts, self.candidate.micro_batches, schedule)

    def _trained(self, names: Sequence[str]) -> bool:
        return any(out in self.gradients for name in names for out in self.graph.operator[name].outputs)

    def _parameters(
        self, option_of: Mapping[str, int], layouts: Sequence[Mapping[Readers, ParameterLayouts]]
    ) -> dict[str, ParameterLayouts]:
        groups = self.folding.groups
        found = {}
        for tensor in self.graph.parameters:
            readers = self.graph.consumers[tensor.name]
            here = [op.name for op, _ in readers if op.name in option_of]
            if here:
                key = tuple(sorted({(groups[op.name], i) for op, i in readers}))
                found[tensor.name] = layouts[option_of[here[0]]][key]
        return found

    def _axis_names(self, pipeline: Pipeline) -> dict[str, str]:
        """A single axis is called by what it does: ``dp`` if most work is split along the batch, else ``tp``."""
        names = {name: name for name in self.candidate.mesh().axis_names}
        if len(names) != 1:
            return names
        (only,) = names
        by_batch = by_other = 0.0
        for stage in pipeline.stages:
            for block, option in zip(self.folding.blocks[stage.first : stage.last], stage.options, strict=True):
                labels = self.selection.labels(self.options[option].assignment)
                for name in block.operators:
                    label = labels[self.folding.groups[name]].get(only, "")
                    op = self.graph.operator[name]
                    if label and label == self.batch[name]:
                        by_batch += op.flops
                    elif label:
                        by_other += op.flops
        return {only: "dp" if by_batch >= by_other else "tp"}
