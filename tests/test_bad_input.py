"""Bad input through the public face: an exception of our own tree that says what is wrong, where, and what to do."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autoplan
from autoplan import (
    AutoplanError,
    CaptureError,
    ClusterError,
    IllegalPlanError,
    InfeasibleError,
    PlanMismatchError,
    RankLostError,
    VerificationError,
    zoo,
)
from autoplan.runtime.launch import WorkerPool
from tests.capture.models import build
from tests.parity.plans import forced

X = torch.randn(4, 8)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        if y.sum() > 0:  # the line that the message must name
            return y.mean()
        return (-y).mean()


def line_of(text: str) -> int:
    """The number of the line of this file that holds ``text``."""
    return next(i for i, line in enumerate(Path(__file__).read_text().splitlines(), 1) if text in line)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda x: x, "got function: put it into the forward"),
        (nn.Linear, "got the class Linear"),
        (nn.Linear(8, 8).state_dict(), "if this is a state_dict, build the module"),
        (None, "got None"),
        (torch.jit.trace(nn.Linear(8, 8), X), "ScriptModule|TopLevelTracedModule"),
        (nn.DataParallel(nn.Linear(8, 8)), "unwrap"),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_is_no_plain_module_is_refused(model: Any, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        autoplan.search(model, (X,), cluster="cpu:1x2")


def test_control_flow_on_data_names_module_and_line_and_says_what_to_do() -> None:
    where = rf"Branches.*{re.escape(Path(__file__).name)}:{line_of('the line that the message must name')}.*torch.where"
    with pytest.raises(CaptureError, match=where):
        autoplan.search(Branches(), (X,), cluster="cpu:1x2")


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        ("h100:0x8", "0 devices in cluster spec"),
        ("h100:1x0", "0 devices in cluster spec"),
        ("h1000:1x8", "h1000.*h100"),
        ("nonsense", "nonsense"),
        ({"nodes": []}, "0 devices|nodes"),
    ],
)
def test_clusters_that_do_not_exist(cluster: Any, message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        autoplan.search(*zoo.build("gpt-tiny", batch=4), cluster=cluster)


def test_nothing_fits_says_by_how_much_and_what_would_help() -> None:
    with pytest.raises(InfeasibleError, match=r"needs .* per device.*limit.*missing.*would fit") as error:
        autoplan.search(*zoo.build("gpt3-13b", batch=8, sequence=2048), cluster="a100-40gb:1x2", precision="bf16")
    assert (error.value.missing_bytes or 0) > 2**30


def test_no_loss_says_how_to_give_one() -> None:
    with pytest.raises(CaptureError, match="loss_fn"):
        autoplan.search(nn.Linear(8, 8), (X,), cluster="cpu:1x2")


def test_a_batch_too_small_for_the_plan_says_the_numbers() -> None:
    model, args, kwargs = build("gpt")
    plan = forced(autoplan.capture.capture(model, args, kwargs).graph, 2, "pp 1f1b")  # type: ignore[attr-defined]
    few = tuple(a[:3] for a in args)
    with pytest.raises(IllegalPlanError, match="a batch of 3 is smaller than 4 micro-batches"):
        autoplan.parallelize(model, few, kwargs, plan=plan)


def test_a_call_of_another_shape_says_which_input() -> None:
    model, args, kwargs = build("gpt")
    parallel = autoplan.parallelize(model, args, kwargs, cluster="cpu:1x1")
    with pytest.raises(AutoplanError, match=r"args\.0|batch"):
        parallel.train_step(args[0][:2], args[1])


def test_precision_that_the_plan_was_not_made_for() -> None:
    model, args, kwargs = build("gpt")
    plan = autoplan.search(model, args, kwargs, cluster="cpu:1x1")
    with pytest.raises(PlanMismatchError, match=r"precision='bf16' was asked for, but .* 'float32'"):
        autoplan.parallelize(model, args, kwargs, plan=plan, precision="bf16")


def test_meta_models_cannot_be_verified() -> None:
    with pytest.raises(VerificationError, match="meta"):
        autoplan.verify(*zoo.build("gpt-tiny", batch=4), ranks=2)


def train_and_die(victim: int) -> None:
    """Three steps; in the second one rank kills itself in the middle."""
    model, args, kwargs = build("gpt")
    graph = autoplan.capture.capture(model, args, kwargs).graph  # type: ignore[attr-defined]
    parallel = autoplan.parallelize(model, args, kwargs, plan=forced(graph, 2, "pp 1f1b"), timeout_seconds=20)
    for step in range(3):
        if step == 1 and torch.distributed.get_rank() == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        parallel.train_step(*args, **kwargs)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_ends_all_ranks(victim: int) -> None:
    with WorkerPool(2, timeout_seconds=20) as workers:
        with pytest.raises(RankLostError, match=f"rank {victim} was killed by SIGKILL"):
            workers.run(train_and_die, victim)
        pids = workers.pids
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_plan_for_more_ranks_than_were_started(pool: WorkerPool) -> None:
    model, args, kwargs = build("gpt")
    plan = forced(autoplan.capture.capture(model, args, kwargs).graph, 4, "dp")  # type: ignore[attr-defined]
    with pytest.raises(PlanMismatchError, match="the plan needs 4 ranks, but 2 were started"):
        pool.run(run_plan, plan.to_json(), ranks=2)


def run_plan(text: str) -> None:
    model, args, kwargs = build("gpt")
    autoplan.parallelize(model, args, kwargs, plan=autoplan.Plan.from_json(text))
