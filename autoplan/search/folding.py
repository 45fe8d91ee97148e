"""Folding: repeated layers are found once, so that the search works on classes with counts.

Operators are equal for the search when their targets, shapes, rules and costs are: their *token*.
A model of repeated layers is a sequence of tokens with a long periodic stretch (a tandem repeat);
the longest one is cut into *blocks* of one period, and what is left before and after it is searched
in the same way.  What repeats nothing is cut where the owning module changes.  Blocks are the units
of pipeline stages; operators at the same position of blocks of one kind form a *group* and get the
same strategy.  Folding is therefore only a restriction: no cost is derived from it.

Operators that depend on inputs and constants alone (masks, position ids, rotary tables) belong to
no block: each stage that needs them repeats them.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from searchspace.graph import Graph, Operator
from searchspace.resolve import can_replicate

MAX_REPEATS = 16
"""Periodic stretches that are considered as layers, the longest first."""

Group = tuple[int, int]
"""Kind of a block and position in it; kind -1 for operators outside of blocks."""


@dataclass(frozen=True)
class Block:
    """Consecutive operators (those outside of blocks left out); blocks of one ``kind`` have equal tokens."""

    kind: int
    operators: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Folding:
    """``blocks`` in execution order, and the operators that every stage may repeat."""

    blocks: tuple[Block, ...]
    repeatable: tuple[str, ...]

    @cached_property
    def groups(self) -> Mapping[str, Group]:
        """The group of each operator."""
        found = {name: (-1, i) for i, name in enumerate(self.repeatable)}
        for block in self.blocks:
            found.update((name, (block.kind, i)) for i, name in enumerate(block.operators))
        return found

    @cached_property
    def counts(self) -> Mapping[int, int]:
        """How many blocks there are of each kind."""
        found: dict[int, int] = {}
        for block in self.blocks:
            found[block.kind] = found.get(block.kind, 0) + 1
        return found


def fold(graph: Graph, *, repeats: bool = True) -> Folding:
    """Cut ``graph`` into blocks; with ``repeats=False`` every block is a kind of its own."""
    repeatable = _repeatable(graph)
    outside = set(repeatable)
    operators = [op for op in graph.operators if op.name not in outside]
    if not operators:  # a model without parameters: nothing to repeat it beside
        repeatable, outside, operators = (), set(), list(graph.operators)
    if not operators:
        return Folding((), ())
    numbers: dict[Hashable, int] = {}
    tokens = np.array(
        [numbers.setdefault(_token(graph, op, outside), len(numbers)) for op in operators], dtype=np.int64
    )
    crossing = _crossing_bytes(graph, operators)
    cuts = sorted(_cuts(operators, tokens, crossing, 0, len(operators)))
    kinds: dict[Hashable, int] = {}
    blocks = []
    for low, high in zip(cuts, [*cuts[1:], len(operators)], strict=True):
        key: Hashable = tuple(tokens[low:high].tolist()) if repeats else low
        names = tuple(op.name for op in operators[low:high])
        blocks.append(Block(kinds.setdefault(key, len(kinds)), names))
    return Folding(tuple(blocks), repeatable)


def _repeatable(graph: Graph) -> tuple[str, ...]:
    """Operators whose results depend on inputs, buffers and constants alone and need no gradient."""
    found: dict[str, None] = {}
    for op in graph.operators:
        producers = [graph.producer[name].name for name in op.inputs if name in graph.producer]
        if can_replicate(graph, op) and all(name in found for name in producers):
            found[op.name] = None
    return tuple(found)


def _token(graph: Graph, op: Operator, outside: set[str]) -> Hashable:
    def tensor(name: str) -> Hashable:
        t = graph.tensor[name]
        free = t.name in graph.producer and graph.producer[t.name].name in outside
        return "repeatable" if free else t.kind, t.shape, t.dtype, t.requires_grad

    rule = op.rule
    return (
        op.target, tuple(map(tensor, op.inputs)), tuple(map(tensor, op.outputs)), rule.inputs, rule.outputs,
        rule.reductions, rule.added, rule.linear, op.flops, op.saved_extra_bytes, op.family,
        tuple(_position(op, name) for name in op.saved),
    )  # fmt: skip


def _position(op: Operator, name: str) -> int:
    every = op.inputs + op.outputs
    return every.index(name) if name in every else -1


def _crossing_bytes(graph: Graph, operators: Sequence[Operator]) -> NDArray[np.int64]:
    """For each position, bytes of activations made before it and read at or after it."""
    position = {op.name: i for i, op in enumerate(operators)}
    change = np.zeros(len(operators) + 1, dtype=np.int64)
    for op in operators:
        for name in op.outputs:
            readers = [position[user.name] for user, _ in graph.consumers[name] if user.name in position]
            if readers:
                change[position[op.name] + 1] += graph.tensor[name].bytes
                change[max(readers) + 1] -= graph.tensor[name].bytes
    return np.cumsum(change)


def _cuts(
    operators: Sequence[Operator], tokens: NDArray[np.int64], crossing: NDArray[np.int64], low: int, high: int
) -> list[int]:
    """Where blocks start in ``[low, high)``, ``low`` included."""
    if low >= high:
        return []
    for start, period, length in _repeats(tokens[low:high]):
        start += low
        count = length // period
        phase = min(
            range(length % period + 1),
            key=lambda p: (
                crossing[start + p : start + p + count * period : period].sum(),
                -_common_depth(operators[start + p : start + p + period]),
                p,
            ),
        )
        first, last = start + phase, start + phase + count * period
        if _chained(operators, first, period, count):
            before = _cuts(operators, tokens, crossing, low, first)
            return before + list(range(first, last, period)) + _cuts(operators, tokens, crossing, last, high)
    owners = [_owner(op.module) for op in operators[low:high]]
    return [low + i for i in range(high - low) if i == 0 or owners[i] != owners[i - 1]]


def _chained(operators: Sequence[Operator], first: int, period: int, count: int) -> bool:
    """Whether each of the repeated blocks reads what the one before it made: layers, not branches side by side."""
    for start in range(first, first + (count - 1) * period, period):
        made = {name for op in operators[start : start + period] for name in op.outputs}
        if not any(name in made for op in operators[start + period : start + 2 * period] for name in op.inputs):
            return False
    return True


def _repeats(tokens: NDArray[np.int64]) -> list[tuple[int, int, int]]:
    """(start, period, length) of periodic stretches, those with most whole periods' worth of operators first.

    At least two periods; among equals the shortest period, then the first.  Periods of one operator
    do not count: a row of equal operators is no layer.  One stretch for each period.
    """
    found: list[tuple[int, int, int, int]] = []
    for period in range(2, len(tokens) // 2 + 1):
        equal = np.flatnonzero(np.append(tokens[:-period] != tokens[period:], True))
        starts = np.append(0, equal[:-1] + 1)
        lengths = equal - starts + period
        whole = np.where(lengths >= 2 * period, lengths // period * period, 0)
        top = int(whole.argmax())
        if whole[top]:
            found.append((-int(whole[top]), period, int(starts[top]), int(lengths[top])))
    return [(start, period, length) for _, period, start, length in sorted(found)[:MAX_REPEATS]]


def _common_depth(operators: Sequence[Operator]) -> int:
    """How many leading components the module paths of ``operators`` share."""
    paths = [op.module.split(".") for op in operators]
    depth = 0
    for parts in zip(*paths, strict=False):
        if any(part != parts[0] for part in parts):
            break
        depth += 1
    return depth


def _owner(path: str) -> str:
    """The module path up to its first number, or its first component."""
    parts = path.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return parts[0]
