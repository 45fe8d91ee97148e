"""The check of a program before anything starts: every rank's part against every other's.

A walk through the global order with no data: which keys hold a buffer of which shape and dtype, which
segments are kept, and whether what each rank sends is what its peer expects.  A mismatch that would
hang or kill real processes becomes an error that names step, rank and key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

from searchspace.errors import ExecutionError
from searchspace.layout import Region, Shape, intersect, local_shape
from searchspace.program import (
    ONCE,
    Accumulate,
    Alias,
    Backward,
    Exchange,
    Forward,
    Free,
    Instruction,
    Key,
    Ones,
    Program,
    Rank,
    SegmentCode,
    Slices,
    SlotName,
)


@dataclass
class _State:
    """What one rank holds: shapes by key (None: not known), and kept segments."""

    shapes: dict[Key, Shape | None] = field(default_factory=dict)
    kept: dict[tuple[str, int], Forward] = field(default_factory=dict)
    empty: set[Key] = field(default_factory=set)
    """Gradients that were read though nothing was there: they count as zero, and may be freed."""


def check_program(program: Program) -> None:
    """Raise ExecutionError unless all ranks' parts of ``program`` fit together.

    Every send has its receive, of equal shape and dtype, in the same step; the members of a group take
    part with the same kind of exchange; every key is written before it is read, and freed once; every
    kept segment has one backward; results are there at the end, and nothing else.
    """
    _Check(program).run()


class _Check:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.states = {rank: _State() for rank in program.ranks}
        self.at = "before the first step"
        stored = [name for b in program.parameters for name in (b.optimizer, *b.stored)]
        self.bound = [*program.inputs.values(), *program.buffers.values(), *program.constants.values(), *stored]
        self.persistent = {*self.bound, *program.outputs.values(), *((program.loss,) if program.loss else ())}
        self.persistent |= {b.gradient for b in program.parameters if b.gradient}

    def run(self) -> None:
        for name in self.bound:
            slot = self.program.slots.get(name)
            if slot is None:
                raise self._error(f"slot {name!r} is bound but not declared")
            for rank in slot.mesh.devices:
                if rank in self.states:
                    self.states[rank].shapes[(name, ONCE)] = None
        for number, step in enumerate(self.program.steps):
            self.at = f"step {number}"
            exchanges = {rank: i for rank, i in step.ranks.items() if isinstance(i, Exchange)}
            for rank, instruction in step.ranks.items():
                if rank not in self.states:
                    raise self._error(f"rank {rank} is not one of the program's ranks {self.program.ranks}")
                self._local(rank, instruction)
            self._rendezvous(exchanges)
        self.at = "at the end"
        self._end()

    def _error(self, text: str) -> ExecutionError:
        return ExecutionError(f"the program is inconsistent {self.at}: {text}")

    # -- one rank --------------------------------------------------------------------------------

    def _local(self, rank: Rank, instruction: Instruction) -> None:
        state = self.states[rank]
        match instruction:
            case Forward():
                self._forward(rank, state, instruction)
            case Backward():
                self._backward(rank, state, instruction)
            case Exchange(source=source) if source is not None:
                self._read(rank, source)
            case Accumulate(source, target):
                self._add(rank, target, self._read(rank, source))
            case Alias(source, target):
                self._write(rank, target, self._read(rank, source))
            case Ones(target, shape, _):
                self._write(rank, target, shape)
            case Free(keys):
                for key in keys:
                    if key not in state.shapes and key not in state.empty:
                        raise self._error(f"rank {rank} frees {key}, which holds nothing")
                    state.shapes.pop(key, None)
                    state.empty.discard(key)

    def _forward(self, rank: Rank, state: _State, op: Forward) -> None:
        code = op.segment
        if len(op.inputs) != code.inputs or len(op.outputs) != len(code.outputs):
            raise self._error(
                f"rank {rank} calls segment {code.name} with {len(op.inputs)} inputs and {len(op.outputs)} outputs; "
                f"it has {code.inputs} and {len(code.outputs)}"
            )
        shapes = variable_shapes(code)
        for variable, key in enumerate(op.inputs):
            wanted, found = shapes.get(variable), self._read(rank, key)
            if wanted is not None and found is not None and wanted != found:
                raise self._error(f"rank {rank}, segment {code.name}: {key} has shape {found}, the code needs {wanted}")
            if found is None:
                state.shapes[key] = wanted
        identity = (code.name, op.micro_batch)
        if op.keep:
            if identity in state.kept:
                raise self._error(f"rank {rank} keeps segment {identity} twice")
            state.kept[identity] = op
        for variable, key in zip(code.outputs, op.outputs, strict=True):
            self._write(rank, key, shapes.get(variable))

    def _backward(self, rank: Rank, state: _State, op: Backward) -> None:
        forward = state.kept.pop((op.segment, op.micro_batch), None)
        if forward is None:
            raise self._error(f"rank {rank}: backward of {(op.segment, op.micro_batch)}, which is not kept")
        code = forward.segment
        if len(op.output_gradients) != len(code.outputs) or len(op.input_gradients) != code.inputs:
            raise self._error(f"rank {rank}: backward of {code.name} has another number of inputs or outputs")
        if len(op.fetched) != len(forward.released):
            raise self._error(f"rank {rank}: backward of {code.name} needs {len(forward.released)} released inputs")
        shapes = variable_shapes(code)
        for key in op.fetched:
            self._read(rank, key)
        for variable, seed in zip(code.outputs, op.output_gradients, strict=True):
            if seed is None:
                continue
            if seed not in state.shapes:
                state.empty.add(seed)
                continue
            self._same(rank, seed, state.shapes[seed], shapes.get(variable))
        for variable, target in enumerate(op.input_gradients):
            if target is not None:
                if not code.differentiable[variable]:
                    raise self._error(f"rank {rank}: segment {code.name} has no gradient for its input {variable}")
                self._add(rank, target, shapes.get(variable))

    def _read(self, rank: Rank, key: Key) -> Shape | None:
        shapes = self.states[rank].shapes
        if key not in shapes:
            raise self._error(f"rank {rank} reads {key}, which holds nothing")
        return shapes[key]

    def _write(self, rank: Rank, key: Key, shape: Shape | None) -> None:
        if key[0] not in self.program.slots:
            raise self._error(f"rank {rank} writes {key}, whose slot is not declared")
        if key in self.states[rank].shapes and key[0] not in self.persistent:
            raise self._error(f"rank {rank} writes {key} anew, which still holds something")
        self.states[rank].shapes[key] = shape
        self.states[rank].empty.discard(key)

    def _add(self, rank: Rank, key: Key, shape: Shape | None) -> None:
        present = self.states[rank].shapes.get(key)
        self._same(rank, key, present, shape)
        if key not in self.states[rank].shapes:
            self._write(rank, key, shape)
        elif present is None:
            self.states[rank].shapes[key] = shape

    def _same(self, rank: Rank, key: Key, present: Shape | None, shape: Shape | None) -> None:
        if present is not None and shape is not None and present != shape:
            raise self._error(f"rank {rank}: {key} has shape {present}, and {shape} does not fit it")

    # -- all ranks -------------------------------------------------------------------------------

    def _rendezvous(self, exchanges: Mapping[Rank, Exchange]) -> None:
        for rank, mine in exchanges.items():
            if rank not in mine.group:
                raise self._error(f"rank {rank} is not in its group {mine.group}")
            for peer in mine.group:
                other = exchanges.get(peer)
                if other is None:
                    raise self._error(f"rank {rank} meets rank {peer} in {mine.kind}, but that rank does not take part")
                agreed = (other.kind, other.group, other.dtype, other.reduction)
                if agreed != (mine.kind, mine.group, mine.dtype, mine.reduction):
                    raise self._error(f"ranks {rank} and {peer} disagree: {_terms(mine)} and {_terms(other)}")
                sent = [slices for to, slices in mine.send if to == peer]
                expected = [slices for origin, slices in other.receive if origin == rank]
                if [_extent(s) for s in sent] != [_extent(s) for s in expected]:
                    raise self._error(
                        f"rank {rank} sends {[_extent(s) for s in sent]} to rank {peer}, "
                        f"which expects {[_extent(s) for s in expected]}"
                    )
            self._entries(rank, mine)
        for rank, mine in exchanges.items():
            if mine.target is not None:
                self._write(rank, mine.target, mine.shape)

    def _entries(self, rank: Rank, mine: Exchange) -> None:
        strangers = {peer for peer, _ in (*mine.send, *mine.receive)} - set(mine.group)
        if strangers:
            raise self._error(f"rank {rank} exchanges with {sorted(strangers)}, outside its group {mine.group}")
        source = None if mine.source is None else self._read(rank, mine.source)
        if mine.source is None and mine.send:
            raise self._error(f"rank {rank} sends, but has no source")
        if mine.target is None and mine.receive:
            raise self._error(f"rank {rank} receives, but has no target")
        for _, slices in mine.send:
            if source is not None and not _inside(slices, source):
                raise self._error(f"rank {rank} sends {slices} of {mine.source}, whose shape is {source}")
        places: dict[Slices, int] = {}
        for _, slices in mine.receive:
            if not _inside(slices, mine.shape):
                raise self._error(f"rank {rank} receives {slices} of {mine.target}, whose shape is {mine.shape}")
            places[slices] = places.get(slices, 0) + 1
        distinct = tuple(places)
        for i, first in enumerate(distinct):
            if places[first] > 1 and mine.reduction is None:
                raise self._error(f"rank {rank} receives {first} of {mine.target} {places[first]} times, unreduced")
            if any(intersect(first, second) for second in distinct[i + 1 :] if prod(_extent(second))):
                raise self._error(f"rank {rank} receives overlapping parts of {mine.target}")
        self._kind(rank, mine, source)

    def _kind(self, rank: Rank, mine: Exchange, source: Shape | None) -> None:
        """What the kind promises about the entries, on which the collectives of the backends rely."""
        if mine.kind == "send_receive":
            return
        members = sorted(mine.group)
        if mine.kind == "local" and members != [rank]:
            raise self._error(f"rank {rank}: a local exchange has the group {mine.group}")
        if mine.kind == "local":
            return
        if mine.source is None or mine.target is None:
            raise self._error(f"rank {rank}: {mine.kind} needs source and target")
        if mine.kind == "all_to_all":
            return
        senders, receivers = sorted(p for p, _ in mine.receive), sorted(p for p, _ in mine.send)
        if senders != members or receivers != members:
            raise self._error(f"rank {rank}: {mine.kind} needs one entry for each of {mine.group} in both directions")
        reduces = mine.kind in ("all_reduce", "reduce_scatter")
        if reduces != (mine.reduction is not None):
            raise self._error(f"rank {rank}: {mine.kind} with reduction {mine.reduction}")
        full = _whole(mine.shape)
        if reduces and any(slices != full for _, slices in mine.receive):
            raise self._error(f"rank {rank}: {mine.kind} must fill the whole of {mine.target} from each member")
        if mine.kind == "reduce_scatter":
            return
        everything = _whole(_extent(mine.send[0][1]) if source is None else source)
        if any(slices != everything for _, slices in mine.send):
            raise self._error(f"rank {rank}: {mine.kind} must send the whole of {mine.source}")

    # -- results ---------------------------------------------------------------------------------

    def _end(self) -> None:
        program = self.program
        for rank, state in self.states.items():
            if state.kept:
                raise self._error(f"rank {rank} still keeps segments {list(state.kept)}")
            updates = {key for key, _ in program.buffer_updates}
            wanted: list[SlotName] = list(program.outputs.values())
            wanted += [program.loss] if program.loss else []
            for name in wanted:
                if rank in program.slots[name].mesh and (name, ONCE) not in state.shapes:
                    raise self._error(f"rank {rank} has no result in {name!r}")
            left = [k for k in state.shapes if k[0] not in self.persistent and k not in updates]
            if left:
                raise self._error(f"rank {rank} never frees {left[:4]}")
            for binding in program.parameters if program.loss is not None else ():
                slot = binding.gradient
                if slot and rank in program.slots[slot].mesh and (slot, ONCE) not in state.shapes:
                    raise self._error(f"rank {rank} has no gradient in {slot!r}")


def variable_shapes(code: SegmentCode) -> dict[int, Shape]:
    """The local shape of each of a segment's variables, as its operators see it."""
    found: dict[int, Shape] = {}
    for bound in code.operators:
        for variable, region in zip(bound.inputs + bound.outputs, bound.regions, strict=True):
            found.setdefault(variable, local_shape(region))
    return found


def _terms(exchange: Exchange) -> str:
    reduction = f" ({exchange.reduction})" if exchange.reduction else ""
    return f"{exchange.kind}{reduction} of {exchange.dtype} among {exchange.group}"


def _extent(slices: Slices) -> Shape:
    return tuple(high - low for low, high in slices)


def _whole(shape: Shape) -> Region:
    return tuple((0, size) for size in shape)


def _inside(slices: Slices, shape: Shape) -> bool:
    return len(slices) == len(shape) and all(
        0 <= low <= high <= size for (low, high), size in zip(slices, shape, strict=True)
    )
