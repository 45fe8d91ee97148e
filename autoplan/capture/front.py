"""The entry: from a module and example inputs to a :class:`Captured`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autoplan.capture.builder import GraphBuilder
from autoplan.capture.captured import Captured
from autoplan.capture.export import trace
from autoplan.capture.guards import check_model, check_storage
from autoplan.capture.hooks import check_hooks, check_inputs, check_kinds
from autoplan.capture.lower import Lowering
from autoplan.capture.rewrites import REWRITES
from autoplan.capture.rules import describe
from autoplan.capture.signature import CallSignature, sign
from autoplan.capture.sources import Sources
from autoplan.capture.standin import Inventory, device_type
from autoplan.capture.structure import flatten
from searchspace.errors import CaptureError
from searchspace.plan import Mode, Precision
from searchspace.units import align_units


def capture(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss_fn: Callable[..., Any] | None = None,
    loss_args: Sequence[Any] = (),
    mode: Mode = "train",
    precision: Precision = "float32",
    batch_dims: Mapping[str, int | None] | None = None,
    name: str | None = None,
    device: str | None = None,
) -> Captured:
    """Capture ``model`` called as ``model(*args, **kwargs)``.

    Parameters
        args, kwargs: example inputs, on any device, ``meta`` too; tensors in nested containers are the graph's
            inputs, everything else is baked in.
        loss_fn, loss_args: the loss is ``loss_fn(output, *loss_args)``; without ``loss_fn`` it is a scalar
            output, ``output.loss`` or ``output["loss"]``.
        mode: ``"train"`` keeps the training flags of the modules; ``"inference"`` runs them in evaluation mode,
            needs no loss, and nothing requires a gradient.
        precision: ``"float32"`` leaves the model's own dtypes; ``"bf16"`` makes floating-point parameters and
            inputs bfloat16; ``"autocast"`` runs the call under ``torch.autocast`` with bfloat16.
        batch_dims: overrides the inferred batch dimension by input path (``"kwargs.labels"``, or a prefix of
            paths such as ``"args"``); None for an input without one.
        name: of the graph, by default the class's.
        device: the type of device whose autocast rules hold, by default that of model and inputs.

    The model is not changed and no weight is allocated.  Raises CaptureError for whatever cannot be
    captured; the message names module and line, and says what to do.
    """
    check_model(model)
    check_storage(model)
    check_kinds(model)
    if mode == "train":
        check_hooks(model)
        check_inputs(_tensors(args, kwargs, loss_args))
    _check_options(mode, precision, loss_fn)
    signature = sign(args, kwargs, loss_args, batch_dims=batch_dims, floating=_floating(precision))
    where = device or device_type(model, _tensors(args, kwargs, loss_args))
    _check_device(where)
    return capture_call(model, signature, mode, precision, loss_fn, where, name or type(model).__name__)


def capture_call(
    model: nn.Module,
    signature: CallSignature,
    mode: Mode,
    precision: Precision,
    loss_fn: Callable[..., Any] | None,
    device: str,
    name: str,
) -> Captured:
    """What :func:`capture` does after its checks: the call of ``signature``, on a type of device."""
    floating = _floating(precision)
    inventory = Inventory.of(model)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    traced = trace(
        model,
        signature,
        loss_fn=loss_fn if mode == "train" else None,
        train=mode == "train",
        mode=fake,
        device=device,
        floating=floating,
        autocast=precision == "autocast",
    )
    builder = GraphBuilder(fake, device, describe, gradients=mode == "train")
    sources = Sources(builder, signature, inventory, floating)
    lowering = Lowering(builder, REWRITES)
    results = lowering.run(traced.program.graph_module, sources.placeholders(traced))
    values = [lowering.read(result) for result in results]
    loss = values.pop() if mode == "train" else None
    if loss is not None and not loss.requires_grad:
        raise CaptureError(
            "the loss does not depend on any parameter that requires a gradient; check requires_grad and no_grad, or "
            'use mode="inference"'
        )
    updates = sources.updates(lowering)
    graph = align_units(builder.finish(name, values, loss, updates, signature.batch))
    constants = {t.name: sources.constants[t.source] for t in graph.of_kind("constant")}
    training = mode == "train" and any(module.training for module in model.modules())
    return Captured(graph, model, mode, precision, signature, traced.outputs, constants, training, loss_fn, device)


def _floating(precision: Precision) -> torch.dtype | None:
    """The dtype of floating-point parameters and inputs in the graph; None: their own."""
    return torch.bfloat16 if precision == "bf16" else None


def _check_options(mode: str, precision: str, loss_fn: Any) -> None:
    for name, value, allowed in (("mode", mode, get_args(Mode)), ("precision", precision, get_args(Precision))):
        if value not in allowed:
            raise CaptureError(f"expected {name} to be one of {', '.join(allowed)}, got {value!r}")
    if loss_fn is not None and not callable(loss_fn):
        raise CaptureError(f"expected loss_fn to be a function of the model's output, got {type(loss_fn).__name__}")
    if isinstance(loss_fn, nn.Module) and any(True for _ in loss_fn.parameters()):
        raise CaptureError("loss_fn is a module with parameters; make it a part of the model and return the loss")


def _check_device(device: str) -> None:
    """Torch's own fake tensors crash the process on a kind of device that the machine lacks."""
    if device != "cpu" and not (getattr(torch, device, None) and getattr(torch, device).is_available()):
        raise CaptureError(f"expected a type of device that this machine has, such as 'cpu', got {device!r}")


def _tensors(*values: Any) -> list[torch.Tensor]:
    return [leaf for value in values for _, leaf in flatten(value)[0] if isinstance(leaf, torch.Tensor)]
