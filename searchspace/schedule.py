"""Schedules as data: which task each device runs, in which order.

A task is written ``2F0``: stage 2, forward, micro-batch 0.  A *lane* is a set of devices that
share one order.  Generators make the known schedules; a hand-written order is as good.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

from searchspace.errors import PlanFileError

Phase = Literal["F", "B"]

_TASK = re.compile(r"^(\d+)([FB])(\d+)$")


class Task(NamedTuple):
    """Forward (F) or backward (B) of one micro-batch through one stage."""

    stage: int
    phase: Phase
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.phase}{self.micro_batch}"


def parse_tasks(text: str) -> tuple[Task, ...]:
    """``"0F0 0F1 0B0"`` as tasks; PlanFileError names the word that is no task."""
    tasks = []
    for word in text.split():
        match = _TASK.match(word)
        if match is None:
            raise PlanFileError(f"expected a task like 0F3 or 2B0 (stage, F or B, micro-batch), got {word!r}")
        stage, phase, micro_batch = match.groups()
        tasks.append(Task(int(stage), "F" if phase == "F" else "B", int(micro_batch)))
    return tuple(tasks)


def tasks_text(tasks: Sequence[Task]) -> str:
    """Inverse of :func:`parse_tasks`."""
    return " ".join(map(str, tasks))


def gpipe(stages: int, micro_batches: int, backward: bool = True) -> tuple[tuple[Task, ...], ...]:
    """All forwards, then all backwards in reverse (GPipe, arXiv 1811.06965); one order per stage."""
    forward = [[Task(s, "F", m) for m in range(micro_batches)] for s in range(stages)]
    back = [[Task(s, "B", m) for m in reversed(range(micro_batches))] for s in range(stages)]
    return tuple(tuple(f + b) if backward else tuple(f) for f, b in zip(forward, back, strict=True))


def one_f_one_b(stages: int, micro_batches: int) -> tuple[tuple[Task, ...], ...]:
    """1F1B (PipeDream-flush, arXiv 2006.09503): stage s warms up with ``stages - s`` forwards."""
    orders = []
    for stage in range(stages):
        warm_up = min(stages - stage - 1, micro_batches)
        tasks = [Task(stage, "F", m) for m in range(warm_up)]
        for m in range(micro_batches):
            if warm_up + m < micro_batches:
                tasks.append(Task(stage, "F", warm_up + m))
            tasks.append(Task(stage, "B", m))
        orders.append(tuple(tasks))
    return tuple(orders)


SCHEDULES = {"1f1b": one_f_one_b, "gpipe": gpipe}
