"""Slots: the names of buffers, and which key a version has in a micro-batch."""

from __future__ import annotations

from dataclasses import dataclass, field

from searchspace.graph import Tensor
from searchspace.layout import Layout, Placement, R, Region
from searchspace.mesh import Mesh
from searchspace.program import ONCE, Key, Slot, SlotName
from searchspace.resolve import EVERYWHERE, ParameterHome, Resolution, Version


def optimizer_dtype(tensor: Tensor, precision: str) -> str:
    """The dtype that the optimizer steps on: float32 master weights where the recipe computes in bf16."""
    return "float32" if precision == "bf16" and tensor.dtype in ("bfloat16", "float16") else tensor.dtype


@dataclass
class SlotTable:
    """All slots of a program, each with a unique and repeatable name."""

    resolution: Resolution
    slots: dict[SlotName, Slot] = field(default_factory=dict)
    _names: dict[object, SlotName] = field(default_factory=dict)
    _taken: dict[str, int] = field(default_factory=dict)

    def __getitem__(self, name: SlotName) -> Slot:
        return self.slots[name]

    def new(
        self, label: str, tensor: str, mesh: Mesh, layout: Layout, dtype: str, time: Placement, gradient: bool = False
    ) -> SlotName:
        """A slot of its own, named after ``label``."""
        number = self._taken.get(label, 0)
        self._taken[label] = number + 1
        name = label if number == 0 else f"{label}~{number}"
        self.slots[name] = Slot(name, tensor, mesh, layout, dtype, time, gradient)
        return name

    def via(self, want: Slot, mesh: Mesh, layout: Layout, time: Placement) -> SlotName:
        """A slot for a step on the way to ``want``."""
        return self.new(f"{want.name}.via", want.tensor, mesh, layout, want.dtype, time, want.gradient)

    def total(self, have: Slot) -> SlotName:
        """A slot for the sum of ``have`` over micro-batches."""
        return self.new(f"{have.name}.total", have.tensor, have.mesh, have.layout, have.dtype, R, have.gradient)

    def result(self, name: str, label: str = "result") -> SlotName:
        """A slot for a whole tensor on every rank."""
        dtype = self.resolution.graph.tensor[name].dtype
        return self.new(f"{label}.{name}", name, self.resolution.mesh(EVERYWHERE), (R,), dtype, R)

    def external(self, name: str) -> SlotName:
        """The slot of an input, buffer or constant: whole on every rank."""
        return self.data(Version(name, EVERYWHERE, (R,), None, R))

    def data(self, version: Version) -> SlotName:
        """The slot of a version's data; an input, buffer or constant as it came has one on all ranks."""
        resolution = self.resolution
        tensor = resolution.graph.tensor[version.tensor]
        untouched = version.time == R and all(placement == R for placement in version.layout)
        if tensor.kind in ("input", "buffer", "constant") and untouched:
            version = Version(version.tensor, EVERYWHERE, (R,), None, R)
        if version not in self._names:
            at = "" if version.stage == EVERYWHERE else f"@{version.stage}"
            mesh = resolution.mesh(version.stage)
            self._names[version] = self.new(
                f"{version.tensor}{at}", version.tensor, mesh, version.layout, tensor.dtype, version.time
            )
        return self._names[version]

    def gradient(self, version: Version) -> SlotName:
        """The slot of a version's gradient; of a parameter in the dtype of its optimizer."""
        name = ("gradient", version)
        if name not in self._names:
            if version.gradient is None:
                raise ValueError(f"{version} has no gradient")
            tensor = self.resolution.graph.tensor[version.tensor]
            dtype = tensor.dtype
            if tensor.kind == "parameter":
                dtype = optimizer_dtype(tensor, self.resolution.plan.recipe.precision)
            mesh = self.resolution.mesh(version.stage)
            label = f"d_{version.tensor}@{version.stage}"
            self._names[name] = self.new(label, tensor.name, mesh, version.gradient, dtype, version.time, gradient=True)
        return self._names[name]

    def optimizer(self, home: ParameterHome, gradient: bool = False) -> SlotName:
        """The slot of the shard that the optimizer steps on, or of its gradient."""
        name = ("optimizer", home.tensor, gradient)
        if name not in self._names:
            tensor = self.resolution.graph.tensor[home.tensor]
            dtype = optimizer_dtype(tensor, self.resolution.plan.recipe.precision)
            label = f"{'grad' if gradient else 'optimizer'}.{home.tensor}"
            mesh = self.resolution.mesh(home.home)
            self._names[name] = self.new(label, home.tensor, mesh, home.optimizer, dtype, R, gradient)
        return self._names[name]

    def once(self, version: Version) -> bool:
        """Whether the version is the same buffer for all micro-batches."""
        adapter = self.resolution.adapters.get(version)
        if adapter is not None:
            if adapter.source.tensor in self.resolution.parameters:
                return False
            return version.time == R and self.once(adapter.source)
        op = self.resolution.graph.producer.get(version.tensor)
        return op is None or op.name in self.resolution.time.once

    def key(self, version: Version, micro_batch: int) -> Key:
        """Where a version lies in a micro-batch."""
        return (self.data(version), ONCE if self.once(version) else micro_batch)

    def base(self, slot: Slot, micro_batch: int) -> Region:
        """What the mesh of a slot holds together, in a micro-batch."""
        return self.resolution.time.base(slot.tensor, slot.time, micro_batch)
