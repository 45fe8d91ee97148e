"""The forward pass: segments in order, each followed by the adapters of what it produced."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from searchspace.errors import IllegalPlanError
from searchspace.graph import Argument, LocalEnd, LocalOffset
from searchspace.layout import P, region_of
from searchspace.materialize.movement import Movement
from searchspace.materialize.slots import SlotTable
from searchspace.program import ONCE, BoundOperator, Forward, Instruction, Key, Rank, SegmentCode
from searchspace.resolve import EVERYWHERE, Adapter, Resolution, Segment, Version


@dataclass
class ForwardPass:
    """Emits forward tasks, and forward again where a region is recomputed."""

    resolution: Resolution
    slots: SlotTable
    move: Movement
    ready: set[Key] = field(default_factory=set)
    borrowed: set[Key] = field(default_factory=set)
    codes: dict[object, SegmentCode] = field(default_factory=dict)

    def prologue(self) -> None:
        """What runs once for all micro-batches."""
        resolution = self.resolution
        for stage in self.resolution.stages:
            for segment in resolution.segments[stage]:
                if segment.kind == "once":
                    self.run(segment, ONCE, keep=False)

    def total(self, source: Version) -> Key:
        """The sum of a version over all micro-batches."""
        if source.time != P:
            raise IllegalPlanError(f"{source.tensor}: only sums, not {source.time}, combine micro-batches")
        slot = self.slots[self.slots.data(source)]
        total = (self.slots.total(slot), ONCE)
        for micro_batch in range(self.resolution.time.micro_batches):
            self.move.accumulate(self.slots.key(source, micro_batch), total)
        return total

    def task(self, stage: int, micro_batch: int, train: bool) -> None:
        """Forward of one task; what has a backward keeps its graph unless it is recomputed."""
        for segment in self.resolution.segments[stage]:
            if segment.kind == "main":
                self.run(segment, micro_batch, keep=train and differentiable(segment) and segment.region is None)
        self.drop_gathered()

    def run(self, segment: Segment, micro_batch: int, keep: bool, again: bool = False) -> None:
        """Run a segment, then convert its outputs for their readers.  ``again``: recomputation."""
        inputs = tuple(self.read(version, micro_batch) for version in segment.inputs)
        outputs = tuple(self.slots.key(version, micro_batch) for version in segment.outputs)
        released: tuple[int, ...] = ()
        if keep and not again:
            released = tuple(i for i, version in enumerate(segment.inputs) if self.gathered(version))
        self.everywhere(
            segment.stage,
            lambda rank: Forward(
                self._code(segment, rank, micro_batch, keep), micro_batch, inputs, outputs, keep, released
            ),
        )
        self.ready.update(outputs)
        for version in segment.outputs:
            for adapter in self.resolution.adapters_from.get(version, ()):
                target = adapter.target
                inside = target.stage == segment.stage and (not again or self._read_in(target, segment))
                if target.stage == EVERYWHERE or (again and not inside):
                    continue
                if segment.kind == "once" and not self.slots.once(target):
                    continue
                self._adapt(adapter, micro_batch)

    def _read_in(self, version: Version, segment: Segment) -> bool:
        """Whether a segment of the same recompute region reads the version."""
        return any(
            version in other.inputs
            for other in self.resolution.segments[segment.stage]
            if other.region == segment.region
        )

    def gathered(self, version: Version) -> bool:
        """Whether a version is a parameter that is stored in another layout."""
        adapter = self.resolution.adapters.get(version)
        return (
            adapter is not None
            and version.tensor in self.resolution.parameters
            and adapter.source.layout != version.layout
        )

    def drop_gathered(self) -> None:
        """Parameters are gathered anew for each task."""
        self.ready = {key for key in self.ready if key not in self.borrowed}
        self.borrowed.clear()

    def read(self, version: Version, micro_batch: int) -> Key:
        """The key of a version, made by its adapter if it is not there yet."""
        key = self.slots.key(version, micro_batch)
        adapter = self.resolution.adapters.get(version)
        if adapter is None or key in self.ready:
            return key
        self._adapt(adapter, micro_batch)
        return key

    def _adapt(self, adapter: Adapter, micro_batch: int) -> None:
        key = self.slots.key(adapter.target, micro_batch)
        self.move.convert(micro_batch, self.read(adapter.source, micro_batch), key)
        self.ready.add(key)
        if adapter.source.tensor in self.resolution.parameters:
            self.borrowed.add(key)

    def _code(self, segment: Segment, rank: Rank, micro_batch: int, keep: bool) -> SegmentCode:
        count = (self.resolution.graph.batch or 1) // self.resolution.time.granule
        larger = 0 <= micro_batch < count % self.resolution.time.micro_batches
        operators = [self.resolution.graph.operator[name] for name in segment.operators]
        offsets = any(_uses_offset(op.args) or _uses_offset(tuple(v for _, v in op.kwargs)) for op in operators)
        key = (segment.name, rank, micro_batch if offsets else larger, keep)
        if key in self.codes:
            return self.codes[key]
        mesh = self.resolution.mesh(segment.stage)
        variables = {version: i for i, version in enumerate(segment.inputs)}
        bound = []
        for op in operators:
            reads = self.resolution.reads[segment.stage, op.name]
            produces = self.resolution.produces[segment.stage, op.name]
            for version in produces:
                variables[version] = len(variables)
            regions = tuple(
                region_of(self.resolution.time.base(v.tensor, v.time, micro_batch), v.layout, mesh, rank)
                for v in reads + produces
            )
            bound.append(
                BoundOperator(
                    op,
                    tuple(variables[v] for v in reads),
                    tuple(variables[v] for v in produces),
                    regions,
                    self.resolution.graph.shapes(op),
                )
            )
        code = SegmentCode(
            segment.name,
            tuple(bound),
            len(segment.inputs),
            tuple(variables[version] for version in segment.outputs),
            tuple(keep and version.gradient is not None for version in segment.inputs),
            tuple(keep and version.gradient is not None for version in segment.outputs),
        )
        self.codes[key] = code
        return code

    def everywhere(self, stage: int, make: Callable[[Rank], Instruction]) -> None:
        """One step on all ranks of a stage."""
        self.move.emit({rank: make(rank) for rank in self.resolution.mesh(stage).devices})


def differentiable(segment: Segment) -> bool:
    """Whether a segment has a backward."""
    return any(version.gradient is not None for version in segment.outputs)


def _uses_offset(arguments: Iterable[Argument]) -> bool:
    return any(isinstance(a, LocalOffset | LocalEnd) or (isinstance(a, tuple) and _uses_offset(a)) for a in arguments)
