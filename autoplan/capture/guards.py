"""Guards: what cannot be captured is refused with the module, the line, and what to do instead."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import nn

from autoplan.operators.composite import is_capturing
from searchspace.errors import AutoplanError, CaptureError

_WRAPPERS = {
    "DistributedDataParallel": ".module",
    "DataParallel": ".module",
    "FullyShardedDataParallel": ".module",
    "DeepSpeedEngine": ".module",
    "OptimizedModule": "._orig_mod",
}
_TORCH = os.path.dirname(torch.__file__) + os.sep
_CAPTURE = os.path.dirname(__file__) + os.sep


def check_model(model: Any) -> None:
    """Raise CaptureError unless ``model`` is a plain, undistributed nn.Module."""
    kind = type(model).__name__
    if model is None:
        raise CaptureError("expected a torch.nn.Module, got None; did the function that builds the model return it?")
    if isinstance(model, type):
        raise CaptureError(f"expected a torch.nn.Module instance, got the class {model.__name__}: call it first")
    if isinstance(model, torch.jit.ScriptModule | torch.jit.ScriptFunction):
        raise CaptureError(f"expected a torch.nn.Module, got a TorchScript {kind}: pass the module it was made from")
    if isinstance(model, dict):
        raise CaptureError(
            f"expected a torch.nn.Module, got a {kind} with {len(model)} entries; if this is a state_dict, build "
            "the module and call module.load_state_dict(...)"
        )
    if not isinstance(model, nn.Module):
        hint = "put it into the forward of a torch.nn.Module" if callable(model) else "pass the module itself"
        raise CaptureError(f"expected a torch.nn.Module, got {kind}: {hint}")
    registered = {id(parameter) for parameter in model.parameters()}
    for path, module in model.named_modules():
        _check_module(path, module)
        for name, value in module.__dict__.items():
            if _trained(value, registered):
                raise CaptureError(
                    f"attribute {name!r} of {_where(path)} holds a trained tensor that is not registered (and that "
                    "model.parameters() does not give); use nn.Parameter, nn.ParameterList or nn.ParameterDict"
                )


def _trained(value: Any, registered: set[int], depth: int = 3) -> bool:
    """Whether there is a leaf tensor that requires a gradient, but is no registered parameter."""
    if isinstance(value, torch.Tensor):
        return value.requires_grad and value.is_leaf and id(value) not in registered
    if depth and isinstance(value, list | tuple | dict):
        items = value.values() if isinstance(value, dict) else value
        return any(_trained(item, registered, depth - 1) for item in items)
    return False


def _where(path: str) -> str:
    return f"module {path!r}" if path else "the model"


def _check_module(path: str, module: nn.Module) -> None:
    where = _where(path)
    for base in type(module).__mro__:
        if base.__name__ in _WRAPPERS:
            raise CaptureError(
                f"{where} is wrapped in {base.__name__}; autoplan distributes the model itself, unwrap it first: "
                f"model{_WRAPPERS[base.__name__]}"
            )
        if base.__name__ == "FSDPModule":
            raise CaptureError(
                f"{where} was sharded by fully_shard; autoplan shards the model itself, pass it unsharded"
            )
    if isinstance(module, torch.jit.ScriptModule):
        raise CaptureError(f"{where} is a TorchScript module: use the module it was made from")
    placed: Any = module.__dict__.get("hf_device_map") or {}
    if len(set(placed.values())) > 1:
        devices = sorted({str(device) for device in placed.values()})
        raise CaptureError(f"{where} is dispatched over devices {devices} (device_map); load it without device_map")
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is None:
            continue
        full = f"{path}.{name}" if path else name
        if isinstance(tensor, nn.UninitializedParameter | nn.UninitializedBuffer):
            raise CaptureError(f"parameter {full!r} is lazy and has no shape yet: call the model once first")
        if type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer) and not isinstance(tensor, nn.Parameter):
            raise CaptureError(f"tensor {full!r} is a {type(tensor).__name__}; expected a plain torch.Tensor")
        if type(tensor.data) not in (torch.Tensor, torch._subclasses.FakeTensor):
            raise CaptureError(
                f"parameter {full!r} holds a {type(tensor.data).__name__}; expected a plain torch.Tensor"
            )


def check_storage(model: nn.Module) -> None:
    """Refuse two different Parameter objects over the same memory: neither tied nor independent."""
    owners: dict[tuple[int, int], tuple[str, int]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.is_meta or parameter.numel() == 0 or isinstance(parameter.data, torch._subclasses.FakeTensor):
            continue
        key = parameter.untyped_storage().data_ptr(), int(parameter.storage_offset())
        first, identity = owners.setdefault(key, (name, id(parameter)))
        if identity != id(parameter):
            raise CaptureError(
                f"parameters {first!r} and {name!r} are two Parameter objects over the same memory; to tie them, "
                "assign the same Parameter to both"
            )


class Places:
    """Names the place in the user's model that a stack of frames belongs to."""

    def __init__(self, model: nn.Module) -> None:
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._kinds = {id(module): type(module).__name__ for module in model.modules()}

    def of_frames(self, frames: list[tuple[FrameType, int]]) -> str:
        """``"in module 'a.b' (Linear), model.py:17"`` for frames from outermost to innermost; "" if none is known."""
        module = line = ""
        for frame, number in frames:
            code = frame.f_code
            owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
            if id(owner) in self._paths and isinstance(owner, nn.Module):
                path = self._paths[id(owner)]
                module = (
                    f"in module {path!r} ({self._kinds[id(owner)]})"
                    if path
                    else f"in the model ({self._kinds[id(owner)]})"
                )
            file = code.co_filename
            if module and not file.startswith((_TORCH, _CAPTURE)) and not file.startswith("<"):
                line = f"{file}:{number}"
        return ", ".join(part for part in (module, line) if part)

    def here(self) -> str:
        """The place of the running call."""
        return self.of_frames([(frame, number) for frame, number in traceback.walk_stack(None)][::-1])

    def of_error(self, error: BaseException) -> str:
        """The place where an exception was raised."""
        return self.of_frames(list(traceback.walk_tb(error.__traceback__)))


