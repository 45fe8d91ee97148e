"""All ranks inside one process: the global order is a loop, and a communication is list operations.

Deterministic, without processes or threads; the same generated segments run as with process groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from autoplan.runtime.codegen import SegmentCompiler
from autoplan.runtime.engine import Call, Engine, run_calls
from autoplan.runtime.exchange import Assembly, by_peer, combine, take
from autoplan.runtime.store import Store
from autoplan.runtime.transport import Runnable
from searchspace.layout import Shape
from searchspace.program import Exchange, Program, Rank, Slices
from searchspace.program_check import check_program

Part = tuple[Rank, Slices]
"""A rank's source buffer, and what is cut out of it."""


@dataclass(frozen=True)
class InProcess:
    """A :class:`~autoplan.runtime.transport.Transport` that holds ``world`` ranks."""

    world: int
    device: torch.device = torch.device("cpu")

    @property
    def ranks(self) -> tuple[Rank, ...]:
        return tuple(range(self.world))

    @property
    def control(self) -> None:
        return None

    def prepare(self, program: Program, stores: Mapping[Rank, Store], compiler: SegmentCompiler) -> Runnable:
        check_program(program)
        engines = {rank: Engine(stores[rank], program.slots, compiler) for rank in program.ranks}
        calls: list[Call] = []
        labels: list[object] = []
        for step in program.steps:
            exchanges = {rank: i for rank, i in step.ranks.items() if isinstance(i, Exchange)}
            if exchanges:
                calls.append(bind_exchanges(exchanges, stores, self.device))
                labels.append(next(iter(exchanges.values())))
            for rank, instruction in step.ranks.items():
                if rank not in exchanges:
                    calls.append(engines[rank].bind(instruction))
                    labels.append(instruction)
        return lambda: run_calls(calls, labels)

    def reduce(self, values: Sequence[Tensor], reduction: Literal["sum", "max"]) -> Tensor:
        total = values[0].clone()
        for value in values[1:]:
            combine(total, value, reduction)
        return total

    def fetch(self, owner: Rank, piece: Tensor | None, shape: Shape, dtype: torch.dtype) -> Tensor:
        assert piece is not None
        return piece

    def concatenate(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        return torch.cat(list(parts), dim)


def bind_exchanges(exchanges: Mapping[Rank, Exchange], stores: Mapping[Rank, Store], device: torch.device) -> Call:
    """One communication for all ranks that take part.

    Ranks that receive the same pieces in the same places share one result, so that replicas stay equal.
    """
    leaving = {rank: by_peer(e.send, e.group) for rank, e in exchanges.items()}
    arriving: dict[tuple[Assembly, tuple[Part, ...]], list[Rank]] = {}
    for rank, exchange in exchanges.items():
        if exchange.target is None:
            continue
        parts = [
            (peer, leaving[peer][rank][position])
            for peer, places in by_peer(exchange.receive, exchange.group).items()
            for position in range(len(places))
        ]
        arriving.setdefault((Assembly.of(exchange), tuple(parts)), []).append(rank)
    sources = {rank: e.source for rank, e in exchanges.items() if e.source is not None}
    targets = {rank: e.target for rank, e in exchanges.items() if e.target is not None}

    def exchange_all() -> None:
        buffers = {rank: stores[rank].buffers[key].detach() for rank, key in sources.items()}
        results = []
        for (assembly, parts), ranks in arriving.items():
            pieces = [take(buffers[peer], slices) for peer, slices in parts]
            if assembly.single and pieces[0].dtype == assembly.dtype:
                stores[parts[0][0]].lend(sources[parts[0][0]])  # the piece is a view of it
                results.append((ranks, pieces[0], False))
            else:
                results.append((ranks, assembly.build(pieces, device), len(ranks) == 1))
        for ranks, result, owned in results:
            for rank in ranks:
                stores[rank].put(targets[rank], result, owned)

    return exchange_all
