"""Sweeps on a local Ray with a stand-in for the search; kills and interruptions."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import autoplan
from autoplan.sweep import Cell, CellResult, Grid, sweep, workers
from searchspace.errors import InfeasibleError, SweepError
from searchspace.plan import Plan
from tests.plans import fake_api, small_plan

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # Ray leaves sockets and processes to the collector
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

GRID = {"models": ["gpt-tiny", "mlp-tiny"], "clusters": ["h100"], "devices": [1, 2, 4], "global_batch": [8, 16]}


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """One local Ray for all tests of this file."""
    workers.require(local=True)
    import ray

    workers._start(None)
    yield ray
    ray.shutdown()


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = fake_api()
    monkeypatch.setitem(sys.modules, "autoplan.api", made)
    monkeypatch.setattr(autoplan, "api", made, raising=False)
    return made


def stand_in(cell: Cell, captured: Any) -> tuple[CellResult, Plan | None]:
    """Writes down that it ran; some cells fail."""
    with open(os.environ["AUTOPLAN_TEST_LOG"], "a") as log:
        log.write(f"{cell.key} {captured.graph}\n")
    if cell.global_batch == 16 and cell.cluster == "h100:1x2":
        return CellResult.of(cell, "infeasible", error=str(InfeasibleError("by 3 GiB")), missing_bytes=3 * 2**30), None
    if cell.global_batch == 16 and cell.cluster == "h100:1x4" and cell.model == "mlp-tiny":
        os._exit(7)
    time.sleep(float(os.environ.get("AUTOPLAN_TEST_SLEEP", "0")))
    return CellResult.of(cell, "ok", step_seconds=0.5, peak_bytes=1), small_plan(cell.cluster, cell.global_batch)


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "log"

    def logged(cell: Cell, captured: Any) -> tuple[CellResult, Plan | None]:
        os.environ["AUTOPLAN_TEST_LOG"] = str(path)
        return stand_in(cell, captured)

    monkeypatch.setattr(workers, "run_cell", logged)
    return path


def test_every_cell_is_searched_once_and_failures_do_not_stop_the_others(
    ray: Any, api: Any, log: Path, tmp_path: Path
) -> None:
    shown: list[str] = []
    grid = {"grid": GRID, "search": {"optimizer": "adamw"}}
    done = sweep(grid, storage=tmp_path / "out", progress=lambda text, share: shown.append(text))
    assert done.missing == 0 and len(done.results) == 12
    assert len(log.read_text().splitlines()) == 12
    by_cell = {(r.model, r.cluster, r.global_batch): r for r in done.results}
    assert by_cell["gpt-tiny", "h100:1x2", 16].missing_bytes == 3 * 2**30
    lost = by_cell["mlp-tiny", "h100:1x4", 16]
    assert lost.status == "failed" and lost.error.startswith("worker failed: ") and done.failed == (lost,)
    assert [r.status for r in done.results].count("ok") == 9
    for result in done.results:
        assert done.plan(result) == (small_plan(result.cluster, result.global_batch) if result.status == "ok" else None)
    captures = [given for name, given in api.calls if name == "capture"]
    assert [type(given["model"]).__name__ for given in captures] == ["GPT", "MLP"]  # each model once
    assert {line.split(" ", 1)[1] for line in log.read_text().splitlines()} == {"graph of GPT", "graph of MLP"}
    assert shown[0] == "capture of gpt-tiny" and shown[-1] == "12 of 12 cells, 2 infeasible, 1 failed"
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        ".lock",
        "cells",
        "plans",
        "results.csv",
        "results.parquet",
    }

    again = sweep(grid, storage=tmp_path / "out")
    assert again.results == done.results and len(log.read_text().splitlines()) == 12
    sweep(grid, storage=tmp_path / "out", retry_failed=True)
    assert len(log.read_text().splitlines()) == 13
    assert done.table().rows[3][-1] == "infeasible: by 3 GiB"


def test_a_model_that_cannot_be_captured_fails_in_its_own_cells(ray: Any, api: Any, log: Path, tmp_path: Path) -> None:
    def build(batch: int = 3) -> int:
        return batch

    done = sweep(Grid((build, "gpt-tiny"), ("h100:1x1",), global_batch=(8,)), storage=tmp_path / "out")
    bad, good = done.results
    assert bad.status == "failed" and "expected (model, args, kwargs)" in bad.error and "build" in bad.model
    assert good.status == "ok"


def test_an_interruption_keeps_what_is_finished(
    ray: Any, api: Any, log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(cells: Any, graphs: Any, commit: Any, cpus: float) -> None:
        commit(*_committed(cells[0], graphs))
        raise KeyboardInterrupt

    def _committed(cell: Cell, graphs: Any) -> tuple[CellResult, str]:
        result, plan = workers.run_cell(cell, graphs[cell.capture_key])
        return result, plan.to_json()

    grid = Grid(("gpt-tiny",), ("h100:1x1",), global_batch=(4, 8))
    with monkeypatch.context() as patch:
        patch.setattr(workers, "run_cells", interrupted)
        first = sweep(grid, storage=tmp_path / "out")
    assert first.missing == 1 and len(first.results) == 1 and (tmp_path / "out" / "results.csv").exists()
    assert sweep(grid, storage=tmp_path / "out").missing == 0
    keys = [line.split()[0] for line in log.read_text().splitlines()]
    assert len(keys) == len(set(keys)) == 2


def test_more_cpus_than_there_are_fail_at_once(ray: Any, api: Any, tmp_path: Path) -> None:
    with pytest.raises(SweepError, match=r"a cell asks for 1000 CPUs, the largest of 1 Ray nodes has \d"):
        sweep(Grid(("gpt-tiny",), ("h100:1x1",)), storage=tmp_path, cpus_per_cell=1000)


def test_options_are_checked_before_anything_starts(api: Any, tmp_path: Path) -> None:
    with pytest.raises(SweepError, match="search takes no option optimiser; it takes optimizer, precision"):
        sweep(Grid(("gpt-tiny",), ("h100:1x1",), search={"optimiser": "adamw"}), storage=tmp_path)
    lock = threading.Lock()
    grid = Grid(("gpt-tiny",), ("h100:1x1",), search={"constraints": [lambda: lock]})
    with pytest.raises(SweepError, match=r"search\.constraints\[0\]\.<closure>\.lock \(of type lock\)"):
        sweep(grid, storage=tmp_path)


def test_an_address_that_nobody_listens_on_fails_in_seconds(api: Any, tmp_path: Path) -> None:
    import ray

    if ray.is_initialized():
        ray.shutdown()
    start = time.monotonic()
    with pytest.raises(SweepError, match=r"cannot start Ray at 127\.0\.0\.1:1: .*refused"):
        sweep(Grid(("gpt-tiny",), ("h100:1x1",)), storage=tmp_path, address="127.0.0.1:1")
    assert time.monotonic() - start < 10


def test_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch, api: Any, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setitem(sys.modules, "ray.tune", None)
    with pytest.raises(SweepError, match=r"pip install 'autoplan-torch\[sweep\]'"):
        sweep(Grid(("gpt-tiny",), ("h100:1x1",)), storage=tmp_path)


DRIVER = """
import sys, autoplan
from tests.plans import fake_api
from tests.sweep import test_sweep
api = fake_api()
sys.modules["autoplan.api"] = autoplan.api = api
from autoplan.sweep import sweep, workers, Grid
workers.run_cell = test_sweep.stand_in
done = sweep(Grid(("gpt-tiny",), ("h100:1x1",), global_batch=tuple(range(1, 13))), storage=sys.argv[1])
sys.exit(done.missing)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_sweep_goes_on_where_it_was(tmp_path: Path) -> None:
    """SIGKILL after the third result: afterwards all twelve are there, and no finished one ran twice."""
    environment = {
        **os.environ,
        "AUTOPLAN_TEST_LOG": str(tmp_path / "log"),
        "AUTOPLAN_TEST_SLEEP": "0.5",
        "PYTHONPATH": os.getcwd(),
    }
    command = [sys.executable, "-c", DRIVER, str(tmp_path / "out")]
    process = subprocess.Popen(command, env=environment)
    cells = tmp_path / "out" / "cells"
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline and (not cells.exists() or len(list(cells.glob("*.json"))) < 3):
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    finished = {json.loads(file.read_text())["key"] for file in cells.glob("*.json")}
    before = (tmp_path / "log").read_text().splitlines()
    assert 3 <= len(finished) < 12
    assert subprocess.run(command, env=environment, timeout=400).returncode == 0
    assert len(list(cells.glob("*.json"))) == 12 == len(list((tmp_path / "out" / "plans").glob("*.json")))
    after = [line.split()[0] for line in (tmp_path / "log").read_text().splitlines()[len(before) :]]
    assert not finished & set(after) and len(after) == len(set(after)) == 12 - len(finished)
