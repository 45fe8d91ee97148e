"""What a resolution is: versions, adapters, parameter homes, segments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from searchspace.graph import Graph
from searchspace.layout import Layout, Placement
from searchspace.mesh import Mesh
from searchspace.microbatch import TimeAxis
from searchspace.plan import Plan
from searchspace.rule import Choice

StageIndex = int
EVERYWHERE: StageIndex = -1
"""The pseudo-stage of results that every rank receives."""

Kind = Literal["once", "main"]


@dataclass(frozen=True)
class Version:
    """A tensor as one stage holds it: forward layout, gradient layout (None: no gradient), time axis."""

    tensor: str
    stage: StageIndex
    layout: Layout
    gradient: Layout | None
    time: Placement


@dataclass(frozen=True)
class Adapter:
    """Makes ``target`` from ``source`` (forward), and the gradient of ``source`` from that of ``target``."""

    source: Version
    target: Version

    @property
    def crosses(self) -> bool:
        """Whether it connects two stages."""
        return self.source.stage != self.target.stage


@dataclass(frozen=True)
class Site:
    """A parameter (or buffer) on one stage: how it is stored, and how its gradient accumulates there."""

    stored: Version
    gradient: Layout | None


@dataclass(frozen=True)
class ParameterHome:
    """Where a parameter lives: its sites by stage, and the layout of its optimizer state at ``home``."""

    tensor: str
    home: StageIndex
    optimizer: Layout
    sites: Mapping[StageIndex, Site]


@dataclass(frozen=True)
class Segment:
    """A run of operators of one stage without communication inside.

    ``inputs`` are versions made elsewhere (activations after their adapters, parameters as used),
    ``outputs`` the versions produced here that somebody else reads.  ``region`` is the index of
    the recompute region, or None.
    """

    name: str
    stage: StageIndex
    kind: Kind
    operators: tuple[str, ...]
    inputs: tuple[Version, ...]
    outputs: tuple[Version, ...]
    region: int | None = None


@dataclass(frozen=True)
class Resolution:
    """A legal plan, spelled out.

    Fields
        reads[stage, operator]: the version of each input; produces[...]: of each output.
        choices[stage, operator]: the rule's choice on each axis of the stage's mesh.
        adapters: by target version; identical versions need none.
        segments: by stage, in forward order.
        results: versions on every rank: of the loss (training) or of loss and outputs (inference).
        gradients: tensors whose gradient is computed.
    """

    graph: Graph
    plan: Plan
    time: TimeAxis
    choices: Mapping[tuple[StageIndex, str], tuple[Choice, ...]]
    reads: Mapping[tuple[StageIndex, str], tuple[Version, ...]]
    produces: Mapping[tuple[StageIndex, str], tuple[Version, ...]]
    adapters: Mapping[Version, Adapter]
    parameters: Mapping[str, ParameterHome]
    buffers: Mapping[str, Mapping[StageIndex, Version]]
    segments: tuple[tuple[Segment, ...], ...]
    results: Mapping[str, Version]
    gradients: frozenset[str]

    @property
    def training(self) -> bool:
        return self.plan.recipe.mode == "train"

    @property
    def stages(self) -> range:
        return range(len(self.plan.placement.stages))

    def mesh(self, stage: StageIndex) -> Mesh:
        """The mesh of a stage; of ``EVERYWHERE`` all devices on one axis."""
        if stage == EVERYWHERE:
            return self._world
        return self.plan.placement.stages[stage].mesh

    @cached_property
    def _world(self) -> Mesh:
        return Mesh((("world", len(self.plan.devices)),), self.plan.devices)

    @cached_property
    def adapters_from(self) -> Mapping[Version, tuple[Adapter, ...]]:
        """Adapters by source version."""
        found: dict[Version, list[Adapter]] = {}
        for adapter in self.adapters.values():
            found.setdefault(adapter.source, []).append(adapter)
        return {source: tuple(adapters) for source, adapters in found.items()}
