"""Programs: what is put together from the passes.

Dependency preserving, SuperScaler's third phase: every communication is derived here and none is
chosen.  Named strategies appear nowhere.
"""

from __future__ import annotations

from collections.abc import Mapping

from searchspace.conversion import Prices
from searchspace.errors import IllegalPlanError
from searchspace.graph import Graph
from searchspace.layout import P, Partial, R
from searchspace.liveness import insert_frees
from searchspace.materialize.backward import BackwardPass
from searchspace.materialize.forward import ForwardPass
from searchspace.materialize.movement import Movement
from searchspace.materialize.parameters import ParameterStates
from searchspace.materialize.slots import SlotTable
from searchspace.order import global_order
from searchspace.plan import Plan
from searchspace.program import ONCE, Key, Program, SlotName
from searchspace.resolve import EVERYWHERE, Resolution, resolve


def train_program(graph: Graph, plan: Plan, prices: Prices) -> Program:
    """Forward, backward and gradient synchronisation of one step; the loss ends on every rank."""
    return _Emitter(resolve(graph, plan), prices).train()


def forward_program(graph: Graph, plan: Plan, prices: Prices) -> Program:
    """The model's forward: its outputs end on every rank; what only the loss needs is not computed."""
    return _Emitter(resolve(graph, plan, purpose="outputs"), prices).forward(update=True)


def evaluation_program(graph: Graph, plan: Plan, prices: Prices) -> Program:
    """Forward to the loss (without one: the outputs), which ends on every rank; buffers stay as they are."""
    return _Emitter(resolve(graph, plan, purpose="evaluation"), prices).forward(update=False)


def refresh_program(graph: Graph, plan: Plan, prices: Prices) -> Program:
    """From the optimizer's shards to the stored parameters: what an optimizer step entails."""
    return _Emitter(resolve(graph, plan), prices).refresh()


