"""One cell: the very search a user would make, and failures as results."""

import sys

import pytest

import autoplan
from autoplan.sweep.cell import Cell, run_cell
from autoplan.sweep.grid import Grid
from tests.plans import fake_api, small_plan


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> Cell:
    made = fake_api()
    monkeypatch.setitem(sys.modules, "autoplan.api", made)
    monkeypatch.setattr(autoplan, "api", made, raising=False)
    (cell,) = Grid(
        ("gpt-tiny",), ("h100:1x2",), global_batch=(8,), memory_limit=("60 GiB",), search={"seed": 4}
    ).cells()
    return cell


def test_a_cell_is_one_search(cell: Cell) -> None:
    result, plan = run_cell(cell, "graph")
    ((_, given),) = autoplan.api.calls
    assert (given["model"], given["cluster"], given["global_batch"]) == ("graph", "h100:1x2", 8)
    assert (given["memory_limit"], given["seed"], given["precision"]) == (60 * 2**30, 4, "float32")
    assert plan == small_plan("h100:1x2", 8)
    assert (result.status, result.step_seconds, result.samples_per_second) == ("ok", 0.5, 8 / 0.5)
    assert (result.peak_bytes, result.bound_seconds, result.gap) == (3 * 2**30, 0.4, 0.2)
    assert (result.devices_used, result.stages, result.micro_batches) == (4, 2, 2)


def test_no_plan_is_a_result_with_the_reason(cell: Cell) -> None:
    from dataclasses import replace

    result, plan = run_cell(replace(cell, memory_limit=5), "graph")
    assert plan is None and result.status == "infeasible" and "needs 5 GiB per device" in result.error
    assert result.missing_bytes == 5 * 2**30 - 2**10


def test_any_other_error_is_a_failed_cell(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise MemoryError("out of luck")

    monkeypatch.setattr(autoplan.api, "search", broken)
    result, plan = run_cell(cell, "graph")
    assert plan is None and (result.status, result.error) == ("failed", "MemoryError: out of luck")
