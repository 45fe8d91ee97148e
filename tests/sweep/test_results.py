"""The folder of a sweep: what counts as finished, the table, one sweep at a time."""

import csv
from pathlib import Path

import pandas
import pytest

from autoplan.sweep.cell import Cell, CellResult
from autoplan.sweep.grid import Grid
from autoplan.sweep.results import Folder
from searchspace.errors import SweepError
from tests.plans import small_plan


@pytest.fixture
def cells() -> tuple[Cell, ...]:
    return Grid(("gpt-tiny",), ("h100:1x2",), global_batch=(8, 16)).cells()


def test_a_cell_is_finished_when_its_result_is_there(tmp_path: Path, cells: tuple[Cell, ...]) -> None:
    folder, cell = Folder(tmp_path), cells[0]
    assert folder.finished(cell) is None
    result = CellResult.of(cell, "ok", step_seconds=0.5, peak_bytes=3)
    folder.commit(result, small_plan().to_json())
    assert folder.finished(cell) == result and folder.plan(result) == small_plan()
    assert folder.finished(cells[1]) is None
    folder.plan_path(cell.key).unlink()
    assert folder.finished(cell) is None  # a result without its plan is searched again


def test_a_plan_without_result_or_a_damaged_result_is_searched_again(tmp_path: Path, cells: tuple[Cell, ...]) -> None:
    folder, cell = Folder(tmp_path), cells[0]
    folder.commit(CellResult.of(cell, "failed", error="x"), None)
    file = tmp_path / "cells" / f"{cell.key}.json"
    for text in (file.read_text()[:-20], "[]", '{"key": 1}', ""):
        file.write_text(text)
        assert folder.finished(cell) is None


def test_the_table_has_a_row_per_cell(tmp_path: Path, cells: tuple[Cell, ...]) -> None:
    folder = Folder(tmp_path)
    results = [
        CellResult.of(cells[0], "ok", step_seconds=0.5, peak_bytes=2**40),
        CellResult.of(cells[1], "infeasible", error="by 3 GiB, alas", missing_bytes=3 * 2**30),
    ]
    folder.write_table(results)
    frame = pandas.read_parquet(tmp_path / "results.parquet")
    assert list(frame["status"]) == ["ok", "infeasible"] and frame["peak_bytes"][0] == 2**40
    assert pandas.isna(frame["peak_bytes"][1]) and str(frame["peak_bytes"].dtype) == "Int64"
    assert frame["plan"][0] == f"plans/{cells[0].key}.json"
    with (tmp_path / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert rows[1]["error"] == "by 3 GiB, alas" and rows[1]["missing_bytes"] == str(3 * 2**30)
    folder.write_table([])
    assert pandas.read_parquet(tmp_path / "results.parquet").empty


def test_two_sweeps_do_not_share_a_folder(tmp_path: Path) -> None:
    with (
        Folder(tmp_path).locked(),
        pytest.raises(SweepError, match="another sweep is writing"),
        Folder(tmp_path).locked(),
    ):
        pass
    with Folder(tmp_path).locked():
        pass


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SweepError, match="cannot write results: Not a directory"), Folder(tmp_path / "file/x").locked():
        pass
