"""Tracing: ``torch.export`` of model and loss over fake tensors."""

from __future__ import annotations

import io
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autoplan.capture.builder import dtype_name
from autoplan.capture.cumulative import cumulative_averages
from autoplan.capture.guards import Places, guarded_functions, reworded
from autoplan.capture.hooks import watched_gradients
from autoplan.capture.signature import CallSignature
from autoplan.capture.standin import stand_ins
from autoplan.capture.structure import Structure, flatten, holds_tensors, is_cache
from autoplan.capture.written import State, written_state
from autoplan.operators.composite import capturing
from searchspace.errors import CaptureError
from searchspace.graph import Context

MODEL = "model"
"""The attribute under which the wrapper holds the model: prefix of names and module paths in the export."""
CONTEXT = "autoplan_context"
"""The key of a traced node's :class:`~searchspace.graph.Context` in its ``meta``."""


@dataclass
class Outputs:
    """What the model returned: structure, the leaves that are no tensors, and which leaves are."""

    structure: Structure = field(default_factory=Structure)
    baked: tuple[Any, ...] = ()
    tensors: tuple[int, ...] = ()


@dataclass(frozen=True)
class Trace:
    """An exported program, whose outputs are the user's tensors and then, in training, the loss."""

    program: torch.export.ExportedProgram
    outputs: Outputs


