"""``autoplan run`` and ``autoplan verify``."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer

from autoplan.cli import options
from autoplan.cli.options import parse_sizes
from autoplan.model_reference import load_model
from autoplan.report.console import show
from autoplan.report.progress import Progress
from autoplan.zoo import DTYPES, Example
from searchspace.errors import ExecutionError, PlanMismatchError
from searchspace.plan import Plan

PlanOption = Annotated[
    Path | None, typer.Option("--plan", help="Plan file; default: search one for the devices that are here.")
]
Ranks = Annotated[int | None, typer.Option("--ranks", min=1, help="Processes; default: as many as the plan needs.")]
Steps = Annotated[int, typer.Option("--steps", min=1)]
Rate = Annotated[float, typer.Option("--learning-rate", min=0, callback=options.finite)]

DISAGREE = 1


def run(
    model: options.Model,
    plan: PlanOption = None,
    ranks: Ranks = None,
    steps: Steps = 3,
    learning_rate: Rate = 1e-3,
    in_process: Annotated[bool, typer.Option("--in-process", help="All ranks in this process.")] = False,
    batch: options.Batch = None,
    sequence: options.Sequence_ = None,
    dtype: options.Dtype = None,
    sizes: options.Sizes = None,
    seed: options.Seed = 0,
) -> None:
    """Train MODEL on its example inputs: starts the ranks on this machine, or is one under torchrun."""
    from autoplan.runtime.launch import spawn, under_torchrun

    found = _load(plan)
    count = _ranks(found, ranks)
    load = partial(
        _example, model, found, batch=batch, sequence=sequence, dtype=dtype, sizes=parse_sizes(sizes), seed=seed
    )
    if in_process or count == 1 or under_torchrun():
        train(load, found, steps, learning_rate)
    else:
        spawn(train, count, load, found, steps, learning_rate)


def verify(
    model: options.Model,
    plan: PlanOption = None,
    ranks: Ranks = None,
    steps: Steps = 3,
    learning_rate: Rate = 1e-3,
    tolerance: Annotated[
        float | None,
        typer.Option(
            "--tolerance", min=0, callback=options.finite, help="Allowed relative difference; default: by dtype."
        ),
    ] = None,
    processes: Annotated[bool, typer.Option("--processes", help="One process per rank.")] = False,
    count: Annotated[int, typer.Option("--show", min=1, help="How many of the largest differences to print.")] = 3,
    batch: options.Batch = None,
    sequence: options.Sequence_ = None,
    dtype: options.Dtype = None,
    sizes: options.Sizes = None,
    seed: options.Seed = 0,
) -> None:
    """Run the plan and the single device on the same weights and batch, and compare.  Exit code 1: they differ."""
    from autoplan import verification

    found = _load(plan)
    world = _ranks(found, ranks)
    kind = dtype or ("float64" if found is None else None)
    example = _example(model, found, batch=batch, sequence=sequence, dtype=kind, sizes=parse_sizes(sizes), seed=seed)
    with Progress("verify") as progress:
        comparison = verification.verify(
            *example,
            plan=found,
            ranks=world,
            steps=steps,
            learning_rate=learning_rate,
            tolerance=tolerance,
            processes=processes,
            progress=progress,
        )
    show(comparison.table(count))
    print("plan and single device agree" if comparison.agrees else "plan and single device DISAGREE")
    if not comparison.agrees:
        raise typer.Exit(DISAGREE)


def _load(path: Path | None) -> Plan | None:
    return None if path is None else Plan.load(path)


def _ranks(plan: Plan | None, asked: int | None) -> int:
    """How many ranks take part; PlanMismatchError when the plan needs another number than was asked for."""
    if plan is None:
        return asked or 1
    if asked is not None and asked != plan.world_size:
        raise PlanMismatchError(f"the plan needs {plan.world_size} ranks, --ranks says {asked}")
    return plan.world_size


def _example(
    model: str, plan: Plan | None, *, batch: int | None, dtype: str | None, sizes: Mapping[str, Any], **given: Any
) -> Example:
    """The model and a call of it; batch and dtype are the plan's unless given."""
    planned = plan.recipe.global_batch if plan is not None and ":" not in model else None
    labels = plan is None or plan.recipe.mode == "train"
    kind = dtype or (_planned_dtype(plan) if plan is not None else None)
    return load_model(model, batch=batch or planned, dtype=kind, device="cpu", labels=labels, **given, **sizes)


def _planned_dtype(plan: Plan) -> str | None:
    """The dtype of the weights that a plan was made for; None where the recipe has cast them."""
    dtypes = [line.rpartition(" ")[2] for line in plan.model.signature]
    floating = [dtype for dtype in dtypes if dtype in DTYPES]
    return floating[0] if floating and plan.recipe.precision != "bf16" else None


def train(load: Callable[[], Example], plan: Plan | None, steps: int, learning_rate: float) -> None:
    """What each rank does: every one makes the model and the whole batch; rank 0 prints the loss."""
    import torch
    import torch.distributed as dist

    from autoplan import api

    model, args, kwargs = load()
    parallel = api.parallelize(model, args, kwargs, plan=plan)
    first = not dist.is_initialized() or dist.get_rank() == 0
    optimizer = None
    if plan is None or plan.recipe.mode == "train":
        kind = _optimizer(torch.optim, plan.recipe.optimizer if plan is not None else "adamw")
        optimizer = kind(parallel.parameters(), lr=learning_rate)
    for step in range(steps):
        start = time.perf_counter()
        text = ""
        if optimizer is not None:
            text = f"loss {parallel.train_step(*args, **kwargs).item():.6f}  "
            optimizer.step()
            optimizer.zero_grad()
        else:
            parallel(*args, **kwargs)
        if first:
            print(f"step {step}  {text}{time.perf_counter() - start:.3f} s", flush=True)


def _optimizer(module: ModuleType, name: str) -> Any:
    """What a plan's recipe names: a class of ``torch.optim`` in any case, or ``momentum``."""
    if name.lower() == "momentum":
        return partial(vars(module)["SGD"], momentum=0.9)
    classes = {key.lower(): value for key, value in vars(module).items() if isinstance(value, type)}
    if name.lower() not in classes:
        raise ExecutionError(f"the plan's optimizer {name!r} is not in torch.optim: {', '.join(sorted(classes))}")
    return classes[name.lower()]
