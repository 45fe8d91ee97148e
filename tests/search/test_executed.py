"""Searched plans run and are exact: mixtures of splits, sharded weights and recomputation under tight memory."""

from __future__ import annotations

import pytest

from autoplan.api import parallelize
from autoplan.capture import capture
from autoplan.report.comparison import compare
from autoplan.runtime.parallel import Parallel
from autoplan.search import SearchOptions, search_plan
from autoplan.verification import Trial, default_tolerance, outcome, single_device
from costmodel.cluster import Cluster
from searchspace.plan import Recipe
from tests.capture.models import build

OPTIONS = SearchOptions(runners_up=False, referees=1)


@pytest.mark.filterwarnings("ignore:cluster .* of the plan is unknown")
@pytest.mark.parametrize("ranks, share, stages", [(2, 0.5, None), (4, 0.5, (1,)), (4, 0.8, (2,)), (4, None, None)])
def test_plans_under_tight_memory_agree_with_the_single_device(ranks, share, stages):
    trial, call = Trial(), build("gpt")
    captured = capture(*call)
    entry = {"device": "cpu", "devices": ranks, "count": 1, "figures": {"memory.communication": "1 B"}}
    cluster = Cluster.parse({"nodes": [entry]})
    free = search_plan(captured.graph, cluster, Recipe(), options=OPTIONS)
    assert free.prediction is not None
    options = SearchOptions(runners_up=False, referees=1, stages=stages)
    limit = None if share is None else share * max(free.prediction.peak_bytes)
    plan = search_plan(captured.graph, cluster, Recipe(), memory_limit=limit, options=options)
    parallel = parallelize(captured, plan=plan)
    assert isinstance(parallel, Parallel)
    found = compare(
        single_device(*call, trial), outcome(parallel, call[1], call[2], trial, ()), default_tolerance(captured)
    )
    assert found.agrees, [found.worst(q) for q in ("loss", "gradient", "parameter")]
