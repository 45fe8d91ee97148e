"""``autoplan.verify``: a plan and the single device, side by side on the same weights and the same batch."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autoplan.capture import Captured, capture
from autoplan.capture.structure import flatten
from autoplan.reference import SingleDevice
from autoplan.report.comparison import TOLERANCES, Comparison, Outcome, compare
from autoplan.runtime.in_process import InProcess
from autoplan.runtime.launch import join, spawn, under_torchrun
from autoplan.runtime.parallel import Parallel
from autoplan.runtime.transport import Transport
from searchspace.errors import VerificationError
from searchspace.plan import ClusterInfo, Plan

Runtime = Literal["in-process", "processes"]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]
ShowProgress = Callable[[str, float | None], None]


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
        steps: optimizer steps, all on the same batch.
        clip: the largest norm of the gradients, or None.
        optimizer: makes the optimizer of given parameters; default: AdamW with ``learning_rate``.
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

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """AdamW's first step is ``learning_rate * g / (|g| + eps)``: where a gradient is zero but for rounding,
        as a key bias's, the usual eps makes noise a step of full length.  With eps no smaller than the
        learning rate, parameters differ by no more than clipped gradients do."""
        if self.optimizer is not None:
            return self.optimizer(parameters)
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
    loss_fn: Callable[..., Any] | None = None,
    loss_args: Sequence[Any] = (),
    batch_dims: Mapping[str, int | None] | None = None,
    steps: int = 3,
    learning_rate: float = 1e-3,
    clip: float | None = 1.0,
    optimizer: MakeOptimizer | None = None,
    tolerance: float | None = None,
    runtime: Runtime = "in-process",
    progress: ShowProgress | None = None,
) -> Comparison:
    """Train ``model`` by ``plan`` and on a single device, and compare: each step's loss, the first step's
    gradients, the last step's parameters and buffers; for a plan of inference the outputs.

    Parameters
        plan: a plan, a file of one, or None: one is searched for ``ranks`` devices of this machine.
        loss_fn, loss_args, batch_dims: as in :func:`autoplan.parallelize`.
        steps, learning_rate, clip, optimizer: see :class:`Trial`.
        tolerance: allowed difference relative to each tensor's scale (:mod:`autoplan.report.comparison`);
            default: by the dtype of the computation.
        runtime: ``"in-process"`` runs all ranks in this process, ``"processes"`` starts them; under
            ``torchrun`` each rank calls this function, is one of them, and gets the same result.

    The single device follows the plan's precision recipe.  A model that draws random numbers is compared
    with its own one-device plan, which draws the same; the comparison's ``note`` says so.

    Raises VerificationError where nothing can be compared, and whatever capture and plan raise.
    """
    from autoplan import api

    if runtime not in ("in-process", "processes"):
        raise VerificationError(f'expected runtime to be "in-process" or "processes", got {runtime!r}')
    trial = Trial(steps, learning_rate, clip, optimizer)
    report = progress or (lambda text, share: None)
    found = plan if isinstance(plan, Plan) or plan is None else Plan.load(plan)
    report("capture", None)
    options: dict[str, Any] = {"loss_fn": loss_fn, "loss_args": loss_args, "batch_dims": batch_dims}
    if found is not None:
        options |= {"mode": found.recipe.mode, "precision": found.recipe.precision}
    captured = capture(model, args, kwargs, **options)
    if found is None:
        report("search", None)
        found = api.search(captured, cluster=api.this_cluster(ranks))
    api.check_plan(captured.graph, found)

    names = tuple(name for name, _ in model.named_parameters())
    call = _Call(tuple(args), dict(kwargs or {}), tuple(loss_args), trial, names)
    report("single device", None)
    random = found.recipe.mode == "train" and any(op.random for op in captured.graph.operators)
    if random:
        reference = call.outcome(_on(InProcess(1), captured, _alone(captured, found)))
    else:
        single = SingleDevice(model, found.recipe.precision, loss_fn, train=found.recipe.mode == "train")
        reference = call.outcome(single, captured.mode)
    report(f"{found.world_size} ranks", None)
    if under_torchrun():
        actual = call.outcome(_on(join(), captured, found))
    elif runtime == "processes":
        actual = _in_processes(model, found, options, call)
    else:
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        actual = call.outcome(_on(InProcess(found.world_size, device), captured, found))
    note = "the model draws random numbers: its one-device plan stands for the single device" if random else ""
    used = {name: value for name, value in reference.buffers.items() if name in actual.buffers}
    reference = Outcome(reference.losses, reference.gradients, reference.parameters, used, reference.outputs)
    return compare(reference, actual, default_tolerance(captured) if tolerance is None else tolerance, note)


def default_tolerance(captured: Captured) -> float:
    """By the dtypes of what is differentiated (for inference, computed): 1e-9 for float64, 1e-6 for float64 that
    passes through float32, and ``TOLERANCES`` of the narrowest otherwise."""
    differentiated = captured.mode == "train"
    names = {
        tensor.dtype
        for tensor in captured.graph.of_kind("activation", "parameter")
        if tensor.requires_grad or not differentiated
    }
    found = [dtype for dtype in TOLERANCES if str(dtype).removeprefix("torch.") in names]
    if "float16" in names:
        found.append(torch.bfloat16)
    if not found:
        return TOLERANCES[torch.float32]
    if torch.float64 in found and torch.float32 in found and torch.bfloat16 not in found:
        return 1e-6
    return max(TOLERANCES[dtype] for dtype in found)


@dataclass(frozen=True)
class _Call:
    """One call and what is done with it, on either side; ``parameters`` are the names that are compared."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss_args: tuple[Any, ...]
    trial: Trial
    parameters: tuple[str, ...]

    def outcome(self, model: Trainable, mode: str | None = None) -> Outcome:
        if (mode or _mode(model)) == "inference":
            leaves, _ = flatten(model(*self.args, **self.kwargs))
            outputs = {path or "output": _kept(leaf) for path, leaf in leaves if isinstance(leaf, Tensor)}
            return Outcome((), {}, {}, {}, outputs)
        optimizer = self.trial.make_optimizer(model.parameters())
        losses: list[float] = []
        gradients: dict[str, Tensor] = {}
        for step in range(self.trial.steps):
            losses.append(model.train_step(*self.args, loss_args=self.loss_args, **self.kwargs).item())
            if step == 0:
                gradients = {name: _kept(value) for name, value in model.full_gradients().items() if value is not None}
            if self.trial.clip is not None:
                model.clip_grad_norm_(self.trial.clip)
            optimizer.step()
            optimizer.zero_grad()
        state = model.state_dict()
        parameters = {name: _kept(state[name]) for name in self.parameters}
        return Outcome(losses, gradients, parameters, {name: _kept(value) for name, value in model.buffers().items()})


