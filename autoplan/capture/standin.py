"""Stand-ins: a model's tensors are replaced by fake ones while it is traced, and put back afterwards.

Nothing is copied and no weight is allocated; the model may be real or on ``meta``.  Whatever its forward
leaves behind in the modules (attributes, appended lists, changed flags) is undone as well.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode


@dataclass
class Registered:
    """A parameter or buffer of the model with all names under which it is registered."""

    names: list[str]
    tensor: torch.Tensor


@dataclass
class Inventory:
    """A model's distinct parameters and buffers in the order of their first names."""

    parameters: list[Registered] = field(default_factory=list)
    buffers: list[Registered] = field(default_factory=list)

    @classmethod
    def of(cls, model: nn.Module) -> Inventory:
        def distinct(named: Iterator[tuple[str, torch.Tensor]]) -> list[Registered]:
            found: dict[int, Registered] = {}
            for name, tensor in named:
                found.setdefault(id(tensor), Registered([], tensor)).names.append(name)
            return list(found.values())

        return cls(
            distinct(model.named_parameters(remove_duplicate=False)),
            distinct(model.named_buffers(remove_duplicate=False)),
        )


def device_type(model: nn.Module, inputs: list[torch.Tensor]) -> str:
    """The type of device that model and inputs are on; ``cpu`` where they are on ``meta``."""
    for tensor in (*model.parameters(), *model.buffers(), *inputs):
        if tensor.device.type != "meta":
            return tensor.device.type
    return "cpu"


@contextmanager
def stand_ins(model: nn.Module, mode: FakeTensorMode, device: str, floating: torch.dtype | None) -> Iterator[None]:
    """While active, the model's tensors are fake ones of ``mode`` on ``device``.

    ``floating`` is the dtype of floating-point parameters, by default their own.  Plain tensor attributes
    stay what they are (they become constants), except those on ``meta``, which have no data to keep.
    """
    saved = [SavedModule(module) for module in model.modules()]
    made: dict[int, torch.Tensor] = {}
    try:
        with mode:
            for parameter in model.parameters():
                dtype = floating if floating is not None and parameter.is_floating_point() else parameter.dtype
                fake = nn.Parameter(
                    torch.empty(parameter.shape, dtype=dtype, device=device), requires_grad=parameter.requires_grad
                )
                fake.__dict__.update(parameter.__dict__)
                made[id(parameter)] = fake
            for buffer in model.buffers():
                made[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
            for module in model.modules():
                for name, value in list(module.__dict__.items()):
                    module.__dict__[name] = _replaced(value, made, device)
        yield
    finally:
        for state in saved:
            state.restore()


def _replaced(value: Any, made: dict[int, torch.Tensor], device: str, depth: int = 3) -> Any:
    """``value`` with stand-ins for known tensors and tensors on meta, inside plain containers too."""
    if isinstance(value, torch.Tensor):
        if id(value) not in made and value.is_meta:
            made[id(value)] = torch.empty(value.shape, dtype=value.dtype, device=device)
        return made.get(id(value), value)
    if depth and type(value) in (list, tuple):
        return type(value)(_replaced(item, made, device, depth - 1) for item in value)
    if depth and type(value) in (dict, OrderedDict):
        items = {key: _replaced(item, made, device, depth - 1) for key, item in value.items()}
        return type(value)(items)
    return value


class SavedModule:
    """The state of one module: its attributes, and the contents of plain containers among them."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.attributes = dict(module.__dict__)
        self.contents = [
            (value, value.copy()) for value in self.attributes.values() if isinstance(value, dict | list | set)
        ]

    def restore(self) -> None:
        for container, content in self.contents:
            container.clear()
            if isinstance(container, list):
                container.extend(content)
            else:
                container.update(content)
        self.module.__dict__.clear()
        self.module.__dict__.update(self.attributes)
