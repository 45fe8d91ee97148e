import random
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel.pipeline import StageMemory, memory_over_time, simulate
from searchspace.errors import IllegalPlanError
from searchspace.schedule import Task, gpipe, one_f_one_b, parse_tasks


def uniform(order, stages, forward=1.0, backward=2.0, delay=0.0):
    seconds = {(s, phase): forward if phase == "F" else backward for s in range(stages) for phase in "FB"}
    edges = {(s, s + 1): delay for s in range(stages - 1)}
    return simulate(order, seconds, edges, edges)


@pytest.mark.parametrize("stages", [1, 2, 4, 8])
@pytest.mark.parametrize("micro_batches", [1, 3, 8, 32])
@pytest.mark.parametrize("make", [gpipe, one_f_one_b])
def test_the_makespan_is_the_closed_form(make, stages, micro_batches):
    """(m + p - 1)(t_f + t_b): Narayanan et al., arXiv 2104.04473, section 2.2.1."""
    found = uniform(make(stages, micro_batches), stages)
    assert found.makespan == pytest.approx((micro_batches + stages - 1) * 3)
    assert found.busy == pytest.approx([3 * micro_batches] * stages)
    assert found.idle == pytest.approx([3 * (stages - 1)] * stages)


@pytest.mark.parametrize("stages", [1, 2, 4, 8])
@pytest.mark.parametrize("micro_batches", [1, 3, 8, 32])
def test_micro_batches_in_flight(stages, micro_batches):
    """1F1B: stage s keeps min(m, p - s); GPipe: all m."""
    found = uniform(one_f_one_b(stages, micro_batches), stages).in_flight
    assert found == {s: min(micro_batches, stages - s) for s in range(stages)}
    assert set(uniform(gpipe(stages, micro_batches), stages).in_flight.values()) == {micro_batches}


def test_forward_only_keeps_nothing():
    found = uniform(gpipe(3, 5, backward=False), 3)
    assert found.makespan == 5 + 2
    assert memory_over_time(found.lanes[0], {0: StageMemory(10, 30, 0)}) == (30,) * 5


def test_transfers_delay_the_pipeline():
    p, m, delay = 4, 8, 0.25
    found = uniform(gpipe(p, m), p, delay=delay)
    assert found.makespan == pytest.approx((m + p - 1) * 3 + 2 * (p - 1) * delay)


def test_the_slowest_stage_sets_the_period():
    seconds = {(0, "F"): 1.0, (1, "F"): 5.0, (2, "F"): 1.0}
    found = simulate(gpipe(3, 10, backward=False), seconds, {(0, 1): 0.0, (1, 2): 0.0})
    assert found.makespan == 1 + 10 * 5 + 1


def test_lanes_begin_when_they_are_released_and_tasks_can_be_prolonged():
    lanes = gpipe(2, 2, backward=False)
    found = simulate(lanes, {(0, "F"): 1.0, (1, "F"): 1.0}, {(0, 1): 0.0}, release=[3.0, 0.0])
    assert found.start[Task(0, "F", 0)] == 3
    assert found.makespan == 3 + 3
    longer = simulate(lanes, {(0, "F"): 1.0, (1, "F"): 1.0}, {(0, 1): 0.0}, extra={Task(1, "F", 1): 4.0})
    assert longer.makespan == 3 + 4


def test_a_stage_over_several_lanes_runs_on_all_at_once():
    """Stage 0 spans both lanes, stages 1 and 2 one each."""
    lanes = [parse_tasks("0F0 1F0 0F1 1F1"), parse_tasks("0F0 2F0 0F1 2F1")]
    seconds = {(0, "F"): 1.0, (1, "F"): 2.0, (2, "F"): 5.0}
    found = simulate(lanes, seconds, {(0, 1): 0.0, (0, 2): 0.0})
    assert found.start[Task(0, "F", 1)] == 6  # lane 1 is busy with stage 2 until then
    assert found.makespan == 12
    assert found.busy == (6, 12)


