"""A sweep's plans are those of single searches, also when it was killed in between."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas
import pytest

from autoplan import api, zoo
from autoplan.sweep import sweep
from searchspace.plan import Plan

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore::ResourceWarning")]

MODELS, CLUSTERS, BATCHES = ("gpt-tiny", "mlp-tiny"), ("cpu:1x1", "cpu:1x2", "cpu:1x4"), (8, 16)
GRID = {"models": MODELS, "clusters": CLUSTERS, "global_batch": BATCHES}
DRIVER = f"import sys; from autoplan.sweep import sweep; sweep({{'grid': {GRID}}}, storage=sys.argv[1])"


def decided(plan: Plan) -> Plan:
    """The plan without the seconds that its search took."""
    assert plan.search is not None
    return plan.model_copy(update={"search": plan.search.model_copy(update={"seconds": 0.0})})


def test_a_killed_and_resumed_sweep_equals_single_searches(tmp_path: Path) -> None:
    cells = tmp_path / "cells"
    process = subprocess.Popen([sys.executable, "-c", DRIVER, str(tmp_path)], cwd=os.getcwd())
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and len(list(cells.glob("*.json"))) < 4:
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = {file.name: file.stat().st_mtime_ns for file in cells.glob("*.json")}
    assert 4 <= len(before) < 12

    done = sweep({"grid": GRID}, storage=tmp_path)
    assert done.missing == 0 and not done.failed and len(done.results) == 12
    assert {name: (cells / name).stat().st_mtime_ns for name in before} == before
    for result in done.results:
        assert result.global_batch is not None
        model, args, kwargs = zoo.build(result.model)
        single = api.search(model, args, kwargs, cluster=result.cluster, global_batch=result.global_batch)
        found = done.plan(result)
        assert found is not None and decided(found) == decided(single)
    table = pandas.read_parquet(tmp_path / "results.parquet")
    assert list(table["status"]) == ["ok"] * 12 and table["step_seconds"].min() > 0
