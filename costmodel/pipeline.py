"""Event-driven simulation of a pipeline: lanes of tasks that wait for each other.

A *lane* is a set of devices that work through one order of tasks, one after another.  A task of a stage
whose devices lie in several lanes runs on all of them at the same time.  It starts when it heads
all its lanes, and when what it needs has arrived:

    F of stage s needs F of every stage that s reads, of the same micro-batch, and the transfer;
    B of stage s needs F of s, and B of every stage that returns a gradient to s, and the transfer.

Ties are broken by position, so every run is the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from costmodel.units import Bytes, Seconds
from searchspace.errors import IllegalPlanError
from searchspace.schedule import Phase, Task

Edge = tuple[int, int]
"""(producing stage, reading stage), in forward direction."""


@dataclass(frozen=True)
class Timeline:
    """When everything runs.

    Fields
        makespan: end of the last task.
        start, end: by task.
        lanes: the tasks of each lane, as given.
        busy: seconds that each lane computes.
        in_flight: by stage, the most micro-batches between forward and backward at once.
    """

    makespan: Seconds
    start: Mapping[Task, Seconds]
    end: Mapping[Task, Seconds]
    lanes: tuple[tuple[Task, ...], ...]
    busy: tuple[Seconds, ...]
    in_flight: Mapping[int, int]

    @property
    def idle(self) -> tuple[Seconds, ...]:
        """Seconds of the makespan in which each lane waits."""
        return tuple(self.makespan - busy for busy in self.busy)


def simulate(
    lanes: Sequence[Sequence[Task]],
    seconds: Mapping[tuple[int, Phase], Seconds],
    reads: Mapping[Edge, Seconds],
    returns: Mapping[Edge, Seconds] | None = None,
    release: Sequence[Seconds] = (),
    extra: Mapping[Task, Seconds] | None = None,
) -> Timeline:
    """Run ``lanes``.

    ``seconds`` is the duration by stage and phase (0 if absent); ``reads[p, s]`` the time until what stage p
    computed has reached stage s, ``returns[p, s]`` the time until the gradient of s has reached p.
    ``release`` says when each lane may begin, ``extra`` prolongs single tasks.  Raises IllegalPlanError
    with the tasks that wait for each other when the orders contradict.
    """
    returns, extra = returns or {}, extra or {}
    lanes = orders = tuple(tuple(lane) for lane in lanes)
    homes: dict[int, list[int]] = {}
    for index, lane in enumerate(lanes):
        for stage in dict.fromkeys(task.stage for task in lane):
            homes.setdefault(stage, []).append(index)
    upstream: dict[int, list[tuple[int, Seconds]]] = {}
    downstream: dict[int, list[tuple[int, Seconds]]] = {}
    for (producer, reader), delay in reads.items():
        upstream.setdefault(reader, []).append((producer, delay))
    for (producer, reader), delay in returns.items():
        downstream.setdefault(producer, []).append((reader, delay))
    exists = {task for lane in lanes for task in lane}

    start: dict[Task, Seconds] = {}
    end: dict[Task, Seconds] = {}
    free = [release[i] if i < len(release) else 0.0 for i in range(len(lanes))]
    position = [0] * len(lanes)
    busy = [0.0] * len(lanes)
    pending = list(range(len(lanes)))
    waiting: dict[Task, list[int]] = {}  # lanes to look at again when a task has ended

    while pending:
        at = pending.pop()
        lane, length = lanes[at], len(lanes[at])
        while position[at] < length:
            task = lane[position[at]]
            stage, phase, micro_batch = task
            together = homes[stage]
            if len(together) > 1 and any(
                position[i] >= len(lanes[i]) or lanes[i][position[i]] != task for i in together
            ):
                break  # the partner that arrives last runs it
            ready = free[at] if len(together) == 1 else max(free[i] for i in together)
            blocker = None
            for other, delay in (upstream if phase == "F" else downstream).get(stage, ()):
                need = Task(other, phase, micro_batch)
                arrived = end.get(need)
                if arrived is not None:
                    ready = max(ready, arrived + delay)
                elif need in exists:
                    blocker = need
                    break
            if phase == "B" and blocker is None:
                own = Task(stage, "F", micro_batch)
                if own in end:
                    ready = max(ready, end[own])
                elif own in exists:
                    blocker = own
            if blocker is not None:
                waiting.setdefault(blocker, []).append(at)
                break
            duration = seconds.get((stage, phase), 0.0) + extra.get(task, 0.0)
            start[task], end[task] = ready, ready + duration
            for i in together:
                free[i] = ready + duration
                busy[i] += duration
                position[i] += 1
                if i != at:
                    pending.append(i)
            if task in waiting:
                pending.extend(waiting.pop(task))

    stuck = [f"lane {i} waits at {lane[position[i]]}" for i, lane in enumerate(orders) if position[i] < len(lane)]
    if stuck:
        raise IllegalPlanError(f"the order of tasks contradicts itself: {', '.join(stuck)}")
    makespan = max(end.values(), default=0.0)
    return Timeline(makespan, start, end, orders, tuple(busy), _in_flight(orders, exists))


def _in_flight(lanes: Sequence[Sequence[Task]], exists: set[Task]) -> dict[int, int]:
    """The most forwards of a stage that wait for their backward, along the lanes."""
    peak: dict[int, int] = {}
    for lane in lanes:
        now: dict[int, int] = {}
        for task in lane:
            if task.phase == "F":
                count = now.get(task.stage, 0) + 1
                now[task.stage] = count if Task(task.stage, "B", task.micro_batch) in exists else 0
                peak[task.stage] = max(peak.get(task.stage, 0), count)
            else:
                now[task.stage] = now.get(task.stage, 0) - 1
    return peak


@dataclass(frozen=True)
class StageMemory:
    """Bytes per micro-batch: kept from forward to backward, and the peak while either runs."""

    saved: Bytes
    forward: Bytes
    backward: Bytes


def memory_over_time(lane: Sequence[Task], stages: Mapping[int, StageMemory]) -> tuple[Bytes, ...]:
    """Bytes of activations that a lane's devices hold at the worst moment of each of its tasks.

    A stage that never runs backward keeps nothing.
    """
    trained = {task.stage for task in lane if task.phase == "B"}
    held, found = 0, []
    for task in lane:
        memory = stages[task.stage]
        saved = memory.saved if task.stage in trained else 0
        if task.phase == "F":
            found.append(held + max(memory.forward, saved))
            held += saved
        else:
            held -= saved
            found.append(held + max(memory.backward, saved))
    return tuple(found)
