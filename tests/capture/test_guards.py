"""What cannot be captured is refused by name: module, line, and what to do."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autoplan.capture import capture
from searchspace.errors import CaptureError

X = (torch.ones(4, 4),)


def refuse(model: Any, *parts: str, args: tuple[Any, ...] = X, **options: Any) -> None:
    """Assert that capture fails and the message holds all ``parts``."""
    with pytest.raises(CaptureError) as error:
        capture(model, args, **options)
    for part in parts:
        assert part in str(error.value), (part, str(error.value))


class DistributedDataParallel(nn.Module):
    """Stands for torch's, which wants a process group."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def test_what_is_no_module() -> None:
    refuse(None, "got None; did the function that builds the model return it?")
    refuse(nn.Linear, "got the class Linear: call it first")
    refuse(nn.Linear(2, 2).state_dict(), "OrderedDict with 2 entries", "load_state_dict")
    refuse(lambda x: x, "expected a torch.nn.Module, got function: put it into the forward")
    refuse(3, "expected a torch.nn.Module, got int")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_module() -> None:
    refuse(torch.jit.script(nn.Linear(4, 4)), "TorchScript", "pass the module it was made from")


def test_wrapped_modules() -> None:
    refuse(
        DistributedDataParallel(nn.Linear(4, 4)), "wrapped in DistributedDataParallel", "unwrap it first: model.module"
    )
    inside = nn.Sequential(nn.Linear(4, 4), DistributedDataParallel(nn.Linear(4, 4)))
    refuse(inside, "module '1' is wrapped in DistributedDataParallel")
    refuse(nn.DataParallel(nn.Linear(4, 4)), "wrapped in DataParallel")
    refuse(torch.compile(nn.Linear(4, 4)), "wrapped in OptimizedModule", "model._orig_mod")


def test_model_over_several_devices() -> None:
    model = nn.Linear(4, 4)
    model.hf_device_map = {"a": 0, "b": "cpu"}  # type: ignore[assignment]
    refuse(model, "dispatched over devices ['0', 'cpu']", "without device_map")


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_lazy_parameters() -> None:
    refuse(nn.Sequential(nn.LazyLinear(3)), "'0.weight' is lazy", "call the model once first")


def test_parameters_over_the_same_memory() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = nn.Parameter(model[0].weight.data)
    refuse(model, "'0.weight' and '1.weight' are two Parameter objects over the same memory")


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.lin(x)
        if y.sum() > 0:
            return y.mean()
        return y.sum()


def test_tensor_dependent_branch() -> None:
    line = Branch.forward.__code__.co_firstlineno + 2
    refuse(
        nn.Sequential(nn.Linear(4, 4), Branch()),
        "control flow depends on the value of a tensor in module '1' (Branch)",
        f"{__file__}:{line}",
        "torch.where",
    )


class Selects(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x)[x > 0].mean()


def test_data_dependent_shape() -> None:
    line = Selects.forward.__code__.co_firstlineno + 1
    refuse(nn.Sequential(Selects()), "a shape depends on the value of a tensor", "module '0'", f"{__file__}:{line}")


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0] * 3 * ctx.saved_tensors[0] ** 2