class _Emitter:
    def __init__(self, resolution: Resolution, prices: Prices) -> None:
        self.resolution = resolution
        self.graph, self.plan = resolution.graph, resolution.plan
        self.slots = SlotTable(resolution)
        self.move = Movement(self.slots, prices)
        self.parameters = ParameterStates(resolution, self.slots, self.move)
        self.forward_pass = ForwardPass(resolution, self.slots, self.move)
        self.backward_pass = BackwardPass(resolution, self.slots, self.move, self.forward_pass, self.parameters)

    def train(self) -> Program:
        if self.graph.loss is None or self.graph.loss not in self.resolution.gradients:
            raise IllegalPlanError(f"{self.graph.name} has no loss with a gradient; nothing can be trained")
        self.forward_pass.prologue()
        backward = {s: self._gradients_from(s) for s in self.resolution.stages if self.backward_pass.segments(s)}
        pending = self.backward_pass.pending()
        last = self.resolution.time.micro_batches - 1
        finished: dict[int, int] = {}
        for task in global_order(self.plan, self._stages_read(), backward):
            if task.phase == "F":
                self.forward_pass.task(task.stage, task.micro_batch, train=True)
            elif task.stage in backward:
                finished[task.stage] = finished.get(task.stage, -1) + 1
                self.backward_pass.task(task.stage, task.micro_batch, pending if finished[task.stage] == last else None)
        for tensor in list(pending):
            self.parameters.synchronise(tensor)
        loss = self._results()[self.graph.loss]
        return self._program({}, loss)

    def forward(self, update: bool) -> Program:
        self.forward_pass.prologue()
        for task in global_order(self.plan, self._stages_read(), None):
            self.forward_pass.task(task.stage, task.micro_batch, train=False)
        found = self._results()
        if not update and self.graph.loss is not None:
            return self._program({}, found[self.graph.loss], update=False)
        outputs = {name: found[name] for name in self.graph.outputs if name in found}
        for name in self.graph.outputs:
            if name not in outputs and self.graph.tensor[name].kind == "parameter":
                outputs[name] = self._whole_parameter(name)
            elif name not in outputs:
                outputs[name] = self.slots.external(name)
        return self._program(outputs, None, update)

    def refresh(self) -> Program:
        for home in self.resolution.parameters.values():
            for stage, site in home.sites.items():
                if not self.parameters.shared(home, stage):
                    self.move.convert(ONCE, (self.slots.optimizer(home), ONCE), (self.slots.data(site.stored), ONCE))
        return self._program({}, None, update=False)

    def _program(self, outputs: Mapping[str, SlotName], loss: SlotName | None, update: bool = True) -> Program:
        graph = self.graph
        bindings = tuple(self.parameters.binding(home) for home in self.resolution.parameters.values())
        inputs = {name: self.slots.external(name) for name in graph.inputs}
        buffers = {t.name: self.slots.external(t.name) for t in graph.of_kind("buffer")}
        constants = {t.name: self.slots.external(t.name) for t in graph.of_kind("constant")}
        updates = self._buffer_updates() if update else ()
        keep = [*inputs.values(), *buffers.values(), *constants.values(), *outputs.values()]
        keep += [slot for b in bindings for slot in (b.optimizer, b.gradient, *b.stored) if slot is not None]
        keep += [loss] if loss else []
        keep += [key[0] for key, _ in updates]
        return Program(
            self.slots.slots,
            insert_frees(self.move.steps, frozenset(keep)),
            self.plan.devices,
            inputs,
            bindings,
            buffers,
            constants,
            outputs,
            loss,
            updates,
        )

    def _results(self) -> dict[str, SlotName]:
        """Bring results to every rank, whole."""
        found = {}
        for name, target in self.resolution.results.items():
            source = self.resolution.adapters[target].source
            slot = self.slots.result(name)
            found[name] = slot
            if self.slots.once(source) or self.resolution.time.micro_batches == 1 or source.time == R:
                self.move.convert(0, self.slots.key(source, 0), (slot, ONCE))
            elif isinstance(source.time, Partial):
                self.move.convert(ONCE, self.forward_pass.total(source), (slot, ONCE))
            else:
                whole_slot = self.slots[slot]
                for micro_batch in range(self.resolution.time.micro_batches):
                    part = (self.slots.via(whole_slot, whole_slot.mesh, whole_slot.layout, P), micro_batch)
                    self.move.convert(micro_batch, self.slots.key(source, micro_batch), part)
                    self.move.accumulate(part, (slot, ONCE))
        return found

    def _whole_parameter(self, name: str) -> SlotName:
        home = self.resolution.parameters[name]
        slot = self.slots.result(name)
        self.move.convert(ONCE, (self.slots.data(home.sites[home.home].stored), ONCE), (slot, ONCE))
        return slot

    def _buffer_updates(self) -> tuple[tuple[Key, SlotName], ...]:
        updates = []
        for buffer, new in self.graph.buffer_updates:
            slot = self.slots.external(buffer)
            op = self.graph.producer.get(new)
            if op is None:
                source: Key = (self.slots.external(new), ONCE)
            else:
                stage = next(s for s in self.resolution.stages if (s, op.name) in self.resolution.produces)
                version = self.resolution.produces[stage, op.name][op.outputs.index(new)]
                source = self.slots.key(version, 0)
            target = (self.slots.result(new, "new"), ONCE)
            self.move.convert(ONCE, source, target)
            updates.append((target, slot))
        return tuple(updates)

    def _stages_read(self) -> dict[int, list[int]]:
        """The stages that each stage reads from."""
        found: dict[int, set[int]] = {s: set() for s in self.resolution.stages}
        for adapter in self.resolution.adapters.values():
            if adapter.crosses and adapter.target.stage != EVERYWHERE:
                found[adapter.target.stage].add(adapter.source.stage)
        return {s: sorted(others) for s, others in found.items()}

    def _gradients_from(self, stage: int) -> list[int]:
        """The stages that return gradients to a stage."""
        return sorted(
            {
                adapter.target.stage
                for adapter in self.resolution.adapters.values()
                if adapter.crosses and adapter.source.stage == stage and adapter.target.gradient is not None
            }
        )
