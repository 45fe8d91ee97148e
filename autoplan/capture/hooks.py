"""Hooks on tensors and gradients: what a traced graph cannot carry is refused by name, never dropped.

Forward hooks and forward pre-hooks of modules run while the model is traced, so their operators are in the
graph.  Hooks on gradients run inside autograd, where tracing does not see them.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from autoplan.capture.guards import Places, is_torch_file
from autoplan.operators.composite import is_capturing
from searchspace.errors import AutoplanWarning, CaptureError

_TENSOR_HOOKS = {
    "_backward_hooks": "register_hook",
    "_post_accumulate_grad_hooks": "register_post_accumulate_grad_hook",
}
_MODULE_HOOKS = {
    "_backward_hooks": "register_full_backward_hook or register_backward_hook",
    "_backward_pre_hooks": "register_full_backward_pre_hook",
}
_GLOBAL_HOOKS = {
    "_global_backward_hooks": "register_module_full_backward_hook",
    "_global_backward_pre_hooks": "register_module_full_backward_pre_hook",
}
_PLAIN = tuple(
    getattr(kind.__torch_function__, "__func__", kind.__torch_function__) for kind in (torch.Tensor, nn.Parameter)
)
_ADVICE = (
    "autoplan computes gradients by its own program, in which it would not run: remove it, and do on the gradients "
    "after train_step, or in forward with operators, what it does"
)


def check_hooks(model: nn.Module) -> None:
    """Raise CaptureError for a hook on the gradient of a parameter, buffer or module, naming it.

    Warns of gradients that parameters already hold: the parallel model starts without.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        for attribute, made_by in _TENSOR_HOOKS.items():
            found = getattr(tensor, attribute, None)
            if found:
                kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
                raise CaptureError(f"{kind} {name!r} has a hook {_named(found)} ({made_by}); {_ADVICE}")
    for path, module in model.named_modules():
        for attribute, made_by in _MODULE_HOOKS.items():
            found = module.__dict__.get(attribute)
            if found:
                where = f"module {path!r}" if path else "the model"
                raise CaptureError(f"{where} has a backward hook {_named(found)} ({made_by}); {_ADVICE}")
    for attribute, made_by in _GLOBAL_HOOKS.items():
        found = getattr(nn.modules.module, attribute)
        if found:
            raise CaptureError(f"all modules have a backward hook {_named(found)} ({made_by}); {_ADVICE}")
    held = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
    if held:
        more = f" (and {len(held) - 1} more)" if len(held) > 1 else ""
        warnings.warn(
            f"parameter {held[0]!r}{more} already holds a gradient; the parallel model starts without: call "
            "model.zero_grad() first",
            AutoplanWarning,
            stacklevel=3,
        )


def check_inputs(inputs: Iterable[torch.Tensor]) -> None:
    """Warn of inputs that require a gradient: the parallel program computes those of parameters only."""
    found = [tensor for tensor in inputs if tensor.requires_grad]
    if found:
        warnings.warn(
            f"an input of shape {tuple(found[0].shape)} requires a gradient: the parallel program computes those of "
            "parameters only; detach it, or make it a parameter of the model",
            AutoplanWarning,
            stacklevel=3,
        )


