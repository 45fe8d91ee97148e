"""``autoplan.sweep``: search every cell of a grid."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from autoplan.model_reference import load_model
from autoplan.report.progress import Progress
from autoplan.sweep import workers
from autoplan.sweep.cell import CAPTURE_OPTIONS, Cell, CellResult
from autoplan.sweep.grid import Grid, SweepFile, read
from autoplan.sweep.pickling import check_picklable
from autoplan.sweep.results import Folder
from searchspace.errors import AutoplanError, SweepError
from searchspace.plan import Plan
from searchspace.quantity_text import bytes_text, seconds_text
from searchspace.summary import Table

_OWN = ("model", "args", "kwargs", "cluster", "global_batch", "memory_limit", "progress")
"""Parameters of a search that each cell sets itself."""


@dataclass(frozen=True)
class SweepResult:
    """The results of all finished cells in the grid's order, and how many cells are still to be searched."""

    folder: Path
    results: tuple[CellResult, ...]
    missing: int

    @property
    def failed(self) -> tuple[CellResult, ...]:
        return tuple(result for result in self.results if result.status == "failed")

    def plan(self, result: CellResult) -> Plan | None:
        """The plan of a cell, or None where there is none."""
        return Folder(self.folder).plan(result)

    def table(self) -> Table:
        """One row per cell: model, cluster, batch, sequence, limit, time, memory, or why there is no plan."""
        columns = ("model", "cluster", "batch", "sequence", "memory limit", "step", "peak memory", "result")
        return Table("Sweep", columns, tuple(map(_row, self.results)))


def sweep(
    grid: Grid | str | os.PathLike[str] | Mapping[str, Any],
    *,
    storage: str | os.PathLike[str] | None = None,
    address: str | None = None,
    cpus_per_cell: float = 1,
    retry_failed: bool = False,
    progress: Callable[[str, float | None], None] | None = None,
) -> SweepResult:
    """Search every cell of ``grid``; cells that a former, interrupted sweep finished are not searched again.

    Args:
        grid: a :class:`Grid`, a TOML file, or a mapping of the same form.
        storage: folder for plans and tables; default: the file's ``output``.
        address: a Ray cluster; default: local processes on this machine's CPUs.
        cpus_per_cell: CPUs that Ray reserves for one search.
        retry_failed: search again what failed (not what was infeasible).
        progress: called with a text and the share that is done; default: shown on standard error.

    Raises SweepError before anything is searched when the grid, the folder, Ray or an option is wrong.
    On Ctrl-C the finished cells are kept and ``missing`` counts the others.
    """
    where = grid if isinstance(grid, Grid) else read(grid)
    file = where if isinstance(where, SweepFile) else SweepFile(where, Path("sweep-results"))
    cells = file.grid.cells()
    workers.require(local=address is None)
    _check_options(file.grid.search)
    folder = Folder(Path(storage) if storage is not None else file.output)
    with folder.locked():
        results = {cell.key: result for cell in cells if (result := folder.finished(cell)) is not None}
        if retry_failed:
            results = {key: result for key, result in results.items() if result.status != "failed"}
        todo = [cell for cell in cells if cell.key not in results]

        def commit(result: CellResult, plan_json: str | None) -> None:
            folder.commit(result, plan_json)
            results[result.key] = result
            show(_state(results, len(cells)), len(results) / len(cells))

        with Progress("sweep") as bar:
            show = progress or bar
            try:
                if todo:
                    with workers.connected(address, cpus_per_cell):
                        captures = _capture(todo, commit, show)
                        ready = [cell for cell in todo if cell.key not in results]
                        show(_state(results, len(cells)), len(results) / len(cells))
                        if ready:
                            workers.run_cells(ready, captures, commit, cpus_per_cell)
            except KeyboardInterrupt:
                pass  # what is finished is committed; the caller sees what is missing
            finally:
                done = tuple(results[cell.key] for cell in cells if cell.key in results)
                folder.write_table(done)
    return SweepResult(folder.path, done, len(cells) - len(done))


def _capture(
    cells: Sequence[Cell],
    commit: Callable[[CellResult, str | None], None],
    show: Callable[[str, float | None], None],
) -> dict[tuple[str, int | None], Any]:
    """Each model captured once, in this process; the cells of a model that cannot be captured fail."""
    from autoplan import api

    captures: dict[tuple[str, int | None], Any] = {}
    for key in dict.fromkeys(cell.capture_key for cell in cells):
        of_model = [cell for cell in cells if cell.capture_key == key]
        cell = of_model[0]
        show(f"capture of {cell.model}", None)
        try:
            example = load_model(
                cell.function or cell.model,
                sequence=cell.sequence,
                device="meta",
                labels=cell.capture.get("mode", "train") == "train",
                **cell.model_options,
            )
            captured = api.capture(*example, **cell.capture)
        except AutoplanError as error:
            for other in of_model:
                commit(CellResult.of(other, "failed", error=str(error)), None)
            continue
        # A search needs the graph; the user's module need not be fit to travel.
        captures[key] = replace(captured, model=nn.Module(), constants={})
        check_picklable(captures[key], f"capture of {cell.model}")
    return captures


def _check_options(options: Mapping[str, Any]) -> None:
    from autoplan import api

    known = [name for name in inspect.signature(api.search).parameters if name not in _OWN]
    unknown = [name for name in options if name not in known]
    if unknown:
        raise SweepError(f"search takes no option {', '.join(unknown)}; it takes {', '.join(known)}")
    for name, value in options.items():
        if name not in CAPTURE_OPTIONS:
            check_picklable(value, f"search.{name}")


def _state(results: Mapping[str, CellResult], total: int) -> str:
    counts = [f"{len(results)} of {total} cells"]
    for status in ("infeasible", "failed"):
        number = sum(result.status == status for result in results.values())
        if number:
            counts.append(f"{number} {status}")
    return ", ".join(counts)


def _row(result: CellResult) -> tuple[str, ...]:
    return (
        result.model,
        result.cluster,
        _text(result.global_batch),
        _text(result.sequence),
        "" if result.memory_limit is None else bytes_text(result.memory_limit),
        "" if result.step_seconds is None else seconds_text(result.step_seconds),
        "" if result.peak_bytes is None else bytes_text(result.peak_bytes),
        f"{result.status}: {result.error}" if result.error else result.status,
    )


def _text(value: int | None) -> str:
    return "" if value is None else str(value)
