"""Verification: a plan and the single device, side by side on the same weights and the same batch."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autoplan.capture import Captured, capture
from autoplan.capture.structure import flatten
from autoplan.reference import SingleDevice
from autoplan.report.comparison import TOLERANCES, Comparison, Outcome, compare
from autoplan.runtime.in_process import InProcess
from autoplan.runtime.launch import WorkerPool, under_torchrun
from autoplan.runtime.parallel import Parallel
from searchspace.errors import VerificationError
from searchspace.plan import ClusterInfo, Plan, Precision

FLOAT32_INSIDE = 1e-6
"""Tolerance of a float64 model that computes in float32 inside (a normalisation, a loss)."""

RANDOM = "the model draws random numbers: its one-device plan stands for the single device"

MakeOptimizer = Callable[[Iterable[nn.Parameter], float], Optimizer]


class Trainable(Protocol):
    """What a parallel model and a single device have in common."""

    def parameters(self) -> Iterable[nn.Parameter]: ...

    def train_step(self, *args: Any, loss_args: Sequence[Any] = (), **kwargs: Any) -> Tensor: ...

    def clip_grad_norm_(self, max_norm: float) -> Tensor: ...

    def full_gradients(self) -> Mapping[str, Tensor | None]: ...

    def state_dict(self) -> Mapping[str, Any]: ...

    def buffers(self) -> Mapping[str, Tensor]: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


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

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise VerificationError(f"expected steps >= 1, got {self.steps}")
        if self.clip is not None and self.clip <= 0:
            raise VerificationError(f"expected clip > 0 or None, got {self.clip}")

    def make(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """The optimizer.

        AdamW's first step is ``learning_rate * g / (|g| + eps)``: where a gradient is zero but for rounding, as
        a key bias's, the usual eps makes a step of full length of it in float32.  With eps no smaller than
        the learning rate parameters differ by no more than clipped gradients do.
        """
        if self.optimizer is not None:
            return self.optimizer(parameters, self.learning_rate)
        chosen = list(parameters)
        exact = all(parameter.dtype == torch.float64 for parameter in chosen if parameter.numel())
        eps = 1e-8 if exact else max(1e-8, self.learning_rate)
        return torch.optim.AdamW(chosen, lr=self.learning_rate, eps=eps)


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
    batch_dims: Mapping[str, int | None] | None = None,
    precision: Precision | None = None,
    processes: bool = False,
    pool: WorkerPool | None = None,
    progress: Callable[[str, float | None], None] | None = None,
) -> Comparison:
    """Train ``model`` by ``plan`` and on one device, and compare: the loss of each step, the gradients of the first,
    parameters and buffers after the last.  For a plan of inference: the outputs.

    Without ``plan`` one is searched for ``ranks`` local devices.  All ranks run inside this process, or
    with ``processes`` (or a ``pool``) in one process each; under torchrun every rank calls this function,
    is one of them, and gets the same result.  ``tolerance`` is by default that of the computation's dtype:
    1e-9 for float64 (1e-6 where the model itself computes in float32), 1e-4 for float32, 2e-2 for the bf16
    and autocast recipes.

    The single device follows the plan's precision recipe.  A model that draws random numbers (dropout) is
    compared with its own one-device plan, which draws the same; the comparison's ``note`` says so.

    The model is not changed.  Raises VerificationError when the model has no values (meta device), and
    whatever :func:`autoplan.api.parallelize` raises.
    """
    from autoplan import api

    trial = Trial(steps, learning_rate, clip, optimizer)
    say = progress or (lambda text, share: None)
    found = plan if isinstance(plan, Plan) or plan is None else Plan.load(plan)
    options: dict[str, Any] = {"loss_fn": loss_fn, "loss_args": loss_args, "batch_dims": batch_dims}
    options["precision"] = precision or (found.recipe.precision if found is not None else "float32")
    options["mode"] = found.recipe.mode if found is not None else "train"
    say("capture", None)
    captured = capture(model, args, kwargs, **options)
    if found is None:
        say("search", None)
        found = api.search(captured, cluster=api.this_cluster(ranks))
    api.check_plan(captured.graph, found)
    say("single device", None)
    random = captured.mode == "train" and any(op.random for op in captured.graph.operators)
    if random:
        reference = outcome(_alone(captured, found), args, kwargs, trial, loss_args)
    elif captured.mode == "inference":
        reference = _outputs(SingleDevice(model, captured.precision, train=False), args, kwargs)
    else:
        options = {"loss_fn": loss_fn, "loss_args": loss_args, "precision": captured.precision}
        reference = single_device(model, args, kwargs, trial, **options)
    say(f"{found.world_size} ranks", None)
    if (processes or pool is not None) and not under_torchrun():
        task = (model, tuple(args), dict(kwargs or {}), found, trial, loss_fn, tuple(loss_args), batch_dims)
        actual = _in_processes(task, found.world_size, pool)
    else:
        actual = _outcome_of(api.parallelize(captured, plan=found), args, kwargs, trial, loss_args)
    elsewhere = reference.buffers.keys() - actual.buffers.keys()
    unused = {name: _kept(value) for name, value in model.named_buffers() if name in elsewhere}
    return compare(
        reference,
        replace(actual, buffers={**unused, **actual.buffers}),  # the parallel model leaves them as they are
        default_tolerance(captured) if tolerance is None else tolerance,
        RANDOM if random else "",
    )


def default_tolerance(captured: Captured) -> float:
    """The tolerance of the dtypes of what is differentiated (for inference, computed)."""
    if captured.precision != "float32":
        return TOLERANCES[torch.bfloat16]
    tensors = captured.graph.of_kind("activation", "parameter")
    dtypes = {t.dtype for t in tensors if t.requires_grad or captured.mode == "inference"}
    if dtypes & {"bfloat16", "float16"}:
        return TOLERANCES[torch.bfloat16]
    if "float64" not in dtypes:
        return TOLERANCES[torch.float32]
    return FLOAT32_INSIDE if "float32" in dtypes else TOLERANCES[torch.float64]


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
    return outcome(SingleDevice(model, precision, loss_fn), args, kwargs, trial, loss_args)


def outcome(
    model: Trainable,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    trial: Trial,
    loss_args: Sequence[Any] = (),
) -> Outcome:
    """Train ``model``, a :class:`Parallel` or a :class:`SingleDevice`."""
    optimizer = trial.make(model.parameters())
    losses: list[float] = []
    gradients: dict[str, Tensor] = {}
    for step in range(trial.steps):
        losses.append(model.train_step(*args, loss_args=loss_args, **(kwargs or {})).item())
        if step == 0:
            found = model.full_gradients()
            gradients = {n: _kept(g) for n, g in found.items() if g is not None and g.numel()}
        if trial.clip is not None:
            model.clip_grad_norm_(trial.clip)
        optimizer.step()
        optimizer.zero_grad()
    buffers = {name: _kept(value) for name, value in model.buffers().items()}
    state = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    return Outcome(losses, gradients, {name: _kept(value) for name, value in state.items()}, buffers)


def _outputs(model: Trainable, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Outcome:
    leaves, _ = flatten(model(*args, **(kwargs or {})))
    return Outcome((), {}, {}, {}, {path or "output": _kept(leaf) for path, leaf in leaves if isinstance(leaf, Tensor)})


def _outcome_of(
    parallel: Parallel, args: Sequence[Any], kwargs: Mapping[str, Any] | None, trial: Trial, loss_args: Sequence[Any]
) -> Outcome:
    if parallel.mode == "inference":
        return _outputs(parallel, args, kwargs)
    return outcome(parallel, args, kwargs, trial, loss_args)


def _kept(value: Tensor) -> Tensor:
    return value.detach().to("cpu", copy=True)


def _alone(captured: Captured, plan: Plan) -> Parallel:
    """The model on one rank, by the trivial plan."""
    from autoplan import api
    from autoplan.search.uniform import named_plan

    single = named_plan(captured.graph, ClusterInfo(name=plan.cluster.name, devices=1), plan.recipe)
    return Parallel(captured, api.make_programs(captured.graph, single), InProcess(1))


def _in_processes(task: tuple[Any, ...], ranks: int, pool: WorkerPool | None) -> Outcome:
    try:
        pickle.dumps(task)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise VerificationError(
            f"model, call, loss_fn and optimizer have to be sent to other processes, which fails: {error}; use "
            "functions of a module, or run all ranks in this process"
        ) from None
    if pool is not None:
        found: list[Outcome] = pool.run(_on_this_rank, *task, ranks=ranks)
        return found[0]
    with WorkerPool(ranks, timeout_seconds=600) as workers:
        return _in_processes(task, ranks, workers)


def _on_this_rank(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    plan: Plan,
    trial: Trial,
    loss_fn: Callable[..., Any] | None,
    loss_args: tuple[Any, ...],
    batch_dims: Mapping[str, int | None] | None,
) -> Outcome | None:
    """One rank's part; only rank 0 returns the outcome."""
    from autoplan import api

    options: dict[str, Any] = {"loss_fn": loss_fn, "loss_args": loss_args, "batch_dims": batch_dims}
    parallel = api.parallelize(model, args, kwargs, plan=plan, **options)
    found = _outcome_of(parallel, args, kwargs, trial, loss_args)
    return found if torch.distributed.get_rank() == 0 else None
