"""Ray: the only file that starts it.  Local by default, on the loopback interface only."""

from __future__ import annotations

import logging
import os
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from autoplan.sweep.cell import Cell, CellResult, run_cell
from searchspace.errors import SweepError
from searchspace.plan import Plan

OBJECT_STORE_BYTES = 256 * 2**20
"""Captures are a few MiB each."""
CONNECT_TIMEOUT_S = 5.0

_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
}
_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Without clusters Ray listens on 127.0.0.1 only, on every system."""

Commit = Callable[[CellResult, str | None], None]
Run = Callable[[Cell, Any], tuple[CellResult, Plan | None]]


def require(local: bool) -> None:
    """SweepError that names the extra to install when a library of sweeps is missing."""
    for name, value in (_QUIET | _LOOPBACK if local else _QUIET).items():
        os.environ.setdefault(name, value)  # read by Ray when it is imported
    try:
        import pandas  # noqa: F401
        import pyarrow  # noqa: F401
        import ray.tune  # noqa: F401
    except ImportError as error:
        raise SweepError(
            f"sweeps need {error.name or 'ray'}, which is not installed: pip install 'autoplan-torch[sweep]'"
        ) from None


@contextmanager
def connected(address: str | None, cpus_per_cell: float) -> Iterator[None]:
    """Ray for the time of the block: the caller's own, the cluster at ``address``, or a local one.

    Raises SweepError within seconds when the cluster cannot be reached, or no node has the CPUs of a cell.
    """
    import ray

    mine = not ray.is_initialized()
    if mine:
        _start(address)
    try:
        nodes = [n["Resources"].get("CPU", 0.0) for n in ray.nodes() if n["Alive"]]
        if max(nodes, default=0.0) < cpus_per_cell:
            raise SweepError(
                f"a cell asks for {cpus_per_cell:g} CPUs, the largest of {len(nodes)} Ray nodes has "
                f"{max(nodes, default=0.0):g}"
            )
        yield
    finally:
        if mine:
            ray.shutdown()


def run_cells(
    cells: Sequence[Cell], captures: Mapping[tuple[str, int | None], Any], commit: Commit, cpus_per_cell: float
) -> None:
    """Search all cells with Ray Tune; ``commit`` is called in this process for each as it ends."""
    from ray import tune

    plain = [cell.portable for cell in cells]
    trainable = tune.with_parameters(_trial, cells=plain, captures=dict(captures), run=run_cell)
    with tempfile.TemporaryDirectory(prefix="autoplan-sweep-") as scratch:
        tune.Tuner(
            tune.with_resources(trainable, {"cpu": cpus_per_cell}),
            param_space={"index": tune.grid_search(list(range(len(cells))))},
            tune_config=tune.TuneConfig(reuse_actors=True),
            run_config=tune.RunConfig(
                name="cells",
                storage_path=scratch,
                verbose=0,
                failure_config=tune.FailureConfig(max_failures=0, fail_fast=False),
                callbacks=[_committer(plain, commit)],
            ),
        ).fit()


def _trial(config: Mapping[str, Any], cells: Sequence[Cell], captures: Mapping[Any, Any], run: Run) -> dict[str, Any]:
    cell = cells[config["index"]]
    result, plan = run(cell, captures[cell.capture_key])
    return {"result": result, "plan": None if plan is None else plan.to_json()}


def _committer(cells: Sequence[Cell], commit: Commit) -> Any:
    from ray.tune import Callback

    class Committer(Callback):
        """Commits what trials report; a trial whose process died is a failed cell."""

        def __reduce__(self) -> tuple[type[Callback], tuple[()]]:
            return Callback, ()  # Tune saves its callbacks; this one belongs to this process

        def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: Any, **_: Any) -> None:
            if "result" in result:
                commit(result["result"], result["plan"])

        def on_trial_error(self, iteration: int, trials: Any, trial: Any, **_: Any) -> None:
            message = f"worker failed: {_last_words(Path(trial.error_file))}"
            commit(CellResult.of(cells[trial.config["index"]], "failed", error=message), None)

    return Committer()


def _last_words(file: Path) -> str:
    """What Tune wrote about the death of a worker: the last line, without Ray's list of common causes."""
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except OSError:
        lines = []
    text = lines[-1] if lines else "no message"
    return text.partition("Some common causes")[0].strip()[:500]


def _start(address: str | None) -> None:
    import ray

    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)  # failed cells are reported by us
    quiet: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
    try:
        if address is None:
            ray.init(
                address="local",
                num_cpus=len(os.sched_getaffinity(0)),
                num_gpus=0,
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                **quiet,
            )
        else:
            _reachable(address)
            ray.init(address=address, **quiet)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise SweepError(f"cannot start Ray at {address or 'this machine'}: {error}") from None


def _reachable(address: str) -> None:
    """Fail now rather than after Ray's own minutes of trying."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S).close()
