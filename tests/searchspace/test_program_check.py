"""The check of programs finds every small damage done to programs that fit together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from searchspace.conversion import ElementCount
from searchspace.errors import ExecutionError
from searchspace.liveness import uses
from searchspace.materialize import train_program
from searchspace.program import (
    Alias,
    Backward,
    Exchange,
    Forward,
    Free,
    Instruction,
    Ones,
    Program,
    Rank,
    Step,
)
from searchspace.program_check import check_program
from tests.search.models import gpt
from tests.searchspace.plans import megatron
from tests.searchspace.test_materialize import ZERO1, ZERO3

PLANS = {
    "pp tp": {"pp": 2, "tp": 2, "micro_batches": 2},
    "dp uneven": {"dp": 3, "micro_batches": 2},
    "zero 3": {"dp": 2, "micro_batches": 2, "parameters": ZERO3},
    "zero 1 recompute": {"dp": 2, "parameters": ZERO1, "recompute": ("h.0",)},
}
Damage = Callable[[Instruction], Iterator[Instruction | None]]


def program(name: str) -> Program:
    graph = gpt(layers=2, tied=True)
    return train_program(graph, megatron(graph, **PLANS[name]), ElementCount())


def damaged(whole: Program, at: int, rank: Rank, new: Instruction | None) -> Program:
    ranks = dict(whole.steps[at].ranks)
    if new is None:
        del ranks[rank]
    else:
        ranks[rank] = new
    return replace(whole, steps=(*whole.steps[:at], Step(ranks), *whole.steps[at + 1 :]))


def left_out(i: Instruction) -> Iterator[Instruction | None]:
    if isinstance(i, Forward | Backward | Exchange | Alias | Ones | Free):
        yield None


def another_exchange(i: Instruction) -> Iterator[Instruction | None]:
    """Each field of an exchange changed, on one rank only."""
    if not isinstance(i, Exchange) or i.kind == "local":
        return
    yield replace(i, dtype="float16")
    yield replace(i, kind="all_to_all" if i.kind != "all_to_all" else "all_gather")
    yield replace(i, reduction=None if i.reduction else "sum")
    yield replace(i, group=(*i.group, 77))
    yield replace(i, group=i.group[1:])
    if i.send and i.source is not None:
        yield replace(i, send=i.send[1:])
        peer, slices = i.send[0]
        if slices:
            yield replace(i, send=((peer, ((slices[0][0], slices[0][1] - 1), *slices[1:])), *i.send[1:]))
            beyond = (slices[0][0] + 10_000, slices[0][1] + 10_000)
            yield replace(i, send=((peer, (beyond, *slices[1:])), *i.send[1:]))
    if i.receive:
        yield replace(i, receive=i.receive[1:])
        yield replace(i, receive=(*i.receive, i.receive[0]))
    if i.target is not None:
        yield replace(i, shape=(*i.shape, 1))
        yield replace(i, target=None)
        yield replace(i, target=("nowhere", 0))
    if i.source is not None:
        yield replace(i, source=("nowhere", 0))


def another_segment_call(i: Instruction) -> Iterator[Instruction | None]:
    if isinstance(i, Forward):
        if i.inputs:
            yield replace(i, inputs=i.inputs[1:])
            yield replace(i, inputs=(("nowhere", 0), *i.inputs[1:]))
        yield replace(i, keep=not i.keep)
        yield replace(i, outputs=(("nowhere", 0), *i.outputs[1:]))
        if i.keep:
            yield replace(i, micro_batch=i.micro_batch + 50)
    if isinstance(i, Backward):
        yield replace(i, segment="nothing")
        yield replace(i, input_gradients=i.input_gradients[1:])
        yield replace(i, fetched=(*i.fetched, ("nowhere", 0)))
    if isinstance(i, Free):
        yield replace(i, keys=i.keys[1:])
        yield replace(i, keys=(*i.keys, i.keys[0]))


@pytest.mark.parametrize("damage", [left_out, another_exchange, another_segment_call])
@pytest.mark.parametrize("name", PLANS)
def test_every_damage_is_found(name: str, damage: Damage) -> None:
    whole = program(name)
    check_program(whole)
    done = 0
    for at, step in enumerate(whole.steps):
        for rank, instruction in list(step.ranks.items())[:2]:
            for new in damage(instruction):
                with pytest.raises(ExecutionError, match="the program is inconsistent"):
                    check_program(damaged(whole, at, rank, new))
                    pytest.fail(f"not found: step {at}, rank {rank}: {instruction} became {new}")
                done += 1
    assert done > 20


def test_steps_in_the_wrong_order_are_found() -> None:
    """An exchange of what is computed later."""
    whole = program("pp tp")
    found = 0
    for at, step in enumerate(whole.steps):
        reads = {(r, i.source) for r, i in step.ranks.items() if isinstance(i, Exchange) and i.source is not None}
        writers = [
            n for n, earlier in enumerate(whole.steps[:at]) for r, i in earlier.ranks.items() for key in uses(i)[1]
            if (r, key) in reads
        ]  # fmt: skip
        if writers:
            steps = list(whole.steps)
            steps.insert(writers[0], steps.pop(at))
            with pytest.raises(ExecutionError, match="holds nothing"):
                check_program(replace(whole, steps=tuple(steps)))
            found += 1
    assert found > 4


def test_messages_name_step_rank_and_key() -> None:
    whole = program("dp uneven")
    at, exchange = next(
        (n, step.ranks[0]) for n, step in enumerate(whole.steps) if isinstance(step.ranks.get(0), Exchange)
        and step.ranks[0].kind == "all_reduce"
    )  # fmt: skip
    assert isinstance(exchange, Exchange)
    with pytest.raises(
        ExecutionError, match=f"inconsistent step {at}: rank 0 meets rank 2 in all_reduce, but that rank does"
    ):
        check_program(damaged(whole, at, 2, None))
    with pytest.raises(
        ExecutionError, match=r"disagree: all_reduce \(sum\) of float32 .* and all_reduce \(sum\) of float64"
    ):
        check_program(damaged(whole, at, 1, replace(exchange, dtype="float64")))
    with pytest.raises(ExecutionError, match="rank 0 reads \\('gone', 3\\), which holds nothing"):
        check_program(damaged(whole, at, 0, replace(exchange, source=("gone", 3))))
