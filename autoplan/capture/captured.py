"""A captured model: its graph, and the way between the user's objects and the graph's tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autoplan.capture.export import Outputs
from autoplan.capture.signature import CallSignature
from searchspace.errors import CaptureError
from searchspace.graph import Graph, Tensor
from searchspace.plan import Mode, Precision


@dataclass(frozen=True, eq=False)
class Captured:
    """What :func:`autoplan.capture.capture` returns.

    Fields
        graph: the single-device model as data.
        model: the user's module; it was not changed.
        signature: how a call becomes the graph's inputs.
        structure: how the graph's outputs become the user's.
        constants: tensors that the model makes without registering them, by the graph's tensor names.
        training: whether any module was in training mode.
        loss_fn, device: as they were given to the capture (the type of device that was found, by default).
    """

    graph: Graph
    model: nn.Module
    mode: Mode
    precision: Precision
    signature: CallSignature
    structure: Outputs
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict)
    training: bool = False
    loss_fn: Callable[..., Any] | None = None
    device: str = "cpu"

    def difference(self, training: bool) -> str:
        """What ``model.train(training)`` would change in the graph: an operator and its module; "" for nothing.

        Captures the same call once more.
        """
        from autoplan.capture.modes import difference  # which captures, and imports this module

        return difference(self, training)

    def flatten_call(
        self,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        loss_args: Sequence[Any] | None = (),
        *,
        batch: int | None = None,
    ) -> dict[str, torch.Tensor]:
        """The graph's input tensors of a call, by name, in the graph's dtypes.

        ``loss_args`` None is a call of the model alone: those of the loss are left out.
        ``batch`` is the extent expected along batch dimensions, by default that of the capture.
        Raises CaptureError when structure, shape, dtype or a baked-in value differs from the capture.
        """
        return self.signature.flatten(args, kwargs, loss_args, batch=batch)

    def batch_of(
        self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, loss_args: Sequence[Any] = ()
    ) -> int | None:
        """The batch extent of a call, or None when no input has a batch dimension."""
        return self.signature.batch_of(args, kwargs, loss_args)

    def unflatten_outputs(self, tensors: Sequence[torch.Tensor | None] | Mapping[str, torch.Tensor | None]) -> Any:
        """The model's output from tensors in the order of ``graph.outputs`` (or by graph tensor name).

        Leaves that are no tensors are those of the capture; caches are None.
        """
        if isinstance(tensors, Mapping):
            tensors = [tensors[name] for name in self.graph.outputs]
        if len(tensors) != len(self.structure.tensors):
            raise CaptureError(f"expected {len(self.structure.tensors)} output tensors, got {len(tensors)}")
        leaves = list(self.structure.baked)
        for position, tensor in zip(self.structure.tensors, tensors, strict=True):
            leaves[position] = tensor
        return self.structure.structure.unflatten(leaves)

    def parameter(self, name: str) -> nn.Parameter:
        """The module's parameter behind a graph tensor (or its qualified name, aliases too)."""
        return self.model.get_parameter(self._source(name, "parameter"))

    def buffer(self, name: str) -> torch.Tensor:
        """The module's buffer behind a graph tensor (or its qualified name, aliases too)."""
        return self.model.get_buffer(self._source(name, "buffer"))

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Each distinct parameter of the module by the name of its graph tensor."""
        return {t.name: self.model.get_parameter(t.source) for t in self.graph.of_kind("parameter")}

    def named_buffers(self) -> dict[str, torch.Tensor]:
        """Each distinct buffer of the module by the name of its graph tensor."""
        return {t.name: self.model.get_buffer(t.source) for t in self.graph.of_kind("buffer")}

    def names(self, tensor: Tensor) -> tuple[str, ...]:
        """All qualified names in the module of a parameter or buffer."""
        return (tensor.source, *tensor.aliases)

    def _source(self, name: str, kind: str) -> str:
        for tensor in self.graph.tensors:
            if tensor.kind == kind and name in (tensor.name, tensor.source, *tensor.aliases):
                return tensor.source
        raise CaptureError(f"{self.graph.name} has no {kind} {name!r}")