class Cube(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Cube.apply(x)  # type: ignore[no-untyped-call,no-any-return]


def test_custom_autograd_function() -> None:
    original = torch.autograd.Function.apply
    line = Cube.forward.__code__.co_firstlineno + 1
    model = nn.Sequential(nn.Linear(4, 4), Cube())
    refuse(
        model, "custom autograd function", "_Cube", "in module '1' (Cube)", f"{__file__}:{line}", "composite operator"
    )
    assert torch.autograd.Function.apply == original
    x = torch.ones(2, requires_grad=True)
    _Cube.apply(x).sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None


class Hooked(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        y = super().forward(input)
        y.register_hook(lambda gradient: gradient * 2)
        return y


def test_hook_on_a_gradient() -> None:
    original = torch.Tensor.register_hook
    line = Hooked.forward.__code__.co_firstlineno + 2
    refuse(nn.Sequential(Hooked(4, 4)), "a hook on a tensor's gradient", "in module '0'", f"{__file__}:{line}")
    assert torch.Tensor.register_hook is original


def test_no_loss() -> None:
    refuse(nn.Linear(4, 4), "no loss found", "a tensor of shape (4, 4)", "loss_fn=", 'mode="inference"')
    refuse(nn.Linear(4, 4), "expected the loss to be a scalar tensor, got dict", loss_fn=lambda y: {"loss": y})
    refuse(nn.Linear(4, 4), "float32 of shape (4,)", "reduce it", loss_fn=lambda y: y.sum(0))
    refuse(nn.Linear(4, 4), "torch.int64 of shape ()", loss_fn=lambda y: y.argmax())


def test_a_failing_model_names_the_place() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(5, 4))
    refuse(model, "the model cannot be captured, in module '1' (Linear)", loss_fn=lambda y: y.mean())


class Writes(nn.Module):
    """Does one forbidden write, chosen by name."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.lin, self.how, self.plain = nn.Linear(4, 4), how, torch.zeros(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.lin(x)
        if self.how == "parameter":
            with torch.no_grad():
                self.lin.weight.mul_(0.5)
        elif self.how == "attribute":
            self.plain.add_(1)
        elif self.how == "no_grad":
            with torch.no_grad():
                y.clamp_(max=1)
        elif self.how == "detached":
            y.detach().mul_(2)
        elif self.how == "strided":
            torch.as_strided(y, (2, 2), (1, 1)).zero_()
        elif self.how == "resize":
            y.unsqueeze_(0)
        return y.mean()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("parameter", "parameter 'lin.weight' in place; update it outside the model"),
        ("attribute", "tensor attribute 'plain' in place; register it with register_buffer"),
        ("no_grad", "changes a tensor that has a gradient where gradients are off"),
        ("detached", "detached tensor changes the one that has a gradient; clone it first"),
        ("strided", "through a view made by aten.as_strided.default"),
        ("resize", "aten.unsqueeze_.default changes the shape (4, 4) to (1, 4, 4) in place"),
    ],
)
def test_writes_that_cannot_be_kept(how: str, message: str) -> None:
    refuse(Writes(how), message)


def test_writes_name_module_and_line() -> None:
    first = Writes.forward.__code__.co_firstlineno
    with pytest.raises(CaptureError, match=re.escape(f"(in module '0', {__file__}:{first + 9})")):
        capture(nn.Sequential(Writes("no_grad")), X)


def test_control_flow_operators() -> None:
    class Cond(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.lin(x)
            return torch.cond(x.sum() > 0, lambda t: t.sin(), lambda t: t.cos(), (y,)).mean()  # type: ignore[no-any-return]

    refuse(Cond(), "cond", "cannot be captured")


def test_transforms() -> None:
    class Mapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.vmap(self.lin)(x).mean()  # type: ignore[no-any-return]

    refuse(Mapped(), "transforms (torch.vmap, torch.func) are not supported")


def test_numbers_read_from_tensors() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.lin(x).mean() * x.sum().item()

    refuse(Reads(), "a number is read from a tensor in the model", "keep it a tensor")


def test_unregistered_parameters() -> None:
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.weights = nn.Linear(4, 4), [nn.Parameter(torch.ones(4))]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.lin(x) * self.weights[0]).mean()

    refuse(nn.Sequential(Hidden()), "attribute 'weights' of module '0' holds a trained tensor", "nn.ParameterList")


def test_unused_numbers_from_data_are_harmless() -> None:
    class Logs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.sum().item()
            return F.relu(self.lin(x)).mean()

    assert len(capture(Logs(), X).graph.operators) == 3


def test_error_leaves_the_model_as_it_was() -> None:
    model = Branch()
    weight = model.lin.weight
    refuse(model, "control flow")
    assert model.lin.weight is weight
    assert isinstance(model(X[0]), torch.Tensor)
