"""Candidates: how many pipeline stages, on meshes of which shape, with how many micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from costmodel.cluster import Cluster
from searchspace.mesh import Mesh

Axes = tuple[tuple[str, int], ...]


@dataclass(frozen=True, order=True)
class Candidate:
    """``stages`` equal meshes of ``outer x inner`` consecutive devices each, and ``micro_batches``.

    The inner axis joins neighbouring devices.  Axes of size 1 are left out.
    """

    stages: int
    outer: int
    inner: int
    micro_batches: int

    @property
    def axes(self) -> Axes:
        """The mesh's axes; a mesh of one device has one axis of size 1."""
        named = (("dp", self.outer), ("tp", self.inner))
        return tuple((name, size) for name, size in named if size > 1) or (("dp", 1),)

    def mesh(self, stage: int = 0) -> Mesh:
        size = self.outer * self.inner
        return Mesh(self.axes, tuple(range(stage * size, (stage + 1) * size)))

    def __str__(self) -> str:
        shape = " x ".join(f"{name} {size}" for name, size in self.axes)
        return f"{_count(self.stages, 'stage')} of {shape}, {_count(self.micro_batches, 'micro-batch')}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}{'es' if what.endswith('h') else 's'}"


def meshes(cluster: Cluster, blocks: int) -> list[tuple[int, int, int]]:
    """(stages, outer, inner) with all devices in use; at most ``blocks`` stages, the inner axis within a node.

    A mesh with one axis has it as ``outer``: with free choice of strategies the two would be the same.
    """
    count = cluster.size
    per_node = min(node.count for node in cluster.nodes)
    found = []
    for stages in divisors(count):
        if stages > max(blocks, 1):
            continue
        size = count // stages
        for inner in divisors(size):
            outer = size // inner
            if outer == 1 and inner > 1:
                continue
            if inner == 1 or (inner <= per_node and per_node % inner == 0):
                found.append((stages, outer, inner))
    return found


def micro_batch_counts(batch: int | None, granule: int, stages: int, outer: int, inner: int) -> list[int]:
    """Numbers of micro-batches worth trying: powers of two of samples per outer device, and per mesh.

    Pipelines need some micro-batches to fill them; more micro-batches than groups of samples are impossible.
    """
    if batch is None:
        return [1]
    groups = batch // granule
    found: set[int] = set()
    per_device = 1
    while per_device <= groups:
        found.add(max(1, groups // (outer * per_device)))
        if inner == 1:
            found.add(max(1, groups // per_device))
        per_device *= 2
    return sorted(m for m in found if m <= groups and (stages == 1 or m > 1 or groups == 1))


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def candidates(cluster: Cluster, blocks: int, batch: int | None, granule: int) -> Iterator[Candidate]:
    """All candidates, by stages, mesh and micro-batches."""
    for stages, outer, inner in meshes(cluster, blocks):
        for micro_batches in micro_batch_counts(batch, granule, stages, outer, inner):
            yield Candidate(stages, outer, inner, micro_batches)
