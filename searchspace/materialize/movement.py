"""Movement: the steps that bring a buffer from one slot to another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from searchspace.conversion import Move, Prices, cheapest_path, check_coverage, lower
from searchspace.graph import DTYPE_BYTES
from searchspace.layout import Partial, R, Region, Split, intersect, local_shape, region_of, relative
from searchspace.materialize.slots import SlotTable
from searchspace.program import Accumulate, Alias, Exchange, Instruction, Key, Rank, Step


@dataclass
class Movement:
    """Appends steps; knows nothing of operators."""

    slots: SlotTable
    prices: Prices
    steps: list[Step] = field(default_factory=list)
    proved: set[tuple[Move, Region]] = field(default_factory=set)

    def emit(self, ranks: Mapping[Rank, Instruction]) -> None:
        """Append one step."""
        if ranks:
            self.steps.append(Step(ranks))

    def convert(self, micro_batch: int, source: Key, target: Key) -> None:
        """Emit what turns the buffer ``source`` into ``target``, on the time axis and on the meshes."""
        have, want = self.slots[source[0]], self.slots[target[0]]
        if have.time == want.time:
            self._path(self.slots.base(have, micro_batch), source, target)
            return
        before = self.slots.base(have, micro_batch)
        after = self.slots.resolution.time.base(have.tensor, want.time, micro_batch)
        anywhere = all(p == R for p in have.layout) and not any(isinstance(p, Partial) for p in want.layout)
        if isinstance(want.time, Split) and anywhere and set(want.mesh.devices) <= set(have.mesh.devices):
            self._copy(before, after, source, target)
            return
        # Slicing or placing a micro-batch is local where no axis splits the batch dimension.
        cut = want.time if isinstance(want.time, Split) else have.time
        flat = tuple(
            R if isinstance(p, Split) and isinstance(cut, Split) and p.dim == cut.dim else p for p in have.layout
        )
        at = source
        if flat != have.layout:
            at = (self.slots.via(want, have.mesh, flat, have.time), source[1])
            self._path(before, source, at)
        direct = (want.mesh, want.layout) == (have.mesh, flat)
        to = target if direct else (self.slots.via(want, have.mesh, flat, want.time), target[1])
        nothing = have.time == R and isinstance(want.time, Partial) and micro_batch > 0
        self._copy(None if nothing else before, after, at, to)
        if not direct:
            self._path(after, to, target)

    def _path(self, base: Region, source: Key, target: Key) -> None:
        """The cheapest path between two layouts of ``base``, in the target's dtype."""
        have, want = self.slots[source[0]], self.slots[target[0]]
        path = cheapest_path(
            local_shape(base), DTYPE_BYTES[want.dtype], (have.mesh, have.layout), (want.mesh, want.layout), self.prices
        )
        if not path.moves and have.dtype == want.dtype:
            self.emit({rank: Alias(source, target) for rank in want.mesh.devices})
        elif not path.moves:
            self._copy(base, base, source, target)
        at = source
        for number, move in enumerate(path.moves):
            last = number == len(path.moves) - 1
            to = target if last else (self.slots.via(want, move.target_mesh, move.target, want.time), target[1])
            exchanges = lower(move, base, at, to, want.dtype)
            if (move, base) not in self.proved:
                check_coverage(want.tensor, exchanges, base, move.before, move.after)
                self.proved.add((move, base))
            self.emit(exchanges)
            at = to

    def _copy(self, before: Region | None, after: Region, source: Key, target: Key) -> None:
        """Each rank copies what its source (part of ``before``) and its target (of ``after``) share."""
        have, want = self.slots[source[0]], self.slots[target[0]]
        found: dict[Rank, Instruction] = {}
        for rank in want.mesh.devices:
            goal = region_of(after, want.layout, want.mesh, rank)
            send: tuple[tuple[Rank, Region], ...] = ()
            receive: tuple[tuple[Rank, Region], ...] = ()
            if before is not None:
                held = region_of(before, have.layout, have.mesh, rank)
                common = intersect(held, goal)
                if common is not None:
                    send, receive = ((rank, relative(common, held)),), ((rank, relative(common, goal)),)
            found[rank] = Exchange("local", (rank,), source, target, send, receive, None, local_shape(goal), want.dtype)
        self.emit(found)

    def accumulate(self, source: Key, target: Key) -> None:
        mesh = self.slots[target[0]].mesh
        self.emit({rank: Accumulate(source, target) for rank in mesh.devices})

    def add_converted(self, micro_batch: int, source: Key, target: Key) -> None:
        """Add ``source``, converted to the layout of ``target``, to ``target``."""
        want = self.slots[target[0]]
        have = self.slots[source[0]]
        if (have.mesh, have.layout, have.time) == (want.mesh, want.layout, want.time):
            self.accumulate(source, target)
            return
        via = (self.slots.via(want, want.mesh, want.layout, want.time), micro_batch)
        self.convert(micro_batch, source, via)
        self.accumulate(via, target)
