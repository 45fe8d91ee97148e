"""op-order: one global order of tasks, consistent with every device's own order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from searchspace.errors import IllegalPlanError
from searchspace.plan import Plan
from searchspace.schedule import Task, tasks_text


def global_order(
    plan: Plan, reads: Mapping[int, Sequence[int]], backward: Mapping[int, Sequence[int]] | None
) -> tuple[Task, ...]:
    """Merge the lanes into one order in which every task follows what it depends on.

    ``reads[s]`` are the stages whose forward results stage s reads; ``backward[s]`` the stages that
    return gradients to s (a stage without an entry has no backward), or None for forward only.
    Lanes advance together, one task a round, as devices would with equal task times.
    Raises IllegalPlanError when a lane lacks or repeats a task, or when no order exists.
    """
    lanes = [tuple(t for t in lane.parsed if backward is not None or t.phase == "F") for lane in plan.order.lanes]
    _check_lanes(plan, lanes, backward)
    position = [0] * len(lanes)
    lanes_of = {
        s: [i for i, lane in enumerate(plan.order.lanes) if set(lane.devices) & set(stage.devices)]
        for s, stage in enumerate(plan.placement.stages)
    }
    done: dict[Task, None] = {}
    while any(at < len(lane) for at, lane in zip(position, lanes, strict=True)):
        heads = {i: lane[at] for i, (at, lane) in enumerate(zip(position, lanes, strict=True)) if at < len(lane)}
        ready = [
            task
            for i, task in heads.items()
            if i == lanes_of[task.stage][0]
            and all(heads.get(other) == task for other in lanes_of[task.stage])
            and all(need in done for need in _needs(task, reads, backward or {}))
        ]
        if not ready:
            stuck = ", ".join(
                f"devices {list(plan.order.lanes[i].devices)} wait at {task}" for i, task in sorted(heads.items())
            )
            raise IllegalPlanError(f"the order of tasks contradicts itself: {stuck}")
        for task in ready:
            done[task] = None
            for i in lanes_of[task.stage]:
                position[i] += 1
    return tuple(done)


def _needs(task: Task, reads: Mapping[int, Sequence[int]], backward: Mapping[int, Sequence[int]]) -> list[Task]:
    stage, phase, m = task
    if phase == "F":
        return [Task(other, "F", m) for other in reads.get(stage, ())]
    return [Task(stage, "F", m), *(Task(other, "B", m) for other in backward.get(stage, ()) if other in backward)]


def _check_lanes(plan: Plan, lanes: Sequence[Sequence[Task]], backward: Mapping[int, Sequence[int]] | None) -> None:
    count = plan.transformation.micro_batches
    owner: dict[int, int] = {}
    for i, lane in enumerate(plan.order.lanes):
        for device in lane.devices:
            if device in owner:
                raise IllegalPlanError(f"device {device} is in two lanes of the order, {owner[device]} and {i}")
            owner[device] = i
    missing = [d for d in plan.devices if d not in owner]
    if missing:
        raise IllegalPlanError(f"the order has no lane for devices {missing}")
    for i, (lane, tasks) in enumerate(zip(plan.order.lanes, lanes, strict=True)):
        stages = [s for s, stage in enumerate(plan.placement.stages) if set(stage.devices) & set(lane.devices)]
        expected = {Task(s, "F", m) for s in stages for m in range(count)}
        if backward is not None:
            expected |= {Task(s, "B", m) for s in stages if s in backward for m in range(count)}
        extra = sorted(set(tasks) - expected)
        # A stage without gradients may list backward tasks; they do nothing.
        extra = [t for t in extra if not (t.phase == "B" and t.stage in stages and t.micro_batch < count)]
        lacking = sorted(expected - set(tasks))
        where = f"lane {i} (devices {list(lane.devices)})"
        if lacking:
            raise IllegalPlanError(f"{where} lacks tasks {tasks_text(lacking[:6])} of {count} micro-batches")
        if extra:
            raise IllegalPlanError(f"{where} has tasks {tasks_text(extra[:6])} that its stages or micro-batches lack")
        if len(set(tasks)) != len(tasks):
            twice = sorted({t for t in tasks if list(tasks).count(t) > 1})
            raise IllegalPlanError(f"{where} lists tasks {tasks_text(twice[:6])} twice")
