"""Whatever the search returns is exact: on 2 and 4 devices, with memory to spare and with hardly enough."""

from __future__ import annotations

import pytest

import autoplan
from autoplan import InfeasibleError, Plan
from autoplan.capture import Captured, capture
from autoplan.report.comparison import Outcome, compare
from autoplan.runtime.launch import WorkerPool
from autoplan.verification import Trial, default_tolerance, outcome, single_device
from tests.capture.models import MODELS, build

TRIAL = Trial()
CLUSTERS = ("cpu:1x2", "cpu:1x4", "a100-80gb:1x4")


def searched(captured: Captured, cluster: str) -> list[Plan]:
    """The plan with all memory, and the plan that has to live with little more than the least."""
    roomy = autoplan.search(captured, cluster=cluster)
    assert roomy.prediction is not None
    peak = max(roomy.prediction.peak_bytes)
    with pytest.raises(InfeasibleError) as error:
        autoplan.search(captured, cluster=cluster, memory_limit=1)
    assert error.value.missing_bytes is not None
    least = 1 + error.value.missing_bytes
    tight = autoplan.search(captured, cluster=cluster, memory_limit=least + (peak - least) // 4)
    assert tight.prediction is not None and tight.prediction.seconds >= roomy.prediction.seconds
    return [roomy, tight]


@pytest.mark.parametrize("model", MODELS)
def test_searched_plans_agree_with_the_single_device(model: str) -> None:
    module, args, kwargs = build(model)
    captured = capture(module, args, kwargs)
    wanted = single_device(module, args, kwargs, TRIAL)
    for cluster in CLUSTERS:
        for plan in searched(captured, cluster):
            found = outcome(autoplan.parallelize(captured, plan=plan), args, kwargs, TRIAL, ())
            comparison = compare(wanted, found, default_tolerance(captured))
            assert comparison.agrees, (model, cluster, [comparison.worst(q) for q in ("loss", "gradient", "parameter")])


def without_a_plan(model: str) -> tuple[str, Outcome]:
    """One rank of a job that lets autoplan search; every rank must get the same plan."""
    module, args, kwargs = build(model)
    parallel = autoplan.parallelize(module, args, kwargs)
    return parallel.information["plan"], outcome(parallel, args, kwargs, TRIAL, ())


@pytest.mark.parametrize("model", ["gpt", "hf_llama"])
def test_ranks_that_search_for_themselves_agree(model: str, pool: WorkerPool) -> None:
    module, args, kwargs = build(model)
    wanted = single_device(module, args, kwargs, TRIAL)
    tolerance = default_tolerance(capture(module, args, kwargs))
    results = pool.run(without_a_plan, model)
    assert len({text for text, _ in results}) == 1
    assert Plan.from_json(results[0][0]).world_size == 4
    for _, found in results:
        assert compare(wanted, found, tolerance).agrees