@pytest.mark.parametrize(
    ("lanes", "returns", "message"),
    [
        (["0B0 0F0"], {}, "the order of tasks contradicts itself: lane 0 waits at 0B0"),
        (["0F0 0F1", "1F1 1F0"], {}, None),
        (["0F0 0B0 0F1 0B1", "1F1 1F0 1B1 1B0"], {(0, 1): 0.0}, "lane 0 waits at 0B0, lane 1 waits at 1F1"),
        (["0F0 1F0", "0F1 1F1 0F0 1F0"], {}, "lane 0 waits at 0F0, lane 1 waits at 0F1"),
    ],
)
def test_orders_that_contradict_themselves_name_the_tasks(lanes, returns, message):
    orders = [parse_tasks(text) for text in lanes]
    seconds = {(s, p): 1.0 for s in range(3) for p in "FB"}
    if message is None:
        assert simulate(orders, seconds, {(0, 1): 0.0}, returns).makespan == 4
        return
    with pytest.raises(IllegalPlanError, match=re.escape(message)):
        simulate(orders, seconds, {(0, 1): 0.0}, returns)


def relax(lanes, seconds, reads, returns):
    """The oracle: start times as the least fixed point of all constraints."""
    lanes_of = {}
    for i, lane in enumerate(lanes):
        for at, task in enumerate(lane):
            lanes_of.setdefault(task, []).append((i, at))
    end = dict.fromkeys(lanes_of, 0.0)
    for _ in range(len(end) + 1):
        changed = False
        for task, places in lanes_of.items():
            before = [end[lanes[i][at - 1]] for i, at in places if at]
            stage, phase, m = task
            edges = reads if phase == "F" else returns
            for (p, s), delay in edges.items():
                here, there = (s, p) if phase == "F" else (p, s)
                if here == stage:
                    before.append(end[Task(there, phase, m)] + delay)
            if phase == "B":
                before.append(end[Task(stage, "F", m)])
            found = max(before, default=0.0) + seconds[stage, phase]
            changed |= found != end[task]
            end[task] = found
        if not changed:
            return end
    return None


@given(st.integers(1, 4), st.integers(1, 4), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_any_order_agrees_with_the_least_fixed_point(stages, micro_batches, rng: random.Random):
    lanes = []
    for stage in range(stages):
        tasks = [Task(stage, "F", m) for m in range(micro_batches)]
        for m in range(micro_batches):
            tasks.insert(rng.randint(m + 1, len(tasks)), Task(stage, "B", m))
        lanes.append(tasks)
    seconds = {(s, p): rng.choice([0.5, 1.0, 2.0]) for s in range(stages) for p in "FB"}
    edges = {(s, s + 1): rng.choice([0.0, 0.25]) for s in range(stages - 1)}
    expected = relax(lanes, seconds, edges, edges)
    if expected is None:
        with pytest.raises(IllegalPlanError):
            simulate(lanes, seconds, edges, edges)
        return
    found = simulate(lanes, seconds, edges, edges)
    assert found.end == pytest.approx(expected)
    assert found.makespan == pytest.approx(max(expected.values()))
    assert sum(found.busy) == pytest.approx(sum(seconds[t.stage, t.phase] for t in found.end))


def test_memory_follows_the_order():
    memory = {0: StageMemory(saved=10, forward=25, backward=18)}
    lane = parse_tasks("0F0 0F1 0B0 0F2 0B1 0B2")
    #       F0  F1       B0       F2       B1       B2
    held = [25, 10 + 25, 10 + 18, 10 + 25, 10 + 18, 18]
    assert memory_over_time(lane, memory) == tuple(held)


def test_memory_of_stages_that_share_a_lane_adds_up():
    memory = {0: StageMemory(10, 10, 10), 1: StageMemory(7, 9, 8)}
    assert memory_over_time(parse_tasks("0F0 1F0 1B0 0B0"), memory) == (10, 10 + 9, 10 + 8, 10)


def test_it_is_fast_and_repeatable():
    order = one_f_one_b(8, 190)
    first = uniform(order, 8)
    best = float("inf")
    for _ in range(5):
        begin = time.process_time()
        again = uniform(order, 8)
        best = min(best, time.process_time() - begin)
    assert sum(map(len, order)) == 3040
    assert again.start == first.start
    assert best < 0.1  # 12 ms on an idle machine