def is_torch_file(path: str) -> bool:
    """Whether a code's file is torch's, or no file."""
    return path.startswith((_TORCH, "<"))


def place_of_node(module: str, stack_trace: str | None) -> str:
    """The place of an exported node: its module path and the innermost line outside torch."""
    line = ""
    for text in (stack_trace or "").splitlines():
        text = text.strip()
        if text.startswith('File "') and not text.startswith((f'File "{_TORCH}', f'File "{_CAPTURE}')):
            file, number = text.removeprefix('File "').split('", line ')
            line = f"{file}:{number.split(',')[0]}"
    return ", ".join(part for part in (f"in module {module!r}" if module else "in the model", line) if part)


@contextmanager
def guarded_functions(places: Places) -> Iterator[None]:
    """While active, a custom autograd.Function or a hook on a gradient is refused: export would drop them silently.

    Activation checkpointing (reentrant) is such a function too, but only runs another one: its region is
    traced as if it were not checkpointed.  The backward of operators registered with ``torch.library`` is one
    as well; such an operator is captured whole.
    """
    original = torch.autograd.Function.__dict__["apply"]

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if not is_capturing():  # inside a composite operator
            return original.__func__(cls, *args, **kwargs)
        if cls is torch.utils.checkpoint.CheckpointFunction:
            run, _, *rest = args
            return run(*rest)
        if cls.__module__ == "torch._library.autograd":
            return original.__func__(cls, *args, **kwargs)
        raise CaptureError(
            f"custom autograd function {cls.__module__}.{cls.__qualname__} {places.here()}: its backward cannot be "
            "captured; write it with plain torch operators, or make what calls it a composite operator with a "
            "dimension rule (autoplan.composite)"
        )

    def register_hook(tensor: torch.Tensor, hook: Any) -> Any:
        raise CaptureError(
            f"a hook on a tensor's gradient {places.here()} cannot be captured; write what it does as operators, or "
            "apply it to the gradients after the step"
        )

    hooked = torch.Tensor.register_hook
    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]
    torch.Tensor.register_hook = register_hook  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autograd.Function.apply = original  # type: ignore[method-assign]
        torch.Tensor.register_hook = hooked  # type: ignore[method-assign]


def reworded(error: BaseException, places: Places) -> CaptureError:
    """The CaptureError that says what an error during export means for the model."""
    for cause in _causes(error):
        if isinstance(cause, AutoplanError):
            return cause if isinstance(cause, CaptureError) else CaptureError(str(cause))
    cause = next((c for c in _causes(error) if type(c).__name__ in _HINTS), error)
    place = next((p for p in map(places.of_error, _causes(error)) if p), "") or "during export"
    hint = _HINTS.get(type(cause).__name__)
    summary = next((line.strip() for line in str(cause).splitlines() if line.strip()), type(cause).__name__)
    if hint is None:
        return CaptureError(f"the model cannot be captured, {place}: {type(cause).__name__}: {summary}")
    return CaptureError(f"{hint[0]} {place}: {hint[1]} ({summary})")


_BRANCH = (
    "control flow depends on the value of a tensor",
    "no branch can be chosen before the data is known; use torch.where or a mask, decide outside the model, or "
    "make the module a composite operator",
)
_SHAPE = (
    "a shape depends on the value of a tensor",
    "use a mask or torch.where instead of selecting by data (nonzero, unique, boolean indexing)",
)
_NUMBER = (
    "a number is read from a tensor",
    "what depends on it cannot be captured (item, tolist, int, float); keep it a tensor, or pass the number itself",
)
_HINTS = {
    "GuardOnDataDependentSymNode": _BRANCH,
    "DataDependentOutputException": _BRANCH,
    "UnsupportedOperatorException": ("an operator has no shape function", "register a fake implementation for it"),
    "DynamicOutputShapeException": _SHAPE,
}


def data_dependent(target: str, number: bool, place: str) -> CaptureError:
    """The error for an operator whose result is a number, or has a shape, that only the data knows."""
    what, hint = _NUMBER if number else _SHAPE
    return CaptureError(f"{what} {place}: {hint} ({target})")


def _causes(error: BaseException) -> list[BaseException]:
    """The error, and what it was raised from or during, innermost last."""
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in chain:
        chain.append(current)
        current = current.__cause__ or current.__context__
    return chain
