"""Parameters: where their gradients accumulate, how they are synchronised, which slots they have."""

from __future__ import annotations

from dataclasses import dataclass

from searchspace.materialize.movement import Movement
from searchspace.materialize.slots import SlotTable, optimizer_dtype
from searchspace.program import ONCE, ParameterBinding, SlotName
from searchspace.resolve import ParameterHome, Resolution


@dataclass
class ParameterStates:
    """Emits what happens to parameters outside of tasks."""

    resolution: Resolution
    slots: SlotTable
    move: Movement

    def held(self, home: ParameterHome, stage: int) -> SlotName:
        """Where a site's gradient accumulates: the optimizer's own buffer if nothing remains to be done."""
        site = home.sites[stage]
        contributing = [s for s, other in home.sites.items() if other.gradient is not None]
        if contributing == [home.home] == [stage] and site.gradient == home.optimizer:
            return self.slots.optimizer(home, gradient=True)
        return self.slots.gradient(site.stored)

    def synchronise(self, tensor: str) -> None:
        """From what the sites hold to the gradient of the optimizer's shard."""
        home = self.resolution.parameters[tensor]
        final = (self.slots.optimizer(home, gradient=True), ONCE)
        contributing = [stage for stage, site in home.sites.items() if site.gradient is not None]
        for stage in contributing:
            held = (self.held(home, stage), ONCE)
            if len(contributing) == 1 and held != final:
                self.move.convert(ONCE, held, final)
            elif held != final:
                self.move.add_converted(ONCE, held, final)

    def shared(self, home: ParameterHome, stage: int) -> bool:
        """Whether a site's stored buffer is the optimizer's own."""
        tensor = self.resolution.graph.tensor[home.tensor]
        same = optimizer_dtype(tensor, self.resolution.plan.recipe.precision) == tensor.dtype
        return same and stage == home.home and home.sites[stage].stored.layout == home.optimizer

    def binding(self, home: ParameterHome) -> ParameterBinding:
        """The slots of a parameter."""
        tensor = self.resolution.graph.tensor[home.tensor]
        stored = {stage: self.slots.data(site.stored) for stage, site in home.sites.items()}
        trained = any(site.gradient is not None for site in home.sites.values())
        return ParameterBinding(
            tensor.name,
            tensor.source,
            self.slots.optimizer(home),
            self.slots.optimizer(home, gradient=True) if trained else None,
            tuple(stored.values()),
            tuple(slot for stage, slot in stored.items() if self.shared(home, stage)),
        )
