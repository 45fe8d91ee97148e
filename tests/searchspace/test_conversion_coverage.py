"""The proof of coverage finds every kind of damage, and says where."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from searchspace.conversion import ElementCount, cheapest_path, check_coverage, lower
from searchspace.conversion.simulate import execute, gather, scatter
from searchspace.errors import ExecutionError, IllegalPlanError
from searchspace.layout import P, Partial, R, Split, whole
from searchspace.program import Exchange
from tests.searchspace.conversions import grid, layouts, numbers

SHAPE = (6, 4)
MESH = grid(2)


def _step(source, target, mesh=MESH):
    """The exchanges of the only move from ``source`` to ``target``, and what to check them against."""
    (move,) = cheapest_path(SHAPE, 8, (mesh, source), (mesh, target), ElementCount(8)).moves
    return lower(move, whole(SHAPE), ("a", 0), ("b", 0), "float64"), (whole(SHAPE), move.before, move.after)


def _damage(exchanges, rank, **changes):
    return {**exchanges, rank: replace(exchanges[rank], **changes)}


def test_what_is_missing_is_named():
    exchanges, expected = _step((Split(0),), (R,))
    damaged = _damage(exchanges, 0, receive=exchanges[0].receive[:1])
    with pytest.raises(IllegalPlanError, match=r"h\.3: rank 0 does not receive \[3:6, 0:4\] from rank 1"):
        check_coverage("h.3", damaged, *expected)
    damaged = _damage(damaged, 1, send=exchanges[1].send[1:])
    with pytest.raises(IllegalPlanError, match=r"rank 0 needs each element of \[0:6, 0:4\] exactly once.* 0 times"):
        check_coverage("h.3", damaged, *expected)
    del damaged[0]
    damaged[1] = replace(damaged[1], receive=(), send=())
    with pytest.raises(IllegalPlanError, match=r"rank 0 needs \[0:6, 0:4\] but takes no part"):
        check_coverage("h.3", damaged, *expected)


def test_a_summand_counts_once():
    exchanges, expected = _step((P,), (R,))
    for rank in (0, 1):  # both add rank 0's summand twice and forget rank 1's
        exchanges = _damage(exchanges, rank, receive=exchanges[rank].receive[:1] * 2)
    exchanges = _damage(exchanges, 0, send=tuple(entry for entry in exchanges[0].send for _ in range(2)))
    exchanges = _damage(exchanges, 1, send=())
    with pytest.raises(IllegalPlanError, match=r"exactly once from summand \(0,\), but would get some 2 times"):
        check_coverage("x", exchanges, *expected)


def test_replicas_are_not_summed():
    exchanges, (base, source, _) = _step((R,), (P,))
    whole_buffer = ((0, 6), (0, 4))
    assert exchanges[1].receive == ()  # only the first member keeps the value
    both = _damage(exchanges, 1, send=((1, whole_buffer),), receive=((1, whole_buffer),))
    with pytest.raises(IllegalPlanError, match="would get some 2 times"):
        check_coverage("x", both, base, source, (MESH, (P,)))
    check_coverage("x", both, base, source, (MESH, (Partial("max"),)))


def test_messages_mean_the_same_elements():
    exchanges, expected = _step((Split(0),), (Split(1),))
    wrong = ((0, ((0, 3), (0, 2))), (1, ((0, 3), (0, 2))))
    with pytest.raises(IllegalPlanError, match=r"rank 1 wants \[0:3, 2:4\], rank 0 sends it \[0:3, 0:2\]"):
        check_coverage("x", _damage(exchanges, 0, send=wrong), *expected)
    with pytest.raises(IllegalPlanError, match=r"rank 1 waits for \[0:3, 2:4\]; rank 0 sends nothing"):
        check_coverage("x", _damage(exchanges, 0, send=exchanges[0].send[:1]), *expected)
    beyond = ((0, ((0, 4), (0, 2))), exchanges[0].send[1])
    with pytest.raises(IllegalPlanError, match=r"slices \[0:4, 0:2\] of rank 0 exceed its \[0:3, 0:4\]"):
        check_coverage("x", _damage(exchanges, 0, send=beyond), *expected)


def test_nothing_is_overwritten():
    exchanges, expected = _step((P,), (R,))
    plain = {rank: replace(exchange, reduction=None) for rank, exchange in exchanges.items()}
    with pytest.raises(IllegalPlanError, match=r"rank 0 overwrites elements of \[0:6, 0:4\]"):
        check_coverage("x", plain, *expected)
    with pytest.raises(IllegalPlanError, match="rank 0 combines by max, not sum"):
        check_coverage("x", _damage(exchanges, 0, reduction="max"), *expected)


def test_who_holds_nothing_cannot_send():
    exchanges, (base, _, target) = _step((Split(0),), (R,))
    with pytest.raises(IllegalPlanError, match="rank 1 sends but holds nothing"):
        check_coverage("x", exchanges, base, (grid(1), (R,)), target)


def test_sums_do_not_become_maxima():
    exchanges, (base, source, _) = _step((P,), (R,))
    with pytest.raises(IllegalPlanError, match="cannot turn a sum of parts into a maximum"):
        check_coverage("x", exchanges, base, source, (MESH, (Partial("max"),)))


@pytest.mark.parametrize("mesh", [grid(3), grid(2, 2)], ids=str)
def test_any_lost_or_doubled_message_is_found(mesh):
    """Drop or double one entry on both sides of any move: the proof fails exactly if the numbers are wrong."""
    pairs = list(product(layouts(SHAPE, mesh), repeat=2))
    found = 0
    for source, target in random.Random(5).sample(pairs, min(60, len(pairs))):
        for move in cheapest_path(SHAPE, 8, (mesh, source), (mesh, target), ElementCount(8)).moves:
            exchanges = lower(move, whole(SHAPE), ("a", 0), ("b", 0), "float64")
            victim = next((rank for rank, exchange in exchanges.items() if exchange.receive), None)
            if victim is None:
                continue
            (peer, slices), *rest = exchanges[victim].receive
            given = [entry for entry in exchanges[peer].send if entry[0] == victim]
            kept = [entry for entry in exchanges[peer].send if entry[0] != victim]
            for copies in (0, 2):
                damaged = _damage(exchanges, victim, receive=((peer, slices),) * copies + tuple(rest))
                damaged = _damage(damaged, peer, send=tuple(given * copies + kept))
                with pytest.raises(IllegalPlanError):
                    check_coverage("x", damaged, whole(SHAPE), move.before, move.after)
                found += 1
    assert found > 20


# -- the simulator -------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["sum", "max"])
@pytest.mark.parametrize("mesh", [grid(3), grid(2, 3)], ids=str)
def test_scatter_and_gather_are_inverse(mesh, reduction):
    for layout in layouts((7, 6), mesh, reduction=reduction):
        buffers = scatter(numbers((7, 6)), (mesh, layout), seed=3)
        assert np.array_equal(gather(buffers, whole((7, 6)), (mesh, layout)), numbers((7, 6)))


def test_gather_notices_different_replicas():
    buffers = scatter(numbers((4,)), (MESH, (R,)))
    buffers[1] = buffers[1] + 1
    with pytest.raises(ExecutionError, match="device 1 differs from its replicas"):
        gather(buffers, whole((4,)), (MESH, (R,)))
    with pytest.raises(ExecutionError, match=r"device 0 holds shape \(4,\), its region is \(2,\)"):
        gather(buffers, whole((4,)), (MESH, (Split(0),)))


def test_execution_is_strict():
    a, b = ("a", 0), ("b", 0)
    memory = {0: {a: numbers((2,))}, 1: {}}
    send = Exchange("send_receive", (0, 1), a, None, send=((1, ((0, 2),)),), dtype="float64")
    take = Exchange("send_receive", (0, 1), None, b, receive=((0, ((0, 2),)),), shape=(2,), dtype="float64")
    execute({0: send, 1: take}, memory)
    assert np.array_equal(memory[1][b], numbers((2,)))
    with pytest.raises(ExecutionError, match="rank 0 sent rank 1 a part that it does not receive"):
        execute({0: send}, memory)
    with pytest.raises(ExecutionError, match=r"rank 1 waits for \(\(0, 2\),\) of b, which nobody sends"):
        execute({0: replace(send, send=()), 1: take}, memory)
    with pytest.raises(ExecutionError, match="rank 0 sends to rank 1 but has no source buffer"):
        execute({0: replace(send, source=None), 1: take}, memory)
    with pytest.raises(ExecutionError, match=r"rank 1 got a part of shape \(2,\) for slices \(\(0, 1\),\)"):
        execute({0: send, 1: replace(take, receive=((0, ((0, 1),)),))}, memory)


def test_the_target_dtype_counts():
    """The source is cast first, and what nobody fills is zero."""
    a, b = ("a", 0), ("b", 0)
    memory = {0: {a: np.array([1.5, 2.5])}}
    cast = Exchange("local", (0,), a, b, ((0, ((0, 2),)),), ((0, ((1, 3),)),), None, (3,), "int64")
    execute({0: cast}, memory)
    assert memory[0][b].dtype == np.int64
    assert memory[0][b].tolist() == [0, 1, 2]
