"""Screening: what a candidate could reach at best, from whole-model figures alone, to decide the order.

Compute is taken as spread evenly over the mesh, at the efficiency of the micro-batch's size; the
pipeline adds its ramp; and where activations do not fit although perfectly sharded, the share of
layers that has to be recomputed adds their forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from autoplan.search.candidates import Candidate, candidates
from autoplan.search.context import Context
from searchspace.errors import SearchError
from searchspace.layout import R
from searchspace.mesh import Mesh

_ONE = Mesh((("dp", 1),), (0,))


@dataclass(frozen=True)
class _Whole:
    """One micro-batch of the whole model on one device: seconds, and bytes between forward and backward."""

    forward: float
    backward: float
    saved: float


class Screening:
    """Estimates of candidates, and the families in which they are explored."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self._wholes: dict[int, _Whole] = {}

    def families(self) -> list[list[tuple[float, Candidate]]]:
        """Candidates of one mesh with their estimates, by micro-batches; the most promising mesh first.

        Raises SearchError when no candidate is possible.
        """
        context, options = self.context, self.context.options
        found: dict[tuple[int, int, int], list[tuple[float, Candidate]]] = {}
        blocks, batch = len(context.folding.blocks), context.graph.batch
        for candidate in candidates(context.cluster, blocks, batch, context.granule):
            wanted = (
                (options.stages, candidate.stages),
                (options.inner, candidate.inner),
                (options.micro_batches, candidate.micro_batches),
            )
            if any(allowed is not None and value not in allowed for allowed, value in wanted):
                continue
            if context.model(candidate.micro_batches) is not None:
                shape = (candidate.stages, candidate.outer, candidate.inner)
                found.setdefault(shape, []).append((self.estimate(candidate), candidate))
        if not found:
            reasons = "".join(f"; with {m} micro-batches: {why}" for m, why in list(context.refused.items())[:3])
            raise SearchError(
                f"no candidate for {context.graph.name} with a batch of {batch} on {context.cluster.size} devices "
                f"within the options{reasons}"
            )
        return sorted(found.values(), key=lambda family: min(family))

    def estimate(self, candidate: Candidate) -> float:
        """Seconds of a step without any communication."""
        context, whole = self.context, self._whole(candidate.micro_batches)
        devices = candidate.outer * candidate.inner
        seconds = whole.forward + whole.backward
        if context.training:
            room = context.limit - self._state / context.cluster.size
            stages, count = candidate.stages, candidate.micro_batches
            in_flight = sum(min(stages - s, count) for s in range(stages)) / stages
            needed = in_flight * whole.saved / stages / devices
            if needed > room:
                seconds += whole.forward * min(1.0, 1.0 - max(room, 0.0) / needed)
        ramp = (candidate.micro_batches + candidate.stages - 1) / candidate.stages
        return seconds / devices * ramp

    @cached_property
    def _state(self) -> float:
        """Bytes of all parameters with gradients, master copies and optimizer states, once."""
        model, mesh, whole = self.context.model(1), _ONE, (R,)
        assert model is not None
        found = 0
        for tensor in self.context.graph.parameters:
            held = whole if tensor.name in self.context.gradients else None
            found += model.parameter_bytes(tensor.name, mesh, whole, held, whole).total
        return float(found)

    def _whole(self, micro_batches: int) -> _Whole:
        if micro_batches not in self._wholes:
            model, context = self.context.model(micro_batches), self.context
            assert model is not None
            forward = backward = saved = 0.0
            for kind, block in {block.kind: block for block in reversed(context.folding.blocks)}.items():
                count = context.folding.counts[kind]
                for name in block.operators:
                    op = context.graph.operator[name]
                    cost = model.operator(op, (op.rule.choices[""],), _ONE)
                    forward += count * cost.forward
                    backward += count * cost.backward
                    saved += count * cost.saved
            self._wholes[micro_batches] = _Whole(forward, backward, saved)
        return self._wholes[micro_batches]
