"""A program bound to a process: its stores, what they hold before each run, and what is read after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autoplan.runtime.codegen import SegmentCompiler
from autoplan.runtime.parameters import ParameterShard, Shards
from autoplan.runtime.store import Store
from autoplan.runtime.transport import Transport
from searchspace.errors import ExecutionError
from searchspace.liveness import changing
from searchspace.program import ONCE, Exchange, Key, Program, Rank, Slot, SlotName

if TYPE_CHECKING:
    from autoplan.runtime.state import State

StoredId = tuple[Rank, str, Any, Any, str]
"""What tells one stored copy of a parameter from another: rank, tensor, mesh, layout, dtype."""


@dataclass(frozen=True)
class Programs:
    """The programs of a plan.

    Fields
        train: one step of training; None for inference.
        forward, evaluation: the model's outputs, and the loss without gradients; made when they are first used.
        refresh: what an optimizer step entails.
    """

    train: Program | None
    forward: Callable[[], Program]
    evaluation: Callable[[], Program]
    refresh: Program


class BoundProgram:
    """One program on the ranks of this process.

    ``with bound.bind_state(...); bound.run(inputs)``: results can be read until :meth:`clear`, or the
    end of a ``with`` block.
    """

    def __init__(self, program: Program, transport: Transport, compiler: SegmentCompiler) -> None:
        self.program = program
        self.device_type = transport.device.type
        self.stores = {rank: Store(changing(program.of_rank(rank))) for rank in transport.ranks}
        self._run = transport.prepare(program, self.stores, compiler)
        self._held: dict[Rank, dict[Key, Tensor]] = {}
        self._summed: dict[Rank, list[Key]] = {}
        self.local = all(
            i.kind == "local" for step in program.steps for i in step.ranks.values() if isinstance(i, Exchange)
        )

    def bind_state(self, shards: Shards, stored: Mapping[StoredId, Tensor], state: State) -> None:
        """What the stores hold before each run: parameters, buffers, constants.  Remembered until unbound."""
        if self._held:
            return
        for rank in self.stores:
            held: dict[Key, Tensor] = {}
            for binding in self.program.parameters:
                shard = shards.by_rank[rank].get(binding.tensor)
                if shard is not None:
                    held[(binding.optimizer, ONCE)] = shard.parameter
                for name in binding.stored:
                    slot = self.program.slots[name]
                    if rank not in slot.mesh:
                        continue
                    if name in binding.shared:
                        assert shard is not None
                        held[(name, ONCE)] = shard.parameter
                    elif stored:
                        held[(name, ONCE)] = self._stored(stored, rank, slot)
            for tensor, name in self.program.buffers.items():
                held[(name, ONCE)] = state.buffers[tensor]
            for tensor, name in self.program.constants.items():
                held[(name, ONCE)] = state.constants[tensor]
            self._held[rank] = held
            slots = self.program.slots
            summed = {slots[name].tensor for name, _ in self.stores[rank].changing or () if slots[name].gradient}
            self._summed[rank] = [k for k, v in held.items() if v.requires_grad and slots[k[0]].tensor in summed]

    def _stored(self, stored: Mapping[StoredId, Tensor], rank: Rank, slot: Slot) -> Tensor:
        found = stored.get(_stored_id(rank, slot))
        if found is None:
            raise ExecutionError(f"the refresh program does not make {slot.name!r} of rank {rank}")
        return found

    def unbind_state(self) -> None:
        """Forget what :meth:`bind_state` remembers: some of it was replaced."""
        self._held.clear()

    def run(self, inputs: Mapping[str, Tensor]) -> None:
        """Run once.  Runs as captured, whatever autocast or gradient mode surrounds the call."""
        given = {(slot, ONCE): inputs[name] for name, slot in self.program.inputs.items() if name in inputs}
        for rank, store in self.stores.items():
            store.buffers.update(self._held[rank])
            # where autograd adds up gradients, leaves of the run's own: their `.grad` is not the user's
            store.buffers.update((key, self._held[rank][key].detach().requires_grad_()) for key in self._summed[rank])
            store.buffers.update(given)
        try:
            with torch.no_grad(), torch.autocast(self.device_type, enabled=False):
                self._run()
        except BaseException:
            self.clear()
            raise

    def clear(self) -> None:
        """Forget everything that the run has left."""
        for store in self.stores.values():
            store.clear()

    def __enter__(self) -> BoundProgram:
        return self

    def __exit__(self, *error: object) -> None:
        self.clear()

    # -- results ---------------------------------------------------------------------------------

    def result(self, slot: SlotName | None) -> Tensor:
        """A result that is whole on every rank."""
        if slot is None:
            raise ExecutionError("the program has no loss")
        return next(iter(self.stores.values())).buffers[(slot, ONCE)].detach()

    def gradients(self, shards: Shards) -> Iterator[tuple[ParameterShard, Tensor]]:
        """The gradient of each shard."""
        for binding in self.program.parameters:
            if binding.gradient is None:
                continue
            for rank, store in self.stores.items():
                shard = shards.by_rank[rank].get(binding.tensor)
                if shard is not None:
                    yield shard, store.buffers[(binding.gradient, ONCE)]

    def stored_parameters(self) -> dict[StoredId, Tensor]:
        """After a refresh: each stored parameter that is not the optimizer's own shard, ready to be a leaf."""
        found: dict[StoredId, Tensor] = {}
        for rank, store in self.stores.items():
            for binding in self.program.parameters:
                for name in binding.stored:
                    slot = self.program.slots[name]
                    if rank in slot.mesh and name not in binding.shared:
                        value = store.buffers[(name, ONCE)].detach()
                        leaf = value.requires_grad_(binding.gradient is not None and value.is_floating_point())
                        found[_stored_id(rank, slot)] = leaf
        return found


def _stored_id(rank: Rank, slot: Slot) -> StoredId:
    return (rank, slot.tensor, slot.mesh, slot.layout, slot.dtype)
