"""``autoplan sweep``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from autoplan.report.console import console, show

FAILED = 1
INTERRUPTED = 130


def sweep(
    file: Annotated[Path, typer.Argument(metavar="SWEEP.toml", help="Grid, search options and output folder.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Folder for plans and tables.")] = None,
    address: Annotated[str | None, typer.Option("--address", help="A Ray cluster; default: this machine.")] = None,
    cpus_per_cell: Annotated[float, typer.Option("--cpus-per-cell", min=0.1)] = 1,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Search failed cells again.")] = False,
) -> None:
    """Search every cell of a grid; run again to go on after an interruption.  Exit code 1: a cell failed."""
    from autoplan.sweep import sweep as run_sweep

    done = run_sweep(file, storage=output, address=address, cpus_per_cell=cpus_per_cell, retry_failed=retry_failed)
    show(done.table())
    print(f"plans, results.csv and results.parquet are in {done.folder}")
    if done.missing:
        console(sys.stderr).print(f"{done.missing} cells are missing; run the command again to go on")
        raise typer.Exit(INTERRUPTED)
    if done.failed:
        raise typer.Exit(FAILED)
