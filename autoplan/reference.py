"""The single device: a copy of the user's model, trained or run in plain PyTorch under a plan's recipe.

It has the face of :class:`autoplan.runtime.parallel.Parallel`, as far as a comparison needs it.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from autoplan.capture.export import own_loss
from searchspace.errors import VerificationError
from searchspace.plan import Precision


class SingleDevice:
    """A deep copy of ``model``, called once on the whole batch.

    ``precision`` is the recipe: ``"float32"`` computes in the model's own dtypes; ``"bf16"`` computes with
    bfloat16 parameters and inputs, the optimizer steps on float32 master weights; ``"autocast"`` runs
    forward and loss under ``torch.autocast`` with bfloat16.
    """

    def __init__(
        self,
        model: nn.Module,
        precision: Precision = "float32",
        loss_fn: Callable[..., Any] | None = None,
        train: bool = True,
    ) -> None:
        meta = next((name for name, value in model.state_dict(keep_vars=True).items() if _is_meta(value)), None)
        if meta is not None:
            raise VerificationError(f"the single device needs values: {meta} is on the meta device")
        self.model = copy.deepcopy(model)
        _copy_hooks(model, self.model)
        if not train:
            self.model.eval()
        self.precision = precision
        self._loss_fn = loss_fn
        self._device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        self._masters = dict(self.model.named_parameters())
        if precision == "bf16":
            self._masters = {name: _master(p) for name, p in self._masters.items()}
            for parameter in self.model.parameters():
                if parameter.is_floating_point():
                    parameter.data = parameter.data.bfloat16()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What the optimizer steps on; tied parameters once."""
        yield from self._masters.items()

    def parameters(self) -> Iterator[nn.Parameter]:
        yield from self._masters.values()

    def train_step(self, *args: Any, loss_args: Sequence[Any] = (), **kwargs: Any) -> Tensor:
        """Forward and backward; gradients are added to ``.grad`` of the parameters."""
        self._lower()
        with self._context():
            output = self._call(args, kwargs)
            loss = self._loss_fn(output, *loss_args) if self._loss_fn is not None else own_loss(output)
        loss.backward()
        self._raise_gradients()
        return loss.detach()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The output, without gradient."""
        self._lower()
        with torch.no_grad(), self._context():
            return self._call(args, kwargs)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        return nn.utils.clip_grad_norm_(self.parameters(), max_norm)

    def full_gradients(self) -> dict[str, Tensor | None]:
        return {name: parameter.grad for name, parameter in self.named_parameters()}

    def state_dict(self) -> dict[str, Any]:
        """The model's, with master weights where there are some; tied parameters under each of their names."""
        names: dict[int, Tensor] = {id(p): self._masters[name] for name, p in self.model.named_parameters()}
        state = self.model.state_dict(keep_vars=True)
        return {name: names.get(id(value), value) for name, value in state.items()}

    def buffers(self) -> Mapping[str, Tensor]:
        return dict(self.model.named_buffers())

    def _call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if self.precision == "bf16":
            args, kwargs = tree_map(_to_bf16, (tuple(args), dict(kwargs)))
        return self.model(*args, **kwargs)

    def _context(self) -> contextlib.AbstractContextManager[Any]:
        if self.precision == "autocast":
            return torch.autocast(self._device.type, dtype=torch.bfloat16, cache_enabled=False)
        return contextlib.nullcontext()

    def _lower(self) -> None:
        """The weights of the computation from the masters."""
        if self.precision == "bf16":
            with torch.no_grad():
                for name, parameter in self.model.named_parameters():
                    parameter.copy_(self._masters[name])

    def _raise_gradients(self) -> None:
        """The masters' gradients from those of the computation."""
        if self.precision != "bf16":
            return
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                master = self._masters[name]
                wide = parameter.grad.to(master.dtype)
                master.grad = wide if master.grad is None else master.grad + wide
                parameter.grad = None


def _copy_hooks(model: nn.Module, copied: nn.Module) -> None:
    """Hooks on parameters' gradients, which a deep copy loses."""
    for (_, parameter), (_, other) in zip(model.named_parameters(), copied.named_parameters(), strict=True):
        for hook in (parameter._backward_hooks or {}).values():
            other.register_hook(hook)
        for hook in (parameter._post_accumulate_grad_hooks or {}).values():
            other.register_post_accumulate_grad_hook(hook)


def _master(parameter: nn.Parameter) -> nn.Parameter:
    dtype = torch.float32 if parameter.is_floating_point() else parameter.dtype
    return nn.Parameter(parameter.detach().to(dtype, copy=True), requires_grad=parameter.requires_grad)


def _to_bf16(value: Any) -> Any:
    return value.bfloat16() if isinstance(value, Tensor) and value.is_floating_point() else value


def _is_meta(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_meta
