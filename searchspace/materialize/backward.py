"""The backward pass: segments in reverse, each preceded by the backward half of its adapters."""

from __future__ import annotations

from dataclasses import dataclass

from searchspace.layout import Partial, R
from searchspace.materialize.forward import ForwardPass, differentiable
from searchspace.materialize.movement import Movement
from searchspace.materialize.parameters import ParameterStates
from searchspace.materialize.slots import SlotTable
from searchspace.program import ONCE, Backward, Free, Key, Ones
from searchspace.resolve import Adapter, Resolution, Segment, Version


@dataclass
class BackwardPass:
    """Emits backward tasks."""

    resolution: Resolution
    slots: SlotTable
    move: Movement
    forward: ForwardPass
    parameters: ParameterStates

    def segments(self, stage: int) -> list[Segment]:
        """The segments of a stage that have a backward, in forward order."""
        return [s for s in self.resolution.segments[stage] if s.kind == "main" and differentiable(s)]

    def task(self, stage: int, micro_batch: int, pending: dict[str, set[str]] | None) -> None:
        """Backward of one task; with ``pending``, parameters are synchronised as soon as they are complete."""
        recomputed: set[int] = set()
        for segment in reversed(self.segments(stage)):
            if segment.region is not None and segment.region not in recomputed:
                recomputed.add(segment.region)
                self._recompute(stage, segment.region, micro_batch)
            self._collect(segment, micro_batch)
            self._differentiate(segment, micro_batch)
            if pending is not None:
                self._finish(segment, pending)
        for adapter in self.resolution.adapters.values():
            if adapter.target.stage == stage and adapter.crosses and adapter.target.gradient is not None:
                self._return(adapter, micro_batch)
        self.forward.drop_gathered()

    def _recompute(self, stage: int, region: int, micro_batch: int) -> None:
        for segment in self.resolution.segments[stage]:
            if segment.region == region and segment.kind == "main":
                self.forward.run(segment, micro_batch, keep=differentiable(segment), again=True)

    def _collect(self, segment: Segment, micro_batch: int) -> None:
        """Complete the gradients of a segment's outputs: the seed of the loss, adapters backward."""
        for version in segment.outputs:
            if version.gradient is None:
                continue
            if version.tensor == self.resolution.graph.loss and (version.time != R or micro_batch <= 0):
                self._seed(version, micro_batch)
            for adapter in self.resolution.adapters_from.get(version, ()):
                if not adapter.crosses and adapter.target.gradient is not None and not self._direct(adapter):
                    self._return(adapter, micro_batch)

    def _seed(self, version: Version, micro_batch: int) -> None:
        slot = self.slots[self.slots.gradient(version)]
        seed = (self.slots.via(slot, slot.mesh, slot.layout, slot.time), micro_batch)
        shape = self.resolution.graph.tensor[version.tensor].shape
        self.forward.everywhere(version.stage, lambda rank: Ones(seed, shape, slot.dtype))
        self.move.accumulate(seed, (slot.name, micro_batch))

    def _direct(self, adapter: Adapter) -> bool:
        """Whether readers add their gradient to the source's own buffer."""
        source, target = adapter.source, adapter.target
        return (
            not adapter.crosses
            and target.gradient is not None
            and source.gradient == target.gradient
            and source.time == target.time
        )

    def _return(self, adapter: Adapter, micro_batch: int) -> None:
        """The backward half of an adapter."""
        source, target = adapter.source, adapter.target
        if source.gradient is None or (source.time == R and isinstance(target.time, Partial) and micro_batch > 0):
            return
        self.move.add_converted(
            micro_batch, self._gradient_key(target, micro_batch), self._gradient_key(source, micro_batch)
        )

    def _gradient_key(self, version: Version, micro_batch: int) -> Key:
        home = self.resolution.parameters.get(version.tensor)
        if home is not None:
            site = home.sites[version.stage]
            if version.gradient == site.gradient and version.time == R:
                return (self.parameters.held(home, version.stage), ONCE)
        adapter = self.resolution.adapters.get(version)
        if adapter is not None and self._direct(adapter):
            return self._gradient_key(adapter.source, micro_batch)
        return (self.slots.gradient(version), micro_batch)

    def _differentiate(self, segment: Segment, micro_batch: int) -> None:
        outputs = tuple(
            None if version.gradient is None else self._gradient_key(version, micro_batch)
            for version in segment.outputs
        )
        inputs = tuple(
            None if version.gradient is None else self._gradient_key(version, micro_batch) for version in segment.inputs
        )
        fetched: tuple[Key, ...] = ()
        if segment.region is None:
            fetched = tuple(
                self.forward.read(version, micro_batch) for version in segment.inputs if self.forward.gathered(version)
            )
        self.forward.everywhere(
            segment.stage, lambda rank: Backward(segment.name, micro_batch, outputs, inputs, fetched)
        )
        for version, key in zip(segment.inputs, inputs, strict=True):
            home = self.resolution.parameters.get(version.tensor)
            if home is not None and key is not None and key[1] != ONCE:
                self.move.add_converted(micro_batch, key, (self.parameters.held(home, version.stage), ONCE))
                # a tied parameter is used again: that gradient must not be added to this one
                consumed = Free((key,))
                self.move.emit(dict.fromkeys(self.resolution.mesh(segment.stage).devices, consumed))

    def pending(self) -> dict[str, set[str]]:
        """For each parameter with a gradient, the segments that add to it."""
        found: dict[str, set[str]] = {}
        for stage in self.resolution.stages:
            for segment in reversed(self.segments(stage)):
                for version in segment.inputs:
                    if version.gradient is not None and version.tensor in self.resolution.parameters:
                        found.setdefault(version.tensor, set()).add(segment.name)
        return found

    def _finish(self, segment: Segment, pending: dict[str, set[str]]) -> None:
        for version in segment.inputs:
            waiting = pending.get(version.tensor)
            if waiting is not None and segment.name in waiting:
                waiting.discard(segment.name)
                if not waiting:
                    self.parameters.synchronise(version.tensor)
                    del pending[version.tensor]