def check_kinds(model: nn.Module) -> None:
    """Raise CaptureError for a parameter or buffer whose class changes what operators do."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        kind = type(tensor)
        own = getattr(kind.__torch_function__, "__func__", kind.__torch_function__)
        if own not in _PLAIN and not isinstance(tensor, torch._subclasses.FakeTensor):
            raise CaptureError(
                f"tensor {name!r} is a {kind.__name__}, whose __torch_function__ changes what operators do; use a "
                "plain nn.Parameter and write the operators in forward"
            )


@contextmanager
def watched_gradients(model: nn.Module, places: Places) -> Iterator[None]:
    """While active, user code that reaches into autograd is refused.

    That is: reading ``grad_fn`` (to hook it), hooks on saved tensors, and changing ``requires_grad`` of a
    parameter.  ``retain_grad`` is warned of: the parallel program keeps no gradients of activations.
    Code of torch itself (checkpointing, ``save_on_cpu``) may do so: it changes no value.
    """
    names = ("data", "grad_fn", "requires_grad", "requires_grad_", "retain_grad")
    plain: dict[str, Any] = {name: getattr(torch._C.TensorBase, name) for name in names}
    before = {name: torch.Tensor.__dict__[name] for name in names if name in torch.Tensor.__dict__}
    hooks = torch.autograd.graph.saved_tensors_hooks
    make_hooks = hooks.__init__

    def refuse(what: str, advice: str) -> None:
        raise CaptureError(f"{what} {places.here()}: {advice}")

    def change(tensor: torch.Tensor, wanted: bool) -> None:
        if tensor.requires_grad == wanted or not _by_user(modules=True):
            return
        name = next((name for name, held in model.named_parameters() if held is tensor), None)
        if name is not None:
            refuse(
                f"forward sets requires_grad of the parameter {name!r} to {wanted}",
                "what is trained is fixed at capture; set it before, or use torch.no_grad() or detach() in forward",
            )

    def grad_fn(tensor: torch.Tensor) -> Any:
        if _by_user():
            refuse("forward reads grad_fn of a tensor", "the autograd graph cannot be captured, nor hooks on it")
        return plain["grad_fn"].__get__(tensor)

    def set_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
        if _by_user():
            refuse(
                "forward assigns .data of a tensor",
                "write a buffer in place (copy_ under torch.no_grad()), and change parameters outside forward",
            )
        plain["data"].__set__(tensor, value)

    def set_requires_grad(tensor: torch.Tensor, wanted: bool) -> None:
        change(tensor, wanted)
        plain["requires_grad"].__set__(tensor, wanted)

    def requires_grad_(tensor: torch.Tensor, requires_grad: bool = True) -> torch.Tensor:
        change(tensor, requires_grad)
        return plain["requires_grad_"](tensor, requires_grad)

    def retain_grad(tensor: torch.Tensor) -> None:
        if _by_user():
            warnings.warn(
                f"retain_grad {places.here()}: the parallel program keeps no gradients of activations",
                AutoplanWarning,
                stacklevel=2,
            )
        plain["retain_grad"](tensor)

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if type(self) is hooks and _by_user():
            refuse("hooks on saved tensors", "they would not run in the parallel program; leave them out")
        make_hooks(self, *args, **kwargs)

    new: dict[str, Any] = {
        "data": property(plain["data"].__get__, set_data),
        "grad_fn": property(grad_fn),
        "requires_grad": property(plain["requires_grad"].__get__, set_requires_grad),
        "requires_grad_": requires_grad_,
        "retain_grad": retain_grad,
    }
    try:
        for name, replacement in new.items():
            setattr(torch.Tensor, name, replacement)
        hooks.__init__ = init  # type: ignore[method-assign]
        yield
    finally:
        hooks.__init__ = make_hooks  # type: ignore[method-assign]
        for name in names:
            if name in before:
                setattr(torch.Tensor, name, before[name])
            else:
                delattr(torch.Tensor, name)


def _by_user(modules: bool = False) -> bool:
    """Whether code outside torch made the call.  ``modules``: ``nn.Module``'s own methods speak for their caller."""
    if not is_capturing():  # inside a composite operator
        return False
    passed = (__file__, nn.modules.module.__file__) if modules else (__file__,)
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename in passed:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and not is_torch_file(frame.f_code.co_filename)


def _named(hooks: Any) -> str:
    def name(hook: Callable[..., Any]) -> str:
        code = getattr(hook, "__code__", None)
        place = f" of {code.co_filename}:{code.co_firstlineno}" if code is not None else ""
        return f"{getattr(hook, '__qualname__', type(hook).__name__)!r}{place}"

    return name(next(iter(hooks.values())))
