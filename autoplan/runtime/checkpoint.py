"""Checkpoints in the single-device model's own names and shapes.

``torch.distributed.checkpoint.load({"model": model.state_dict()}, checkpoint_id=path)`` reads what
:func:`save` writes, and so does any plan at any world size.  A checkpoint holds

- ``model.<name>``: parameters and persistent buffers, tied ones under each of their names;
- ``optimizer.state.<parameter>.<key>`` and ``optimizer.param_groups.<i>.<key>``;
- ``scheduler``, ``extra``: state dicts as they are;
- ``rng.<process>``: the states of torch's random number generators;
- ``autoplan.<key>``: step, seed of the random operators, and the plan for information.

Every process takes part in :func:`save` and :func:`load`; if one fails, all fail.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException, Metadata, TensorStorageMetadata
from torch.optim import Optimizer

from autoplan.runtime.checkpoint_files import AtomicWriter, ExaminedReader, draft_of, examine
from autoplan.runtime.checkpoint_holding import Holding, single_device
from autoplan.runtime.checkpoint_optimizer import OptimizerParts, OptimizerReading, take_apart
from autoplan.runtime.checkpoint_planner import Request, Shard, ShardLoadPlanner, ShardSavePlanner
from autoplan.runtime.lost import communicating
from searchspace.errors import CheckpointError

_SHOWN = 3
"""How many names a message lists."""


class Scheduler(Protocol):
    """A learning rate scheduler."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Restored:
    """What a checkpoint says besides tensors.

    Fields
        information: what the :class:`Holding` that was saved says.
        objects: entries of the model's state dict that are no tensors, by name.
        extra: the user's.
    """

    information: Mapping[str, Any]
    objects: Mapping[str, Any]
    extra: Mapping[str, Any]


# -- saving ------------------------------------------------------------------------------------------


