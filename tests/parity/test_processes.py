"""A fixed sample of the grid in real processes over gloo; the whole grid is the slow suite."""

from __future__ import annotations

from typing import Any

import pytest

from autoplan.api import parallelize
from autoplan.capture import capture
from autoplan.report.comparison import Outcome, compare
from autoplan.runtime.launch import WorkerPool
from autoplan.verification import Trial, default_tolerance, outcome, single_device
from searchspace.plan import Plan
from tests.capture.models import MODELS, build
from tests.parity.plans import NAMED, forced

TRIAL = Trial()
SAMPLE = [
    ("gpt", 4, "everything"),
    ("gpt", 4, "tp x pp"),
    ("gpt", 2, "zero 3"),
    ("hf_llama", 4, "tp sequence"),
    ("hf_gpt2", 2, "pp 1f1b"),
    ("hf_bert", 4, "dp x tp"),
    ("hf_vit", 2, "uneven stages"),
    ("resnet", 4, "dp"),
]
WHOLE = [
    (model, ranks, name)
    for model in MODELS
    for ranks, plans in NAMED.items()
    for name, settings in plans.items()
    if (model, ranks, name) not in SAMPLE and not (model == "resnet" and settings.get("micro_batches", 1) > 1)
]


def train(model: str, text: str) -> Outcome:
    """One rank's part of the training."""
    module, args, kwargs = build(model)
    parallel = parallelize(module, args, kwargs, plan=Plan.from_json(text))
    return outcome(parallel, args, kwargs, TRIAL, ())


def check(pool: WorkerPool, model: str, ranks: int, name: str) -> None:
    module, args, kwargs = build(model)
    captured = capture(module, args, kwargs)
    plan = forced(captured.graph, ranks, name)
    wanted = single_device(module, args, kwargs, TRIAL)
    results: list[Any] = pool.run(train, model, plan.to_json(), ranks=ranks)
    assert len(results) == ranks
    for found in results:  # every rank sees the same losses, gradients and parameters
        comparison = compare(wanted, found, default_tolerance(captured))
        assert comparison.agrees, [comparison.worst(q) for q in ("loss", "gradient", "parameter")]


@pytest.mark.parametrize(("model", "ranks", "name"), SAMPLE)
def test_processes_agree_with_the_single_device(model: str, ranks: int, name: str, pool: WorkerPool) -> None:
    check(pool, model, ranks, name)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "ranks", "name"), WHOLE)
def test_the_whole_grid_in_processes(model: str, ranks: int, name: str, pool: WorkerPool) -> None:
    check(pool, model, ranks, name)
