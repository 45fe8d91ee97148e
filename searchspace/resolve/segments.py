"""Segments: runs of operators without communication inside."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from searchspace.errors import IllegalPlanError
from searchspace.graph import Graph
from searchspace.microbatch import TimeAxis
from searchspace.plan import Plan
from searchspace.resolve.resolution import Adapter, Kind, Segment, StageIndex, Version

Versions = Mapping[tuple[StageIndex, str], tuple[Version, ...]]


@dataclass(frozen=True)
class Segmentation:
    """Cuts the operators of a stage where an adapter or the border of a region lies between them."""

    graph: Graph
    plan: Plan
    time: TimeAxis
    reads: Versions
    produces: Versions
    adapters: Mapping[Version, Adapter]

    def of_stage(self, stage: StageIndex, results: Mapping[str, Version]) -> tuple[Segment, ...]:
        """The segments of a stage, in forward order."""
        graph = self.graph
        names = [name for where, name in self.reads if where == stage]
        kinds = {name: self._kind(name) for name in names}
        recompute = self.plan.transformation.recompute
        regions = _regions(graph, names, (*recompute, *self.plan.transformation.separate))
        levels = self._levels(stage, names, kinds, regions)
        order: dict[Kind, int] = {"once": 0, "main": 1}
        groups: dict[tuple[int, int, int], list[str]] = {}
        for name in names:
            region = regions.get(name)
            key = (order[kinds[name]], levels[name], -1 if region is None else region)
            groups.setdefault(key, []).append(name)
        segments = []
        needed = self._read_elsewhere(stage, results)
        where = {name: key for key, members in groups.items() for name in members}
        for number, key in enumerate(sorted(groups)):
            members = groups[key]
            inputs: dict[Version, None] = {}
            outputs: dict[Version, None] = {}
            inside = {version for name in members for version in self.produces[stage, name]}
            for name in members:
                for version in self.reads[stage, name]:
                    if version not in inside:
                        inputs.setdefault(version)
                for version in self.produces[stage, name]:
                    readers = needed.get(version, [])
                    if any(reader is None or where[reader] != key for reader in readers):
                        outputs.setdefault(version)
            kind = next(k for k, i in order.items() if i == key[0])
            segments.append(
                Segment(
                    f"stage{stage}_{number}",
                    stage,
                    kind,
                    tuple(members),
                    tuple(inputs),
                    tuple(outputs),
                    key[2] if 0 <= key[2] < len(recompute) else None,
                )
            )
        return tuple(segments)

    def _kind(self, name: str) -> Kind:
        return "once" if name in self.time.once else "main"

    def _levels(
        self, stage: StageIndex, names: Sequence[str], kinds: Mapping[str, Kind], regions: Mapping[str, int]
    ) -> dict[str, int]:
        """As soon as possible; what depends on no activation moves down to its first reader."""
        graph = self.graph
        levels: dict[str, int] = {}
        anchored: set[str] = set()
        readers: dict[str, list[tuple[str, int]]] = {name: [] for name in names}
        for name in names:
            level = 0
            for version in self.reads[stage, name]:
                op = graph.producer.get(version.tensor)
                if op is None:
                    if graph.tensor[version.tensor].kind == "input":
                        anchored.add(name)
                    continue
                if op.name not in levels or kinds[op.name] != kinds[name]:
                    anchored.add(name)
                    continue
                bump = int(version in self.adapters or regions.get(op.name) != regions.get(name))
                level = max(level, levels[op.name] + bump)
                readers[op.name].append((name, bump))
                if op.name in anchored:
                    anchored.add(name)
            levels[name] = level
        for name in reversed(names):
            if name not in anchored and readers[name]:
                levels[name] = max(levels[name], min(levels[reader] - bump for reader, bump in readers[name]))
        return levels

    def _read_elsewhere(self, stage: StageIndex, results: Mapping[str, Version]) -> dict[Version, list[str | None]]:
        """For each version of this stage who reads it: operators directly, None for adapters and results."""
        found: dict[Version, list[str | None]] = {}
        for (where, name), versions in self.reads.items():
            if where == stage:
                for version in versions:
                    found.setdefault(version, []).append(name)
        for adapter in self.adapters.values():
            if adapter.source.stage == stage:
                found.setdefault(adapter.source, []).append(None)
        updated = {new for _, new in self.graph.buffer_updates}
        for (where, _), versions in self.produces.items():
            if where == stage:
                for version in versions:
                    if version.tensor in updated or version.tensor == self.graph.loss:
                        found.setdefault(version, []).append(None)
        return found


def _regions(graph: Graph, names: Sequence[str], patterns: Sequence[str]) -> dict[str, int]:
    """The region of each operator that is in one (a stage's share of a region is a region).

    Where regions overlap the first pattern wins.
    """
    position = {op.name: i for i, op in enumerate(graph.operators)}
    single: dict[str, int] = {}
    ranges: list[tuple[int, int, int]] = []
    for index, pattern in enumerate(patterns):
        first, dots, last = pattern.partition("..")
        if not dots:
            single.setdefault(pattern, index)
            continue
        for end in (first, last):
            if end not in position:
                raise IllegalPlanError(f"region {pattern!r} names an operator {end!r} that the model lacks")
        ranges.append((position[first], position[last], index))
    if single:
        known = {path for op in graph.operators for path in (op.name, *_prefixes(op.module))}
        for pattern in single:
            if pattern not in known:
                raise IllegalPlanError(f"region {pattern!r} matches no operator or module")
    found: dict[str, int] = {}
    for name in names:
        at = [single[path] for path in (name, *_prefixes(graph.operator[name].module)) if path in single]
        at += [index for low, high, index in ranges if low <= position[name] <= high]
        if at:
            found[name] = min(at)
    return found


def _prefixes(path: str) -> list[str]:
    """``"a.b.c"`` as ``["a", "a.b", "a.b.c"]``; the root has none."""
    parts = path.split(".") if path else []
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def in_graph_order(graph: Graph, names: Iterable[str]) -> list[str]:
    """Operator names in the order of the graph."""
    wanted = set(names)
    return [op.name for op in graph.operators if op.name in wanted]