class _Loss(nn.Module):
    """Runs the loss function, so that its operators have a module path of their own."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.__dict__["function"] = function  # not a submodule: its tensors are constants, not the model's

    def forward(self, output: Any, *args: Any) -> Any:
        return self.__dict__["function"](output, *args)


class _Wrapper(nn.Module):
    """Takes the call's tensors flat, gives the output's tensors flat and the loss."""

    def __init__(
        self,
        model: nn.Module,
        signature: CallSignature,
        loss: Callable[..., Any] | None,
        train: bool,
        autocast: str | None,
    ) -> None:
        super().__init__()
        self.model = model
        self.loss: nn.Module | None = _Loss(loss) if loss is not None else None
        self.signature, self.train_mode, self.autocast = signature, train, autocast
        self.outputs = Outputs()
        self.state = State()

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        args, kwargs, loss_args = self.signature.rebuild(tensors)
        context: AbstractContextManager[Any] = nullcontext()
        if self.autocast is not None:
            context = torch.autocast(self.autocast, dtype=torch.bfloat16, cache_enabled=False)
        with context, written_state(self.model, self.loss and self.loss.__dict__["function"]) as written:
            output = self.model(*args, **kwargs)
            leaves, structure = flatten(output)
            results = [leaf for _, leaf in leaves if isinstance(leaf, torch.Tensor)]
            if self.train_mode:
                results = [result.clone() for result in results]  # a loss may change the output in place
                loss = self.loss(output, *loss_args) if self.loss is not None else own_loss(output)
                results.append(_scalar(loss))
            results += written.find_changes()
        self.state.written = written
        self.outputs.structure = structure
        self.outputs.baked = tuple(_baked(path, leaf) for path, leaf in leaves)
        self.outputs.tensors = tuple(i for i, (_, leaf) in enumerate(leaves) if isinstance(leaf, torch.Tensor))
        return tuple(results)


def own_loss(output: Any) -> Any:
    """The loss of a model that computes it: a scalar output, ``output.loss`` or ``output["loss"]``."""
    if isinstance(output, torch.Tensor) and output.numel() == 1:
        return output
    found = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if found is None:
        kind = f"a tensor of shape {tuple(output.shape)}" if isinstance(output, torch.Tensor) else type(output).__name__
        raise CaptureError(
            f"no loss found: the model returned {kind}, which is no scalar and has no .loss; pass loss_fn= (and "
            'loss_args= for its further arguments), pass labels to the model, or use mode="inference"'
        )
    return found


def _scalar(loss: Any) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor):
        raise CaptureError(f"expected the loss to be a scalar tensor, got {type(loss).__name__}")
    if loss.numel() != 1 or not loss.is_floating_point():
        raise CaptureError(
            f"expected the loss to be a floating-point scalar, got {loss.dtype} of shape {tuple(loss.shape)}; "
            "reduce it, for example with .mean()"
        )
    return loss if loss.ndim == 0 else loss.reshape(())


def _baked(path: str, leaf: Any) -> Any:
    """What stays of an output leaf that is no tensor; caches are dropped."""
    if isinstance(leaf, torch.Tensor) or is_cache(leaf):
        return None
    if holds_tensors(leaf):
        raise CaptureError(
            f"output {path!r}: {type(leaf).__name__} holds tensors but is no container that autoplan knows; return "
            "a tuple, list, dict or dataclass, or register it with torch.utils._pytree.register_pytree_node"
        )
    return leaf


def trace(
    model: nn.Module,
    signature: CallSignature,
    *,
    loss_fn: Callable[..., Any] | None,
    train: bool,
    mode: FakeTensorMode,
    device: str,
    floating: torch.dtype | None,
    autocast: bool,
) -> Trace:
    """Export model and loss; raises CaptureError that names module and line."""
    places = Places(model)
    with stand_ins(model, mode, device, floating), _tracing_settings():
        if not train:
            model.eval()
        with mode:
            inputs = tuple(torch.empty(leaf.shape, dtype=leaf.dtype, device=device) for leaf in signature.tensors)
        wrapper = _Wrapper(model, signature, loss_fn, train, device if autocast else None)
        wrapper.training = model.training

        def export() -> torch.export.ExportedProgram:
            with recorded_contexts(device), watched_gradients(model, places):
                return _exported(wrapper, inputs, places)

        program = export()
        if wrapper.state.proceed(program.graph_module):
            wrapper.state.settle(export().graph_module)
        wrapper.state.tell()
    return Trace(program, wrapper.outputs)


def _exported(wrapper: _Wrapper, inputs: tuple[torch.Tensor, ...], places: Places) -> torch.export.ExportedProgram:
    printed = io.StringIO()  # torch prints the unfinished graph when it fails
    try:
        with (
            guarded_functions(places),
            cumulative_averages(),
            capturing(),
            torch.enable_grad(),
            redirect_stderr(printed),
        ):
            program = torch.export.export(wrapper, inputs, strict=False)
    except Exception as error:
        raise reworded(error, places) from error
    sys.stderr.write(printed.getvalue())
    return program


@contextmanager
def recorded_contexts(device: str) -> Iterator[None]:
    """While active, every traced node remembers the gradient and autocast mode it was made in (``meta[CONTEXT]``).

    Export wraps such regions into subgraphs, but loses the inner one where they are nested.
    """
    create = fx.proxy.TracerBase.create_node

    def create_node(self: fx.Tracer, *args: Any, **kwargs: Any) -> fx.Node:
        node = create(self, *args, **kwargs)
        autocast = dtype_name(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else None
        node.meta[CONTEXT] = Context(no_grad=not torch.is_grad_enabled(), autocast=autocast)
        return node

    fx.proxy.TracerBase.create_node = create_node  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        fx.proxy.TracerBase.create_node = create  # type: ignore[method-assign]


@contextmanager
def _tracing_settings() -> Iterator[None]:
    """No shortcuts that look at data: fused inference kernels of attention modules, and the guess of a Transformer
    module that its mask is causal (the mask itself is used, so that nothing changes).  No warnings about tracing."""
    guess = torch.nn.modules.transformer._detect_is_causal_mask
    torch.nn.modules.transformer._detect_is_causal_mask = lambda mask, is_causal=None, size=None: is_causal is True
    fast = torch.backends.mha.get_fastpath_enabled()
    shapes = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    level = shapes.level
    torch.backends.mha.set_fastpath_enabled(False)
    shapes.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\.")
            warnings.filterwarnings("ignore", message="The tensor attribute.* assigned during export")
            yield
    finally:
        torch.nn.modules.transformer._detect_is_causal_mask = guess
        torch.backends.mha.set_fastpath_enabled(fast)
        shapes.setLevel(level)
