"""A plan as tables of text, for terminals and logs.

Names that differ in numbers only (``layers.0.up``, ``layers.1.up``) share a row when their choices are equal.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from searchspace.plan import Plan, Stage
from searchspace.quantity_text import bytes_text, seconds_text

Row = tuple[str, ...]
T = TypeVar("T", bound=Hashable)

_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class Table:
    """A title, column headings (empty for a list of properties) and rows of equal length."""

    title: str
    columns: Row
    rows: tuple[Row, ...]

    def text(self) -> str:
        """Aligned columns under the title; "" when there is no row."""
        if not self.rows:
            return ""
        lines = ([self.columns] if any(self.columns) else []) + list(self.rows)
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.columns))]
        body = ("  " + "  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
        return "\n".join([self.title, *body])


def summary(plan: Plan) -> str:
    """What a person wants to know first: model, cluster, time, memory, stages, choices, runners-up."""
    return "\n\n".join(filter(None, (table.text() for table in tables(plan))))


def tables(plan: Plan) -> tuple[Table, ...]:
    """All tables of a plan; those without rows are left out."""
    made = (overview(plan), stages(plan), operators(plan), parameters(plan), breakdown(plan), runners_up(plan))
    return tuple(table for table in made if table.rows)


def overview(plan: Plan) -> Table:
    """Model, cluster, recipe, prediction and how good it is."""
    recipe = plan.recipe
    batch = "" if recipe.global_batch is None else f", global batch {recipe.global_batch}"
    trained = f", {recipe.optimizer}" if recipe.mode == "train" else ""
    micro_batches = plan.transformation.micro_batches
    rows = [
        ("model", f"{plan.model.name} ({plan.model.fingerprint})"),
        ("cluster", f"{plan.cluster.name}, {len(plan.devices)} of {plan.cluster.devices} devices used"),
        ("recipe", f"{recipe.mode}, {recipe.precision}{trained}{batch}"),
        ("micro-batches", str(micro_batches)),
    ]
    if plan.transformation.recompute:
        rows.append(("recomputed", _short(fold(dict.fromkeys(plan.transformation.recompute, True)).keys())))
    if plan.prediction is not None:
        seconds = plan.prediction.seconds
        rate = f", {recipe.global_batch / seconds:.4g} samples/s" if recipe.global_batch and seconds > 0 else ""
        rows.append(("predicted step", seconds_text(seconds) + rate))
        if plan.prediction.peak_bytes:
            rows.append(("predicted peak memory", bytes_text(max(plan.prediction.peak_bytes)) + " per device"))
    if plan.search is not None:
        found = plan.search
        if found.bound_seconds > 0:
            rows.append(("lower bound", f"{seconds_text(found.bound_seconds)} (gap {100 * found.gap:.1f} %)"))
        status = f", {found.status}" if found.status else ""
        rows.append(("search", f"{seconds_text(found.seconds)}, seed {found.seed}{status}"))
    return Table("Plan", ("", ""), tuple(rows))


def stages(plan: Plan) -> Table:
    """One row per stage: mesh, devices, number of operators, predicted peak memory, order of tasks."""
    peaks = plan.prediction.peak_bytes if plan.prediction is not None else ()
    order = {device: lane.tasks for lane in plan.order.lanes for device in lane.devices}
    rows = tuple(
        (
            str(index),
            " ".join(f"{axis}={size}" for axis, size in stage.axes.items()) or "one device",
            ranges(stage.devices),
            str(len(stage.operators)),
            bytes_text(peaks[index]) if index < len(peaks) else "-",
            _shortened(order.get(stage.devices[0], "")),
        )
        for index, stage in enumerate(plan.placement.stages)
    )
    return Table("Stages", ("stage", "mesh", "devices", "operators", "peak memory", "order"), rows)


def operators(plan: Plan) -> Table:
    """How operators are split: identifier by mesh axis; operators that are replicated are left out."""
    chosen = {
        name: tuple((axis, label) for axis, label in splits.items() if label)
        for name, splits in plan.transformation.operators.items()
        if any(splits.values())
    }
    where = _stage_by_operator(plan.placement.stages)
    staged = {name: (where.get(name, "-"), splits) for name, splits in chosen.items()}
    rows = tuple(
        (name, str(count), stage, " ".join(f"{axis}:{label}" for axis, label in splits))
        for name, (count, (stage, splits)) in fold(staged).items()
    )
    return Table("Splits", ("operators", "count", "stage", "dimension by axis"), rows)


def parameters(plan: Plan) -> Table:
    """Parameters that are not kept as their consumers use them."""
    kept = {
        name: (
            _placements(site.stored for site in choice.sites.values()),
            _placements(site.gradient for site in choice.sites.values()),
            _placements([choice.optimizer]),
        )
        for name, choice in plan.transformation.parameters.items()
    }
    kept = {name: layouts for name, layouts in kept.items() if any(layouts)}
    folded = fold(kept).items()
    rows = tuple((name, str(count), *(text or "-" for text in layouts)) for name, (count, layouts) in folded)
    return Table("Parameters", ("parameters", "count", "stored", "gradient", "optimizer state"), rows)


def breakdown(plan: Plan) -> Table:
    """The predicted time by cause."""
    if plan.prediction is None:
        return Table("Predicted time", ("part", "time"), ())
    items = plan.prediction.breakdown.items()
    return Table("Predicted time", ("part", "time"), tuple((part, seconds_text(seconds)) for part, seconds in items))


def runners_up(plan: Plan) -> Table:
    """Plans that lost, and by how much."""
    found = plan.search.runners_up if plan.search is not None else ()
    best = plan.prediction.seconds if plan.prediction is not None else 0.0
    rows = tuple(
        (
            other.name,
            seconds_text(other.seconds),
            f"{100 * (other.seconds / best - 1):+.1f} %" if best > 0 else "-",
            bytes_text(other.peak_bytes),
            "" if other.fits else "does not fit",
        )
        for other in found
    )
    return Table("Runners-up", ("plan", "step", "against the best", "peak memory", ""), rows)


def fold(values: Mapping[str, T]) -> dict[str, tuple[int, T]]:
    """Names that differ in numbers only and have equal values, as one: ``{"layers.{0-11}.up": (12, value)}``.

    With the number of names; numbers that all of a group share are kept; order is that of the first name.
    """
    groups: dict[tuple[str, T], list[str]] = {}
    for name, value in values.items():
        groups.setdefault((_NUMBER.sub("#", name), value), []).append(name)
    return {_common(names): (len(names), value) for (_, value), names in groups.items()}


def ranges(numbers: Iterable[int]) -> str:
    """``[0, 1, 2, 3, 8]`` as ``"0-3,8"``."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def _common(names: Sequence[str]) -> str:
    """The pattern of names whose digits removed are equal."""
    numbers = list(zip(*(map(int, _NUMBER.findall(name)) for name in names), strict=True))
    fields = iter(ranges(column) if len(set(column)) == 1 else "{" + ranges(column) + "}" for column in numbers)
    return _NUMBER.sub(lambda _: next(fields), names[0])


def _stage_by_operator(found: Sequence[Stage]) -> dict[str, str]:
    where: dict[str, list[int]] = {}
    for index, stage in enumerate(found):
        for name in stage.operators:
            where.setdefault(name, []).append(index)
    return {name: ranges(indices) for name, indices in where.items()}


def _placements(layouts: Iterable[Mapping[str, str]]) -> str:
    texts = dict.fromkeys(" ".join(f"{axis}:{text}" for axis, text in layout.items()) for layout in layouts)
    return " | ".join(filter(None, texts))


def _short(names: Iterable[str], limit: int = 4) -> str:
    shown = list(names)
    return ", ".join(shown[:limit]) + (f" and {len(shown) - limit} more" if len(shown) > limit else "")


def _shortened(tasks: str, limit: int = 8) -> str:
    words = tasks.split()
    return tasks if len(words) <= limit else " ".join(words[:limit]) + f" ... ({len(words)} tasks)"
