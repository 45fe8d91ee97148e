"""Meshes: devices arranged along named axes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from searchspace.errors import IllegalPlanError

Device = int


@dataclass(frozen=True)
class Mesh:
    """Devices in row-major order over named axes.

    ``axes`` is ``(("dp", 2), ("tp", 4))``; ``devices`` holds ``2 * 4`` distinct ids.
    *Axis* always means an axis of a mesh, *dim* a dimension of a tensor.
    """

    axes: tuple[tuple[str, int], ...]
    devices: tuple[Device, ...]

    def __post_init__(self) -> None:
        names = self.axis_names
        if len(set(names)) != len(names):
            raise IllegalPlanError(f"mesh axes must have distinct names, got {names}")
        for name, size in self.axes:
            if size < 1:
                raise IllegalPlanError(f"mesh axis {name!r} must have size >= 1, got {size}")
        if prod(self.shape) != len(self.devices):
            raise IllegalPlanError(
                f"mesh axes {dict(self.axes)} need {prod(self.shape)} devices, got {len(self.devices)}"
            )
        if len(set(self.devices)) != len(self.devices):
            raise IllegalPlanError(f"mesh devices must be distinct, got {self.devices}")

    @classmethod
    def line(cls, size: int, name: str = "x", first: int = 0) -> Mesh:
        """A one-axis mesh of ``size`` consecutive devices."""
        return cls(((name, size),), tuple(range(first, first + size)))

    @cached_property
    def axis_names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return tuple(size for _, size in self.axes)

    @property
    def size(self) -> int:
        return len(self.devices)

    def axis_index(self, name: str) -> int:
        """Position of the axis ``name``; IllegalPlanError when the mesh has no such axis."""
        if name not in self.axis_names:
            raise IllegalPlanError(f"no mesh axis {name!r}; the mesh has {self.axis_names}")
        return self.axis_names.index(name)

    @cached_property
    def _hash(self) -> int:
        return hash((self.axes, self.devices))

    def __hash__(self) -> int:  # computed once: a mesh of a thousand devices is a memo key
        return self._hash

    @cached_property
    def _coordinates(self) -> dict[Device, tuple[int, ...]]:
        return dict(zip(self.devices, itertools.product(*map(range, self.shape)), strict=True))

    def coordinates(self, device: Device) -> tuple[int, ...]:
        """Coordinates of ``device``, one per axis."""
        return self._coordinates[device]

    def __contains__(self, device: object) -> bool:
        return device in self._coordinates

    def groups(self, axes: Sequence[int]) -> tuple[tuple[Device, ...], ...]:
        """Devices that differ only along ``axes`` (indices), each group in row-major order."""
        found: dict[tuple[int, ...], list[Device]] = {}
        for device in self.devices:
            at = self._coordinates[device]
            found.setdefault(tuple(c for i, c in enumerate(at) if i not in axes), []).append(device)
        return tuple(tuple(group) for group in found.values())

    def group_of(self, device: Device, axes: Sequence[int]) -> tuple[Device, ...]:
        """The group of :meth:`groups` that contains ``device``."""
        return next(group for group in self.groups(axes) if device in group)
