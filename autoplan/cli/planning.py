"""``autoplan plan`` and ``autoplan show``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from autoplan.cli import options
from autoplan.model_reference import load_model
from autoplan.report.console import show as show_tables
from autoplan.report.progress import Progress
from searchspace.plan import Mode, Plan, Precision, check_writable
from searchspace.summary import tables


def plan(
    model: options.Model,
    cluster: Annotated[
        str, typer.Option("--cluster", help="DEVICE:NODESxDEVICES, e.g. h100:8x8, or a .toml or .json file.")
    ],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the plan to this file.")] = None,
    global_batch: Annotated[
        int | None, typer.Option("--global-batch", min=1, help="Samples in a step; default: those of the inputs.")
    ] = None,
    optimizer: Annotated[str, typer.Option("--optimizer", help="Whose state counts in memory.")] = "adamw",
    precision: Annotated[Precision, typer.Option("--precision", help="How it is computed.")] = "float32",
    mode: Annotated[Mode, typer.Option("--mode", help="What is planned.")] = "train",
    memory_limit: Annotated[
        int | None,
        typer.Option(
            "--memory-limit",
            metavar="SIZE",
            parser=options.parse_bytes,
            help="Per device, e.g. 60GiB; default: all.",
        ),
    ] = None,
    time_limit: Annotated[
        float | None,
        typer.Option(
            "--time-limit",
            min=0,
            callback=options.finite,
            help="Seconds after which the best plan so far is returned.",
        ),
    ] = None,
    batch: options.Batch = None,
    sequence: options.Sequence_ = None,
    dtype: options.Dtype = None,
    sizes: options.Sizes = None,
    seed: options.Seed = 0,
) -> None:
    """Search a plan for MODEL on a cluster.  No weight is allocated for models of the zoo."""
    from autoplan import api

    if output is not None:
        check_writable(output)
    in_zoo = ":" not in model
    example = load_model(
        model,
        batch=batch or (global_batch if in_zoo else None),
        sequence=sequence,
        device="meta",
        dtype=dtype,
        labels=mode == "train",
        seed=seed,
        **options.parse_sizes(sizes),
    )
    limits: dict[str, Any] = {"memory_limit": memory_limit, "time_limit": time_limit}
    with Progress("search") as progress:
        found = api.search(
            *example,
            cluster=cluster,
            global_batch=global_batch,
            optimizer=optimizer,
            precision=precision,
            mode=mode,
            seed=seed,
            progress=progress,
            **{name: value for name, value in limits.items() if value is not None},
        )
    if output is not None:
        found.save(output)
    show_tables(*tables(found))
    if output is not None:
        print(f"plan written to {output}")


def show(
    path: options.PlanFile,
    operators: Annotated[bool, typer.Option("--operators", help="Every operator on a line of its own.")] = False,
) -> None:
    """Print a plan: stages, splits by layer, predicted time and memory, lower bound, runners-up."""
    found = Plan.load(path)
    show_tables(*tables(found))
    if operators:
        for index, stage in enumerate(found.placement.stages):
            for name in stage.operators:
                splits = found.transformation.operators.get(name, {})
                text = " ".join(f"{axis}:{label}" for axis, label in splits.items()) or "replicated"
                print(f"stage {index}  {name}  {text}")
