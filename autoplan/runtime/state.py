"""The model's state in the single-device model's names and shapes: parameters, buffers, and the rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autoplan.runtime.agreement import Agreed
from autoplan.runtime.parameters import ParameterShard, Shards
from autoplan.runtime.transport import Transport
from searchspace.errors import CheckpointError, ExecutionError

if TYPE_CHECKING:
    from autoplan.runtime.bound import BoundProgram
    from autoplan.runtime.parallel import Model


class State:
    """Buffers and constants (whole on every rank), and the way from and to a ``state_dict``.

    Fields
        buffers: present values by graph tensor.
        constants: by graph tensor.
        names: the keys of the model's own ``state_dict()``, in its order, with the graph tensor behind each
            (None: something that the graph does not use).
        others: what the graph does not use, by key, as it was.
    """

    def __init__(self, model: Model, shards: Shards, transport: Transport) -> None:
        self.shards = shards
        self.transport = transport
        self.graph = model.graph
        device = transport.device
        buffers = {t.name: model.model.get_buffer(t.source) for t in self.graph.of_kind("buffer")}
        self.buffers = {name: _copy(value, device) for name, value in Agreed(transport, buffers).items()}
        self.constants = {name: _copy(value, device) for name, value in Agreed(transport, model.constants).items()}
        by_name = {
            name: t.name
            for t in self.graph.of_kind("parameter", "buffer")
            for name in (t.source, *t.aliases)
            if t.name in self.buffers or t.name in shards.bindings
        }
        own = model.model.state_dict(keep_vars=True)
        self.names: dict[str, str | None] = {key: by_name.get(key) for key in own}
        self.others = {key: value for key, value in own.items() if self.names[key] is None}
        unused = {key: value for key, value in self.others.items() if isinstance(value, Tensor)}
        self.others |= {key: _copy(value, torch.device("cpu")) for key, value in Agreed(transport, unused).items()}
        self._by_name = {name: t.name for t in self.graph.of_kind("buffer") for name in (t.source, *t.aliases)}

    def update_buffers(self, run: BoundProgram) -> None:
        """Let each buffer take the value that the run computed for it."""
        if not run.program.buffer_updates:
            return
        tensors = {slot: tensor for tensor, slot in run.program.buffers.items()}
        store = next(iter(run.stores.values()))
        for key, slot in run.program.buffer_updates:
            # in place: programs that are bound to the buffer see the new value
            self.buffers[tensors[slot]].copy_(store.buffers[key])

    def state_dict(self) -> dict[str, Any]:
        whole: dict[str, Tensor] = {}
        found: dict[str, Any] = {}
        for key, tensor in self.names.items():
            if tensor is None:
                found[key] = self.others[key]
                continue
            if tensor not in whole:
                if tensor in self.buffers:
                    whole[tensor] = self.buffers[tensor].clone()
                else:
                    whole[tensor] = self._gather(tensor, lambda shard: shard.parameter)
            found[key] = whole[tensor]
        return found

    def full_gradients(self) -> dict[str, Tensor | None]:
        names = [name for name, binding in self.shards.bindings.items() if binding.gradient is not None]
        present = torch.zeros(len(self.transport.ranks), len(names), dtype=torch.int32)
        for row, held in enumerate(self.shards.by_rank.values()):
            for column, name in enumerate(names):
                present[row, column] = name in held and held[name].parameter.grad is not None
        flags = self.transport.reduce(list(present), "max").tolist() if names else []
        there = dict(zip(names, flags, strict=True))
        return {
            self.graph.tensor[name].source: self._gather(name, lambda shard: shard.parameter.grad)
            if there.get(name)
            else None
            for name in self.shards.bindings
        }

    def _gather(self, name: str, of: Callable[[ParameterShard], Tensor | None]) -> Tensor:
        return self.shards.gather(name, of, self.shards.dtype(name))

    def check_initialised(self) -> None:
        """ExecutionError naming a buffer or constant that is read and has no value."""
        for name, value in (*self.buffers.items(), *self.constants.items()):
            if value.is_meta and (self.graph.consumers[name] or name in self.graph.outputs):
                raise ExecutionError(
                    f"{self.graph.tensor[name].source} has no value: it is on the meta device; call load_state_dict "
                    "or initialize, or build the model with only its parameters on meta"
                )

    def allocate(self) -> None:
        """Memory for what a state has and is still on the meta device, so that it can be filled."""
        for tensor in self.names.values():
            if tensor in self.buffers and self.buffers[tensor].is_meta:
                self.buffers[tensor] = torch.empty_like(self.buffers[tensor], device=self.transport.device)
        for key, value in self.others.items():
            if isinstance(value, Tensor) and value.is_meta:
                self.others[key] = torch.empty_like(value, device="cpu")

    def load_state_dict(self, state: Mapping[str, Any], strict: bool) -> None:
        missing = [key for key in self.names if key not in state]
        unexpected = [key for key in state if key not in self.names and key not in self._by_name]
        if strict and (missing or unexpected):
            raise CheckpointError(
                f"the state does not fit {self.graph.name}: missing {missing[:5]}, unexpected {unexpected[:5]}"
            )
        for key, tensor in {**self._by_name, **self.names}.items():
            if key not in state:
                continue
            if tensor is None:
                self.others[key] = state[key]
            elif tensor in self.buffers:
                self.load_buffer(tensor, state[key])
            else:
                self.shards.load(tensor, state[key])

    def load_buffer(self, tensor: str, value: Tensor) -> None:
        """Set a buffer; CheckpointError when the shape differs."""
        buffer = self.buffers[tensor]
        if tuple(value.shape) != tuple(buffer.shape):
            source = self.graph.tensor[tensor].source
            raise CheckpointError(f"{source}: expected shape {list(buffer.shape)}, got {list(value.shape)}")
        if buffer.is_meta:
            buffer = self.buffers[tensor] = torch.empty_like(buffer, device=self.transport.device)
        buffer.copy_(value.detach())


def _copy(value: Tensor, device: torch.device) -> Tensor:
    value = value.detach()
    return value if value.is_meta else value.to(device, copy=True)