def _kept(value: Tensor) -> Tensor:
    return value.detach().to("cpu", copy=True)


def _mode(model: Trainable) -> str:
    return model.mode if isinstance(model, Parallel) else "train"


def _on(transport: Transport, captured: Captured, plan: Plan) -> Parallel:
    from autoplan import api

    return Parallel(captured, api.make_programs(captured.graph, plan), transport)


def _alone(captured: Captured, plan: Plan) -> Plan:
    from autoplan.search.uniform import named_plan

    return named_plan(captured.graph, ClusterInfo(name=plan.cluster.name, devices=1), plan.recipe)


def _in_processes(model: nn.Module, plan: Plan, options: dict[str, Any], call: _Call) -> Outcome:
    task = (copy.deepcopy(model).cpu(), plan.to_json(), options, call)
    try:
        pickle.dumps(task)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise VerificationError(
            f'runtime="processes" sends model, inputs, loss_fn and optimizer to other processes, which fails: {error}; '
            'use functions of a module, or runtime="in-process"'
        ) from None
    results: list[Outcome] = spawn(_on_this_rank, plan.world_size, *task)
    return results[0]


def _on_this_rank(model: nn.Module, plan: str, options: dict[str, Any], call: _Call) -> Outcome | None:
    transport = join()
    captured = capture(model, call.args, call.kwargs, **options)
    found = call.outcome(_on(transport, captured, Plan.from_json(plan)))
    return found if transport.rank == 0 else None
