"""Frees: each buffer is forgotten after its last use, known before the program starts."""

from __future__ import annotations

from collections.abc import Sequence

from searchspace.program import (
    Accumulate,
    Alias,
    Backward,
    Exchange,
    Forward,
    Free,
    Instruction,
    Key,
    Ones,
    Rank,
    SlotName,
    Step,
)


def insert_frees(steps: Sequence[Step], persistent: frozenset[SlotName]) -> tuple[Step, ...]:
    """Follow each step with a :class:`Free` of what no rank's later step reads before it is rewritten.

    A :class:`Free` among ``steps`` says that its keys are consumed there although a later step adds to
    them (afresh); like all others it then stands after the last use.
    """
    live: dict[Rank, set[Key]] = {}
    backwards: list[Step] = []
    for step in reversed(steps):
        frees: dict[Rank, Instruction] = {}
        for rank, instruction in step.ranks.items():
            alive = live.setdefault(rank, set())
            if isinstance(instruction, Free):
                alive.difference_update(instruction.keys)
                continue
            reads, writes, updates = uses(instruction)
            dead = [
                key for key in dict.fromkeys(reads + writes + updates) if key not in alive and key[0] not in persistent
            ]
            if dead:
                frees[rank] = Free(tuple(dead))
            alive.difference_update(writes)
            alive.update(reads)
            alive.update(updates)
        if frees:
            backwards.append(Step(frees))
        if not all(isinstance(instruction, Free) for instruction in step.ranks.values()):
            backwards.append(step)
    return tuple(reversed(backwards))


def uses(instruction: Instruction) -> tuple[list[Key], list[Key], list[Key]]:
    """The keys that an instruction reads, writes afresh, and updates in place."""
    match instruction:
        case Forward():
            return list(instruction.inputs), list(instruction.outputs), []
        case Backward():
            reads = [key for key in instruction.output_gradients if key is not None]
            reads += list(instruction.fetched)
            return reads, [], [key for key in instruction.input_gradients if key is not None]
        case Exchange():
            source = [] if instruction.source is None else [instruction.source]
            target = [] if instruction.target is None else [instruction.target]
            return source, target, []
        case Accumulate():
            return [instruction.source], [], [instruction.target]
        case Alias():
            return [instruction.source], [instruction.target], []
        case Ones():
            return [], [instruction.target], []
        case Free():
            return list(instruction.keys), [], []


def changing(instructions: Sequence[Instruction]) -> frozenset[Key]:
    """Keys to whose buffer a later instruction of this rank adds, or from which an exchange takes it."""
    written: set[Key] = set()
    found: set[Key] = set()
    for instruction in instructions:
        if isinstance(instruction, Exchange) and instruction.source is not None:
            found.add(instruction.source)
        for key in uses(instruction)[2]:
            (found if key in written else written).add(key)
    return frozenset(found)
