"""What a graph reads: inputs, parameters, buffers and constants, and the traced placeholders that stand for them."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor

from autoplan.capture.aliasing import Alias
from autoplan.capture.builder import GraphBuilder, Value, dtype_name
from autoplan.capture.canonical import DEVICE
from autoplan.capture.export import MODEL, Trace
from autoplan.capture.lower import Lowering
from autoplan.capture.signature import CallSignature
from autoplan.capture.standin import Inventory
from searchspace.errors import CaptureError
from searchspace.graph import Symbol


class Sources:
    """Adds a model's inputs, parameters and buffers to a builder; ``floating`` is the dtype of floating parameters."""

    def __init__(
        self, builder: GraphBuilder, signature: CallSignature, inventory: Inventory, floating: torch.dtype | None
    ) -> None:
        self.constants: dict[str, torch.Tensor] = {}
        self._builder = builder
        self._by_name: dict[str, Alias] = {}
        self._buffers: list[tuple[Alias, Value]] = []
        self._inputs = [
            Alias.fresh(builder.source("input", leaf.path, leaf.shape, leaf.dtype, batch_dim=leaf.batch_dim))
            for leaf in signature.tensors
        ]
        for item in inventory.parameters:
            first, tensor = item.names[0], item.tensor
            dtype = floating if floating is not None and tensor.is_floating_point() else tensor.dtype
            value = builder.source(
                "parameter", first, tensor.shape, dtype, requires_grad=tensor.requires_grad, aliases=item.names[1:]
            )
            fixed = f"forward changes the parameter {first!r} in place; update it outside the model"
            self._by_name.update(dict.fromkeys(item.names, Alias.fresh(value, fixed)))
        for item in inventory.buffers:
            value = builder.source(
                "buffer", item.names[0], item.tensor.shape, item.tensor.dtype, aliases=item.names[1:]
            )
            alias = Alias.fresh(value)
            self._buffers.append((alias, value))
            self._by_name.update(dict.fromkeys(item.names, alias))

    def placeholders(self, traced: Trace) -> list[Alias]:
        """One entry for each placeholder of the exported graph, in its order."""
        signature = traced.program.graph_signature
        registered = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        lifted = signature.inputs_to_lifted_tensor_constants
        supply = iter(self._inputs)
        found = []
        for node in traced.program.graph_module.graph.find_nodes(op="placeholder"):
            if node.name in registered:
                found.append(self._by_name[registered[node.name].removeprefix(MODEL + ".")])
            elif node.name in lifted:
                found.append(self._constant(lifted[node.name], traced.program.constants[lifted[node.name]]))
            else:
                found.append(next(supply))
        return found

    def updates(self, lowering: Lowering) -> list[tuple[Value, Value]]:
        """(buffer, its new value) for the buffers that were written."""
        now = [(value, lowering.read(alias)) for alias, value in self._buffers]
        return [(before, self._computed(after)) for before, after in now if after is not before]

    def _computed(self, value: Value) -> Value:
        """A copy of what is only read: two buffers may have changed places."""
        return value if value.origin is not None else self._builder.emit("aten.clone.default", value)

    def _constant(self, path: str, tensor: torch.Tensor) -> Alias:
        """A tensor that the model holds or makes without registering it; a number becomes part of the graph."""
        path = path.removeprefix(MODEL + ".")
        fixed = f"forward changes the tensor attribute {path!r} in place; register it with register_buffer"
        if tensor.requires_grad:
            raise CaptureError(
                f"forward uses a tensor of shape {tuple(tensor.shape)} that requires a gradient, but is no parameter "
                "and not computed from one (requires_grad_ or torch.autograd.grad in forward); this cannot be captured"
            )
        if isinstance(tensor, FakeTensor):  # a plain attribute on meta: no data, good for planning only
            tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        if tensor.numel() == 1 and not tensor.is_meta:
            dtype, shape = Symbol(f"torch.{dtype_name(tensor.dtype)}"), tuple(tensor.shape)
            number = self._builder.emit("aten.full.default", shape, tensor.item(), dtype=dtype, device=DEVICE)
            return Alias.fresh(number, fixed)
        self.constants[path] = tensor.detach()
        return Alias.fresh(self._builder.source("constant", path, tensor.shape, tensor.dtype), fixed)
