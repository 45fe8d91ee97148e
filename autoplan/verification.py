"""Verification: a plan and the single device, on the same weights and batch, step by step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from autoplan.api import parallelize, search, this_cluster
from autoplan.capture import Captured, capture
from autoplan.report.comparison import TOLERANCES, Comparison, Outcome, compare
from autoplan.runtime.launch import WorkerPool, under_torchrun
from autoplan.runtime.parallel import Parallel
from searchspace.errors import VerificationError
from searchspace.plan import Plan, Precision

FLOAT32_INSIDE = 1e-6
"""Tolerance of a float64 model that computes in float32 inside (a normalisation, a loss)."""

MakeOptimizer = Callable[[Iterable[nn.Parameter], float], torch.optim.Optimizer]


@dataclass(frozen=True)
class Trial:
    """What both sides do.

    Fields
        steps: optimizer steps, each on the same batch.
        learning_rate: of the optimizer.
        clip: largest global gradient norm, or None for no clipping.
        optimizer: makes the optimizer from parameters and learning rate; default AdamW.
    """

    steps: int = 3
    learning_rate: float = 1e-3
    clip: float | None = 1.0
    optimizer: MakeOptimizer | None = None

    def make(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        if self.optimizer is not None:
            return self.optimizer(parameters, self.learning_rate)
        return torch.optim.AdamW(parameters, lr=self.learning_rate)


def verify(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    plan: Plan | str | PathLike[str] | None = None,
    ranks: int | None = None,
    steps: int = 3,
    learning_rate: float = 1e-3,
    clip: float | None = 1.0,
    optimizer: MakeOptimizer | None = None,
    tolerance: float | None = None,
    loss_fn: Callable[..., Any] | None = None,
    loss_args: Sequence[Any] = (),
    precision: Precision | None = None,
    processes: bool = False,
    pool: WorkerPool | None = None,
    progress: Callable[[str, float | None], None] | None = None,
) -> Comparison:
    """Train ``model`` by ``plan`` and on one device, and compare loss, gradients, parameters and buffers.

    Without ``plan`` one is searched for ``ranks`` local devices.  All ranks run inside this process, or
    with ``processes`` (or a ``pool``) in one process each.  ``tolerance`` is by default that of the
    computation's dtype: 1e-9 for float64 (1e-6 where the model itself computes in float32), 1e-4 for
    float32, 2e-2 for the bf16 and autocast recipes.

    The model is not changed.  Raises VerificationError when the model has no values (meta device).
    """
    say = progress or (lambda text, share: None)
    if any(value.is_meta for value in (*model.parameters(), *model.buffers())):
        raise VerificationError("the model is on the meta device; verification needs its values")
    found = plan if isinstance(plan, Plan) or plan is None else Plan.load(plan)
    recipe = precision or (found.recipe.precision if found is not None else "float32")
    say("capture", None)
    captured = capture(model, args, kwargs, loss_fn=loss_fn, loss_args=loss_args, precision=recipe)
    if found is None:
        say("search", None)
        found = search(captured, cluster=this_cluster(ranks))
    trial = Trial(steps, learning_rate, clip, optimizer)
    say("single device", None)
    reference = single_device(model, args, kwargs, trial, loss_fn=loss_fn, loss_args=loss_args, precision=recipe)
    say(f"{found.world_size} ranks", None)
    call = (model, tuple(args), dict(kwargs or {}), found, trial, loss_fn, tuple(loss_args))
    if pool is not None:
        actual = pool.run(_on_rank, *call)[0]
    elif processes and not under_torchrun():
        with WorkerPool(found.world_size) as workers:
            actual = workers.run(_on_rank, *call)[0]
    else:
        actual = outcome(parallelize(captured, plan=found), args, kwargs, trial, loss_args)
    return compare(reference, actual, default_tolerance(captured) if tolerance is None else tolerance)


def default_tolerance(captured: Captured) -> float:
    """The tolerance of the dtype in which a model computes."""
    if captured.precision != "float32":
        return TOLERANCES[torch.bfloat16]
    dtypes = {t.dtype for t in captured.graph.tensors if t.dtype in ("float64", "float32", "bfloat16", "float16")}
    if dtypes & {"bfloat16", "float16"}:
        return TOLERANCES[torch.bfloat16]
    if "float64" not in dtypes:
        return TOLERANCES[torch.float32]
    return FLOAT32_INSIDE if "float32" in dtypes else TOLERANCES[torch.float64]


def outcome(
    parallel: Parallel, args: Sequence[Any], kwargs: Mapping[str, Any] | None, trial: Trial, loss_args: Sequence[Any]
) -> Outcome:
    """Train with ``parallel``."""
    optimizer = trial.make(parallel.parameters())
    losses, gradients = [], {}
    for step in range(trial.steps):
        losses.append(float(parallel.train_step(*args, loss_args=loss_args, **(kwargs or {}))))
        if step == 0:
            gradients = {n: g for n, g in parallel.full_gradients().items() if g is not None}
        if trial.clip is not None:
            parallel.clip_grad_norm_(trial.clip)
        optimizer.step()
        optimizer.zero_grad()
    return _outcome(losses, gradients, parallel.state_dict())


def single_device(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    trial: Trial,
    *,
    loss_fn: Callable[..., Any] | None = None,
    loss_args: Sequence[Any] = (),
    precision: Precision = "float32",
) -> Outcome:
    """Train a copy of ``model`` on the whole batch, as anybody would on one device, under the same recipe."""
    worker = copy.deepcopy(model)
    masters = {name: p for name, p in worker.named_parameters() if p.requires_grad}
    if precision == "bf16":
        for p in worker.parameters():
            p.data = p.data.bfloat16() if p.is_floating_point() else p.data
        masters = {n: nn.Parameter(p.detach().float()) for n, p in model.named_parameters() if p.requires_grad}
        args, kwargs, loss_args = tree_map(_bfloat16, (tuple(args), dict(kwargs or {}), tuple(loss_args)))
    optimizer = trial.make(masters.values())
    device = next(iter(masters.values())).device.type
    losses, gradients = [], {}
    for step in range(trial.steps):
        cast = torch.autocast(device, torch.bfloat16) if precision == "autocast" else nullcontext()
        with cast:
            output = worker(*args, **(kwargs or {}))
            loss = loss_of(output, loss_fn, loss_args)
        loss.backward()
        losses.append(float(loss.detach()))
        for name, p in worker.named_parameters():
            if precision == "bf16" and name in masters:
                masters[name].grad = None if p.grad is None else p.grad.float()
        if step == 0:
            gradients = {n: p.grad.detach().clone() for n, p in masters.items() if p.grad is not None}
        if trial.clip is not None:
            torch.nn.utils.clip_grad_norm_(masters.values(), trial.clip)
        optimizer.step()
        optimizer.zero_grad()
        if precision == "bf16":
            with torch.no_grad():
                for name, p in worker.named_parameters():
                    p.grad = None
                    if name in masters:
                        p.copy_(masters[name])
    state = dict(worker.state_dict())
    # Tied names share a master: every alias has its value.
    for name, p in worker.named_parameters(remove_duplicate=False):
        owner = next((n for n, q in worker.named_parameters() if q is p), name)
        state[name] = masters[owner].detach() if owner in masters else p.detach()
    return _outcome(losses, gradients, state)


def loss_of(output: Any, loss_fn: Callable[..., Any] | None, loss_args: Sequence[Any]) -> torch.Tensor:
    """The loss in a model's output, by the rule that :func:`autoplan.capture.capture` follows."""
    if loss_fn is not None:
        return loss_fn(output, *loss_args)
    if isinstance(output, torch.Tensor):
        return output
    return output["loss"] if isinstance(output, Mapping) else output.loss


def _on_rank(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    plan: Plan,
    trial: Trial,
    loss_fn: Callable[..., Any] | None,
    loss_args: tuple[Any, ...],
) -> Outcome | None:
    """One rank's part; only rank 0 returns the outcome."""
    parallel = parallelize(model, args, kwargs, plan=plan, loss_fn=loss_fn, loss_args=loss_args)
    found = outcome(parallel, args, kwargs, trial, loss_args)
    return found if torch.distributed.get_rank() == 0 else None


def _outcome(losses: Sequence[float], gradients: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> Outcome:
    tensors = {n: v.detach() for n, v in state.items() if isinstance(v, torch.Tensor)}
    return Outcome(losses, gradients, tensors, {})


def _bfloat16(value: Any) -> Any:
    floating = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.bfloat16() if floating else value
