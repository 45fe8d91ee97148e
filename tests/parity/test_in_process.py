"""Every model of the grid under every plan of the grid, all ranks in one process, in float64.

Loss, every gradient, and parameters after three clipped AdamW steps equal the single device's.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from autoplan.api import parallelize
from autoplan.capture import Captured, capture
from autoplan.report.comparison import Outcome, compare
from autoplan.runtime.parallel import Parallel
from autoplan.verification import Trial, default_tolerance, outcome, single_device
from searchspace.errors import IllegalPlanError
from searchspace.layout import parse_placement
from searchspace.plan import Recipe
from tests.capture.models import MODELS, build
from tests.parity.plans import NAMED, forced

TRIAL = Trial()


@cache
def reference(model: str) -> tuple[Captured, Any, Outcome]:
    call = build(model)
    return capture(*call), call, single_device(*call, TRIAL)


def coupled_batch(model: str, plan: dict[str, Any]) -> bool:
    """Batch statistics cannot be cut into micro-batches: the one refusal that is right."""
    return model == "resnet" and plan.get("micro_batches", 1) > 1


@pytest.mark.parametrize("ranks", NAMED)
@pytest.mark.parametrize("model", MODELS)
def test_plans_agree_with_the_single_device(model: str, ranks: int) -> None:
    captured, (_, args, kwargs), wanted = reference(model)
    for name, settings in NAMED[ranks].items():
        if coupled_batch(model, settings):
            with pytest.raises(IllegalPlanError, match="couples the samples of a batch"):
                parallelize(captured, plan=forced(captured.graph, ranks, name))
            continue
        parallel = parallelize(captured, plan=forced(captured.graph, ranks, name))
        assert isinstance(parallel, Parallel)
        found = compare(wanted, outcome(parallel, args, kwargs, TRIAL, ()), default_tolerance(captured))
        assert found.agrees, f"{model} under {name}: {[found.worst(q) for q in ('loss', 'gradient', 'parameter')]}"


@pytest.mark.parametrize("model", MODELS)
def test_forward_of_inference_plans_equals_the_model(model: str) -> None:
    module, args, kwargs = build(model)
    module.eval()
    kwargs = {k: v for k, v in kwargs.items() if k != "labels"} if model.startswith("hf") else kwargs
    captured = capture(module, args, kwargs, mode="inference")
    with torch.no_grad():
        wanted = module(*args, **kwargs)
    for name in ("dp", "tp", "pp 1f1b"):
        plan = forced(captured.graph, 2, name, Recipe(mode="inference"))
        got = parallelize(captured, plan=plan)(*args, **kwargs)
        assert type(got) is type(wanted)
        pairs = [(got, wanted)] if isinstance(got, torch.Tensor) else [(got[k], wanted[k]) for k in wanted if k in got]
        for a, b in pairs:
            if isinstance(b, torch.Tensor):
                tolerance = default_tolerance(captured)
                assert (a - b).abs().max() <= tolerance * max(1.0, float(b.abs().max())), (model, name)


def test_the_grid_holds_what_it_says() -> None:
    """The plans are what their names say, not all the same fallback."""
    captured, _, _ = reference("gpt")
    graph = captured.graph
    tp = forced(graph, 2, "tp").transformation
    assert any(labels.get("tp") for labels in tp.operators.values())
    zero = forced(graph, 2, "zero 3").transformation
    split = [s for p in zero.parameters.values() for site in p.sites.values() for s in site.stored.values()]
    assert any(str(parse_placement(s)).startswith("S") for s in split)
    sizes = [len(stage.operators) for stage in forced(graph, 2, "uneven stages").placement.stages]
    assert len(sizes) == 2 and sizes[0] != sizes[1]
    assert forced(graph, 2, "recompute").transformation.recompute
    assert forced(graph, 4, "pp 1f1b").order != forced(graph, 4, "pp gpipe").order