def save(
    holding: Holding,
    path: str | PathLike[str],
    *,
    optimizer: Optimizer | None = None,
    scheduler: Scheduler | None = None,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint; every process calls this.

    Atomic: until it returns ``path`` is as it was, whenever the save is interrupted.  ``extra`` may hold
    tensors, numbers, strings and containers of them.  Raises CheckpointError, on all processes, when
    ``path`` is something else than a checkpoint, or one of them cannot write.
    """
    target = Path(path).resolve()
    coordinator = holding.process == 0
    problem: CheckpointError | None = None
    parts = OptimizerParts()
    try:
        if optimizer is not None:
            parts = take_apart(optimizer, holding.shards, coordinator)
    except CheckpointError as error:
        problem = error
    values = {**parts.values, ("rng", str(holding.process)): _random_state(holding.device)}
    if coordinator:
        values |= {("autoplan", key): value for key, value in holding.information.items()}
        values |= {("model", key): value for key, value in holding.objects.items()}
        if scheduler is not None:
            values["scheduler",] = scheduler.state_dict()
        if extra is not None:
            values["extra",] = dict(extra)
    planner = ShardSavePlanner((*holding.shards, *parts.shards), values, parts.lists, problem)
    try:
        _together(
            holding,
            f"saving {path}",
            lambda: dcp.save(
                {},
                storage_writer=AtomicWriter(target),
                planner=planner,
                process_group=holding.group,
                no_dist=not holding.distributed,
            ),
        )
    except BaseException:
        if coordinator:
            shutil.rmtree(draft_of(target), ignore_errors=True)
        raise


def _random_state(device: torch.device) -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def _together(holding: Holding, what: str, call: Callable[[], object]) -> None:
    """Run a call of torch.distributed.checkpoint; its failures are CheckpointErrors of all processes."""
    try:
        with warnings.catch_warnings(), communicating(holding.process, what):
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            call()
    except CheckpointException as error:
        process, (cause, _) = min(error.failures.items())
        if not isinstance(cause, Exception):
            raise cause from None  # Ctrl-C
        where = f" on process {process}" if holding.distributed else ""
        text = str(cause) if isinstance(cause, CheckpointError) else f"{type(cause).__name__}: {cause}"
        raise CheckpointError(f"{what} failed{where}: {text}") from (
            None if isinstance(cause, CheckpointError) else cause
        )


# -- loading -----------------------------------------------------------------------------------------


def load(
    holding: Holding,
    path: str | PathLike[str],
    *,
    optimizer: Optimizer | None = None,
    scheduler: Scheduler | None = None,
    random_state: bool = True,
) -> Restored:
    """Read a checkpoint into the shards of ``holding``, and into optimizer and scheduler; every process calls this.

    A process takes the random state of the process with its index, or of process 0 where there was none.
    Raises CheckpointError, on all processes, before anything is changed, when the checkpoint is incomplete
    or damaged, lacks a tensor, holds one more, holds one of another shape, or has no state for what is given.
    """
    values, reading = _read(holding, path, optimizer, scheduler is not None)
    if optimizer is not None and reading is not None:
        optimizer.load_state_dict(reading.result(values))
    if scheduler is not None:
        scheduler.load_state_dict(values["scheduler"])
    rng = _rng_name(holding, values)
    if random_state and rng in values:
        _set_random_state(values[rng], holding.device)
    return Restored(_under("autoplan.", values), _under("model.", values), values.get("extra", {}))


def _under(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}


def optimizer_state_dict(path: str | PathLike[str], model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """A checkpoint's optimizer state for a plain optimizer over ``model``: what ``optimizer.load_state_dict`` takes.

    Raises CheckpointError as :func:`load` does.
    """
    values, reading = _read(single_device(model), path, optimizer, scheduler=False, model=False)
    assert reading is not None
    return reading.result(values)


def _read(
    holding: Holding, path: str | PathLike[str], optimizer: Optimizer | None, scheduler: bool, model: bool = True
) -> tuple[dict[str, Any], OptimizerReading | None]:
    """Fill the shards; returns the values, and the optimizer's state once it is read.

    What a process finds wrong is carried into the next common call, so that all processes learn of it.
    """
    source = Path(path).resolve()
    metadata = Metadata({}, storage_data={})
    shards: tuple[Shard, ...] = ()
    names: tuple[str, ...] = ()
    reading: OptimizerReading | None = None
    problem: CheckpointError | None = None
    try:
        metadata = examine(source)
        if model:
            shards = _matching(holding, metadata)
        if optimizer is not None:
            reading = OptimizerReading(optimizer, holding.shards, metadata)
            names = reading.values
            shards += reading.shards
        names += _other_values(holding, metadata, scheduler)
    except CheckpointError as error:
        problem = error
    values = _fetch(holding, source, metadata, Request((), names), problem)
    try:
        if reading is not None:
            reading.check(values)
    except CheckpointError as error:
        problem = error
    _fetch(holding, source, metadata, Request(shards), problem)
    return values, reading


def _fetch(
    holding: Holding, path: Path, metadata: Metadata, request: Request, problem: CheckpointError | None
) -> dict[str, Any]:
    planner = ShardLoadPlanner(request, problem)
    _together(
        holding,
        f"loading {path}",
        lambda: dcp.load(
            {},
            storage_reader=ExaminedReader(path, metadata),
            planner=planner,
            process_group=holding.group,
            no_dist=not holding.distributed,
        ),
    )
    return planner.values


def _matching(holding: Holding, metadata: Metadata) -> tuple[Shard, ...]:
    """The shards under the names that the checkpoint has; CheckpointError when it is of another model."""
    stored = metadata.state_dict_metadata
    saved_as: dict[str, str] = {}
    known = {f"model.{name}" for name in holding.objects}
    missing = [name for name in holding.objects if f"model.{name}" not in stored]
    misshaped = []
    for tensor in holding.tensors:
        names = [f"model.{name}" for name in (tensor.name, *tensor.aliases)]
        known.update(names)
        name = next((name for name in names if name in stored), None)
        found = stored.get(name or "")
        if name is None:
            missing.append(tensor.name)
        elif not isinstance(found, TensorStorageMetadata) or tuple(found.size) != tensor.shape:
            size = list(found.size) if isinstance(found, TensorStorageMetadata) else "no tensor"
            misshaped.append(f"{tensor.name} {size} instead of {list(tensor.shape)}")
        else:
            saved_as[tensor.name] = name
    extra = [name.removeprefix("model.") for name in stored if name.startswith("model.") and name not in known]
    wrong = (("missing", missing), ("unknown", extra), ("of another shape", misshaped))
    if any(names for _, names in wrong):
        text = "; ".join(f"{len(names)} {what} ({_listed(names)})" for what, names in wrong if names)
        raise CheckpointError(f"the checkpoint is of another model: {text}")
    return tuple(replace(shard, path=(saved_as[str(shard.path[-1])],)) for shard in holding.shards)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")


def _other_values(holding: Holding, metadata: Metadata, scheduler: bool) -> tuple[str, ...]:
    stored = metadata.state_dict_metadata
    if scheduler and "scheduler" not in stored:
        raise CheckpointError("the checkpoint holds no scheduler state")
    wanted = ["extra", _rng_name(holding, stored), *(["scheduler"] if scheduler else [])]
    wanted += [f"model.{name}" for name in holding.objects]
    return tuple(name for name in stored if name in wanted or name.startswith("autoplan."))


def _rng_name(holding: Holding, names: Collection[str]) -> str:
    own = f"rng.{holding.process}"
    return own if own in names else "rng.0"


def _set_random_state(state: Mapping[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
