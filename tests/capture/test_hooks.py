"""Hooks: those in forward are traced, those on gradients refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as all_modules

from autoplan.capture import capture
from searchspace.errors import AutoplanWarning, CaptureError
from tests.capture.test_front import assert_same_as_eager

X = (torch.randn(4, 6, dtype=torch.float64),)


def square(y: torch.Tensor) -> torch.Tensor:
    return y.pow(2).mean()


def model() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh()).double()


def double(*args: Any) -> Any:
    return None


@pytest.mark.parametrize("attach", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hook_on_a_parameter_is_refused(attach: str) -> None:
    made = model()
    handle = getattr(made[0].weight, attach)(double)
    with pytest.raises(CaptureError, match=rf"parameter '0.weight' has a hook 'double' of .*\({attach}\).*remove it"):
        capture(made, X, loss_fn=square)
    capture(made, X, mode="inference")  # nothing has a gradient
    handle.remove()
    capture(made, X, loss_fn=square)


def test_hook_on_a_parametrized_original_is_refused() -> None:
    made = model()
    nn.utils.parametrizations.weight_norm(made[0])
    made[0].parametrizations.weight.original0.register_hook(double)
    with pytest.raises(CaptureError, match=r"parameter '0.parametrizations.weight.original0' has a hook"):
        capture(made, X, loss_fn=square)


@pytest.mark.parametrize(
    "attach", ["register_full_backward_hook", "register_full_backward_pre_hook", "register_backward_hook"]
)
def test_backward_hook_of_a_module_is_refused(attach: str) -> None:
    made = model()
    getattr(made[0], attach)(double)
    with pytest.raises(CaptureError, match=f"module '0' has a backward hook 'double'.*{attach}"):
        capture(made, X, loss_fn=square)


@pytest.mark.parametrize(
    "attach", [all_modules.register_module_full_backward_hook, all_modules.register_module_full_backward_pre_hook]
)
def test_backward_hook_of_all_modules_is_refused(attach: Callable[..., Any]) -> None:
    handle = attach(double)
    try:
        with pytest.raises(CaptureError, match=f"all modules have a backward hook 'double'.*{attach.__name__}"):
            capture(model(), X, loss_fn=square)
    finally:
        handle.remove()


def test_forward_hooks_are_traced() -> None:
    made = model()
    made.register_forward_hook(lambda module, args, output: output * 3)
    made[0].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    everywhere = all_modules.register_module_forward_hook(
        lambda module, args, output: output.sin() if isinstance(module, nn.Tanh) else None
    )
    try:
        assert_same_as_eager(capture(made, X, loss_fn=square), made, X, {}, square)
    finally:
        everywhere.remove()


def test_hooks_of_state_dicts_do_not_matter() -> None:
    made = model()
    made.register_state_dict_post_hook(double)
    made.register_load_state_dict_pre_hook(double)
    assert_same_as_eager(capture(made, X, loss_fn=square), made, X, {}, square)


class Scaled(nn.Parameter):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


def test_parameter_with_its_own_torch_function_is_refused() -> None:
    made = model()
    made[0].weight = Scaled(torch.zeros(6, 6))
    with pytest.raises(CaptureError, match=r"'0.weight' is a Scaled, whose __torch_function__ changes"):
        capture(made, X, loss_fn=square)


def test_gradients_that_parameters_hold_are_named() -> None:
    made = model()
    square(made(*X)).backward()
    with pytest.warns(AutoplanWarning, match=r"parameter '0.weight' \(and 1 more\) already holds a gradient"):
        capture(made, X, loss_fn=square)
    capture(made, X, mode="inference")


class Reaches(nn.Module):
    def __init__(self, action: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 6).double()
        self.action = action

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.lin(x)
        self.action(self, y)
        return y.pow(2).mean()


def freeze(model: Any, y: torch.Tensor) -> None:
    model.lin.requires_grad_(False)


def freeze_attribute(model: Any, y: torch.Tensor) -> None:
    model.lin.weight.requires_grad = False


def hook_node(model: Any, y: torch.Tensor) -> None:
    y.grad_fn.register_hook(double)  # type: ignore[union-attr]


def hook_saved(model: Any, y: torch.Tensor) -> None:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        y.sin()


def assign_data(model: Any, y: torch.Tensor) -> None:
    model.lin.weight.data = model.lin.weight * 2


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (freeze, "sets requires_grad of the parameter 'lin.weight' to False"),
        (freeze_attribute, "sets requires_grad of the parameter 'lin.weight' to False"),
        (hook_node, "reads grad_fn of a tensor"),
        (hook_saved, "hooks on saved tensors"),
        (assign_data, "assigns .data of a tensor"),
    ],
)
def test_reaching_into_autograd_is_refused(action: Callable[[Any, torch.Tensor], Any], message: str) -> None:
    line = action.__code__.co_firstlineno + 1
    with pytest.raises(CaptureError, match=rf"{message}.*test_hooks.py:{line}"):
        capture(Reaches(action), X)
    x = torch.ones(2, requires_grad=True)  # torch is as before
    assert "requires_grad" not in torch.Tensor.__dict__ and (x * 2).grad_fn is not None


def test_retained_gradients_are_warned_of() -> None:
    made = Reaches(lambda model, y: y.retain_grad())
    with pytest.warns(AutoplanWarning, match="retain_grad in the model.*keeps no gradients of activations"):
        captured = capture(made, X)
    assert_same_as_eager(captured, made, X, {})


def test_offloading_saved_tensors_changes_nothing() -> None:
    class Offloads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(6, 6).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autograd.graph.save_on_cpu():
                return self.lin(x).pow(2).mean()

    made = Offloads()
    assert_same_as_eager(capture(made, X), made, X, {})


def test_inputs_that_require_a_gradient_are_warned_of() -> None:
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    with pytest.warns(AutoplanWarning, match=r"input of shape \(4, 6\) requires a gradient: .* of parameters only"):
        capture(model(), (x,), loss_fn=square)
    capture(model(), (x,), mode="inference")
