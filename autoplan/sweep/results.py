"""A sweep's folder: one plan and one result per finished cell, and the table of all.

    plans/KEY.json       the plan (absent when there is none)
    cells/KEY.json       the result; a cell is finished when this file exists
    results.parquet, results.csv

The result is written last and atomically, so that a sweep that is killed at any moment goes on where it was.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path

from autoplan.sweep.cell import Cell, CellResult
from searchspace.errors import SweepError
from searchspace.plan import Plan, write_atomically

INTEGERS = (
    *("global_batch", "sequence", "memory_limit", "peak_bytes", "missing_bytes"),
    *("devices_used", "stages", "micro_batches"),
)
"""Columns of whole numbers, some of them absent in some rows."""


class Folder:
    """The files of one sweep."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other sweeps out of the folder; SweepError when one is in it."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            file = (self.path / ".lock").open("w")
        except OSError as error:
            raise SweepError(f"{self.path}: cannot write results: {error.strerror}") from None
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise SweepError(f"{self.path}: another sweep is writing into this folder") from None
            yield

    def plan_path(self, key: str) -> Path:
        return self.path / "plans" / f"{key}.json"

    def finished(self, cell: Cell) -> CellResult | None:
        """The committed result of a cell, or None when it has to be searched."""
        key = cell.key
        try:
            data = json.loads((self.path / "cells" / f"{key}.json").read_text(encoding="utf-8"))
            result = CellResult(**data)
        except (OSError, ValueError, TypeError):
            return None
        return None if result.status == "ok" and not self.plan_path(key).exists() else result

    def commit(self, result: CellResult, plan_json: str | None) -> None:
        """Write a plan, then its result; from then on the cell is finished."""
        if plan_json is not None:
            write_atomically(self.plan_path(result.key), plan_json)
        write_atomically(self.path / "cells" / f"{result.key}.json", result.to_json())

    def plan(self, result: CellResult) -> Plan | None:
        """The plan of a finished cell."""
        return Plan.load(self.plan_path(result.key)) if result.status == "ok" else None

    def write_table(self, results: Sequence[CellResult]) -> None:
        """``results.parquet`` and ``results.csv``, one row per result."""
        import pandas

        frame = pandas.DataFrame([asdict(r) for r in results], columns=[f.name for f in fields(CellResult)])
        frame = frame.astype(dict.fromkeys(INTEGERS, "Int64"))
        frame["plan"] = [f"plans/{r.key}.json" if r.status == "ok" else None for r in results]
        for name, write in (("results.parquet", frame.to_parquet), ("results.csv", frame.to_csv)):
            temporary = self.path / f".{name}.{os.getpid()}"
            write(temporary, index=False)
            os.replace(temporary, self.path / name)
