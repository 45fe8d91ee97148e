"""Pipeline stages: which blocks form which stage, and which option each block takes under the memory limit.

An *option* is one strategy selection of the whole model, with or without recomputation, at some
price of memory; per block it has seconds, bytes that stay and bytes per micro-batch in flight.  For
each number of micro-batches in flight the options of a kind form a time-memory front; a stage takes
the fastest point of its blocks' joint front that fits, mixing two neighbouring points block by
block.  Dynamic programming over blocks then finds the cut (Alpa, arXiv 2201.12023, section 5.2, for
equal meshes): for a bound on the slowest stage, the least sum, where

    step = sum of stages + (micro-batches - 1) x slowest stage + what happens once per step.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoplan.search.figures import KindFigures
from autoplan.search.problem import Costs

MAX_LEVELS = 24
"""Points of a joint front that are kept."""


@dataclass(frozen=True)
class StageCut:
    """One stage: blocks ``[first, last)``, the option of each of them, seconds per micro-batch, bytes."""

    first: int
    last: int
    options: tuple[int, ...]
    seconds: float
    step: float
    bytes: float


@dataclass(frozen=True)
class Pipeline:
    """Stages in forward order, and the estimate of a step."""

    stages: tuple[StageCut, ...]
    seconds: float


@dataclass(frozen=True, eq=False)
class Front:
    """The joint time-memory front of all kinds for one number of micro-batches in flight.

    ``options[l, kind]`` is the option of each kind at level l; levels go from fast to small.
    """

    options: NDArray[np.intp]


class StageProblem:
    """Cutting ``kinds`` (the kind of each block) into stages, given each option's figures.

    ``fixed`` bytes are needed on every device, ``overhead`` is the share lost by the allocator,
    ``transfer[b]`` seconds to hand a micro-batch over in front of block b (forward and backward each).
    """

    def __init__(
        self,
        kinds: Sequence[int],
        options: Sequence[KindFigures],
        recompute: Sequence[bool],
        micro_batches: int,
        transfer: Costs,
        limit: float,
        fixed: float = 0.0,
        overhead: float = 0.0,
    ) -> None:
        self.kinds = np.asarray(kinds, dtype=np.intp)
        self.options, self.micro_batches, self.transfer = options, micro_batches, transfer
        self.limit, self.fixed = limit, fixed
        self._fronts: dict[int, Front] = {}
        stack = lambda name: np.array([getattr(o, name) for o in options])  # noqa: E731
        self.seconds = stack("seconds")
        self.step = stack("step")
        self.time = self.seconds + self.step / micro_batches
        self.resident = stack("resident")
        self.saved = (1 + overhead) * stack("saved")
        again = np.asarray(recompute)[:, None]
        passing = np.where(again, stack("interior"), 0.0) + stack("gathered") + stack("working")
        self.transient = (1 + overhead) * passing

    def bound(self, stages: int) -> float:
        """No cut into ``stages`` is faster than this, whatever the memory."""
        total = float(self.time.min(axis=0)[self.kinds].sum())
        return total + (self.micro_batches - 1) * total / stages

    def solve(self, stages: int, in_flight: Sequence[int]) -> Pipeline | None:
        """The best cut; ``in_flight[s]`` micro-batches of stage s are kept at once.  None if nothing fits."""
        count = len(self.kinds)
        if stages > count:
            return None
        tables = {k: self._intervals(k) for k in dict.fromkeys(in_flight)}
        per_stage = [self._with_transfers(tables[k], s, stages) for s, k in enumerate(in_flight)]
        slowest = self._minimise(per_stage, bottleneck=True, bound=np.inf)
        if slowest is None:
            return None
        best: Pipeline | None = None
        for slack in (1.0, 1.02, 1.08, 1.2, np.inf):
            cuts = self._minimise(per_stage, bottleneck=False, bound=slowest[0] * slack * (1 + 1e-12))
            if cuts is None:
                continue
            pipeline = self._pipeline(cuts[1], in_flight)
            if pipeline is not None and (best is None or pipeline.seconds < best.seconds):
                best = pipeline
        return best

    # -- fronts ----------------------------------------------------------------------------------

    def front(self, in_flight: int) -> Front:
        """Levels of the joint front: kinds move along their own fronts in order of seconds per byte saved."""
        if in_flight not in self._fronts:
            self._fronts[in_flight] = self._front(in_flight)
        return self._fronts[in_flight]

    def _front(self, in_flight: int) -> Front:
        memory = self.resident + in_flight * self.saved
        moves: list[tuple[float, int, int]] = []
        start = np.zeros(self.time.shape[1], dtype=np.intp)
        for kind in range(self.time.shape[1]):
            hull = _hull(self.time[:, kind], memory[:, kind])
            start[kind] = hull[0]
            for a, b in itertools.pairwise(hull):
                rate = (self.time[b, kind] - self.time[a, kind]) / (memory[a, kind] - memory[b, kind])
                moves.append((float(rate), kind, b))
        levels = [start]
        for _, kind, option in sorted(moves):
            after = levels[-1].copy()
            after[kind] = option
            levels.append(after)
        if len(levels) > MAX_LEVELS:
            chosen = np.unique(np.linspace(0, len(levels) - 1, MAX_LEVELS).round().astype(int))
            levels = [levels[i] for i in chosen]
        return Front(np.array(levels))

    def _intervals(self, in_flight: int) -> Costs:
        """Seconds of a stage of blocks [a, b): fastest mixture that fits; inf where nothing does.  Shape (n+1, n+1)."""
        options = self.front(in_flight).options
        count = len(self.kinds)
        seconds = np.full((count + 1, count + 1), np.inf)
        before_time: Costs | None = None
        before_memory: Costs | None = None
        for level in options:
            time = _sums(self.time[level, np.arange(len(level))][self.kinds])
            memory = _sums((self.resident + in_flight * self.saved)[level, np.arange(len(level))][self.kinds])
            memory = memory + self._transient(level)
            room = self.limit - self.fixed - memory
            fits = room >= 0
            value = np.where(fits, time, np.inf)
            if before_time is not None and before_memory is not None:
                gained = before_memory - memory
                share = np.divide(room, gained, out=np.zeros_like(room), where=gained > 0)
                mixed = time + np.clip(share, 0.0, 1.0) * (before_time - time)
                value = np.where(fits, np.minimum(value, mixed), np.inf)
            seconds = np.minimum(seconds, value)
            if fits[0, count]:
                break  # so does every shorter stage
            before_time, before_memory = time, memory
        seconds[np.tril_indices(count + 1)] = np.inf
        return seconds

    def _transient(self, level: NDArray[np.intp]) -> float:
        return float(self.transient[level, np.arange(len(level))].max(initial=0.0))

    def _with_transfers(self, table: Costs, stage: int, stages: int) -> Costs:
        count = len(self.kinds)
        table = table.copy()
        if stage > 0:
            table[:count] += self.transfer[:, None]
        if stage < stages - 1:
            table[:, 1:count] += self.transfer[None, 1:]
        return table

    # -- dynamic programming ---------------------------------------------------------------------

    def _minimise(
        self, tables: Sequence[Costs], bottleneck: bool, bound: float
    ) -> tuple[float, list[tuple[int, int]]] | None:
        """Cuts that minimise the slowest stage, or the sum among stages no slower than ``bound``."""
        count = len(self.kinds)
        best = np.full(count + 1, np.inf)
        best[0] = 0.0
        came = []
        for table in tables:
            allowed = np.where(table <= bound, table, np.inf)
            total = np.maximum(best[:, None], allowed) if bottleneck else best[:, None] + allowed
            came.append(total.argmin(axis=0))
            best = total.min(axis=0)
        if not np.isfinite(best[count]):
            return None
        cuts, end = [], count
        for origin in reversed(came):
            cuts.append((int(origin[end]), end))
            end = int(origin[end])
        return float(best[count]), cuts[::-1]

    def _pipeline(self, cuts: Sequence[tuple[int, int]], in_flight: Sequence[int]) -> Pipeline | None:
        """Options block by block: whole levels first, then as many blocks as fit take the faster level."""
        stages = []
        for index, ((first, last), k) in enumerate(zip(cuts, in_flight, strict=True)):
            chosen = self._mixture(first, last, k)
            if chosen is None:
                return None
            kinds = self.kinds[first:last]
            moved = (self.transfer[first] if index else 0.0) + (self.transfer[last] if last < len(self.kinds) else 0.0)
            stages.append(
                StageCut(
                    first,
                    last,
                    tuple(map(int, chosen)),
                    float(self.seconds[chosen, kinds].sum() + moved),
                    float(self.step[chosen, kinds].sum()),
                    self._bytes(chosen, kinds, k),
                )
            )
        return Pipeline(tuple(stages), step_seconds(stages, self.micro_batches))

    def _bytes(self, chosen: NDArray[np.intp], kinds: NDArray[np.intp], in_flight: int) -> float:
        kept = self.resident[chosen, kinds] + in_flight * self.saved[chosen, kinds]
        return float(kept.sum() + self.transient[chosen, kinds].max(initial=0.0) + self.fixed)

    def transient_of(self, stage: StageCut) -> float:
        """Bytes of a stage that are there only while one of its blocks runs."""
        kinds = self.kinds[stage.first : stage.last]
        return float(self.transient[list(stage.options), kinds].max(initial=0.0))

    def _mixture(self, first: int, last: int, in_flight: int) -> NDArray[np.intp] | None:
        kinds = self.kinds[first:last]
        faster: NDArray[np.intp] | None = None
        for level in self.front(in_flight).options:
            chosen = level[kinds]
            if self._bytes(chosen, kinds, in_flight) > self.limit:
                faster = chosen
                continue
            if faster is not None:
                for i in np.flatnonzero(faster != chosen):
                    trial = chosen.copy()
                    trial[i] = faster[i]
                    if self._bytes(trial, kinds, in_flight) <= self.limit:
                        chosen = trial
            return chosen
        return None

    def least_bytes(self, stages: int, in_flight: Sequence[int]) -> float:
        """The memory of the fullest stage, in the cut and with the options that need least of it."""
        least = np.inf
        for back in range(1, MAX_LEVELS + 1):
            tables = []
            for k in in_flight:
                levels = self.front(k).options
                level = levels[max(len(levels) - back, 0)]
                every = np.arange(len(level))
                bytes = _sums((self.resident + k * self.saved)[level, every][self.kinds]) + self._transient(level)
                bytes[np.tril_indices(len(self.kinds) + 1)] = np.inf
                tables.append(bytes)
            found = self._minimise(tables, bottleneck=True, bound=np.inf)
            if found is None or found[0] >= least:
                break  # from the smallest level on, as long as what passes by gets smaller
            least = found[0]
        return self.fixed + least


def step_seconds(stages: Sequence[StageCut], micro_batches: int) -> float:
    """The estimate of a step: the first micro-batch through all stages, the others behind the slowest one."""
    slowest = max(stage.seconds for stage in stages)
    return sum(s.seconds for s in stages) + (micro_batches - 1) * slowest + max(s.step for s in stages)


def _sums(values: Costs) -> Costs:
    """``out[a, b] = values[a:b].sum()``, shape (n+1, n+1)."""
    total = np.append(0.0, np.cumsum(values))
    return total[None, :] - total[:, None]


def _hull(time: Costs, memory: Costs) -> list[int]:
    """Options on the lower convex hull of (memory, time), from the fastest to the smallest."""
    order = sorted(range(len(time)), key=lambda i: (time[i], memory[i], i))
    hull: list[int] = []
    for i in order:
        if hull and memory[i] >= memory[hull[-1]]:
            continue
        while len(hull) >= 2 and (time[hull[-1]] - time[hull[-2]]) * (memory[hull[-1]] - memory[i]) >= (
            time[i] - time[hull[-1]]
        ) * (memory[hull[-2]] - memory[hull[-1]]):
            hull.pop()
        hull.append(i)
    return hull
