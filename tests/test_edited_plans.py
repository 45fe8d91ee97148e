"""A plan that a person edits as JSON: another legal combination runs and is exact, an illegal one is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import autoplan
from autoplan import IllegalPlanError, PlanFileError, PlanMismatchError
from autoplan.capture import capture
from autoplan.verification import verify
from searchspace.plan import Plan
from searchspace.schedule import gpipe, tasks_text
from tests.capture.models import build
from tests.parity.plans import forced

CALL = build("gpt")
GRAPH = capture(*CALL).graph
UP = next(op.name for op in GRAPH.operators if op.module == "h.0.up")
NORM = next(op.name for op in GRAPH.operators if op.target == "aten.layer_norm.default")


def edited(tmp_path: Path, plan: Plan, edit: Callable[[dict[str, Any]], None]) -> Path:
    """The plan's file after ``edit`` of its JSON."""
    path = tmp_path / "plan.json"
    plan.save(path)
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(json.dumps(data))
    return path


def test_another_split_of_one_operator_is_exact(tmp_path: Path) -> None:
    plan = forced(GRAPH, 2, "tp")
    before = plan.transformation.operators[UP]
    rule = GRAPH.operator[UP].rule
    for label in rule.choices:
        if label and {"tp": label} != before:
            path = edited(
                tmp_path,
                plan,
                lambda data, label=label: data["transformation"]["operators"].update({UP: {"tp": label}}),
            )
            verify(*CALL, plan=path).raise_if_different()


def test_an_operator_moved_to_another_stage_is_exact(tmp_path: Path) -> None:
    plan = forced(GRAPH, 2, "pp 1f1b")

    def move(data: dict[str, Any]) -> None:
        first, second = data["placement"]["stages"]
        first["operators"].append(second["operators"].pop(0))

    verify(*CALL, plan=edited(tmp_path, plan, move)).raise_if_different()


def test_another_order_is_exact(tmp_path: Path) -> None:
    plan = forced(GRAPH, 2, "pp 1f1b")
    count = plan.transformation.micro_batches

    def reorder(data: dict[str, Any]) -> None:
        for lane, tasks in zip(data["order"]["lanes"], gpipe(2, count), strict=True):
            lane["tasks"] = tasks_text(tasks)

    verify(*CALL, plan=edited(tmp_path, plan, reorder)).raise_if_different()
    # micro-batches in another sequence, by hand
    assert count == 4

    def shuffle(data: dict[str, Any]) -> None:
        data["order"]["lanes"][0]["tasks"] = "0F2 0F0 0F3 0B2 0F1 0B0 0B3 0B1"
        data["order"]["lanes"][1]["tasks"] = "1F2 1B2 1F0 1B0 1F3 1B3 1F1 1B1"

    verify(*CALL, plan=edited(tmp_path, plan, shuffle)).raise_if_different()


def test_parts_of_two_plans_recombine() -> None:
    pipeline, flushed = forced(GRAPH, 4, "tp x pp"), forced(GRAPH, 4, "dp x pp")
    mixed = pipeline.replace(order=flushed.order)
    verify(*CALL, plan=mixed).raise_if_different()


def _split(name: str, axis: str, label: str) -> Callable[[dict[str, Any]], None]:
    return lambda data: data["transformation"]["operators"].update({name: {axis: label}})


def _stage(data: dict[str, Any]) -> dict[str, Any]:
    return data["placement"]["stages"][0]


ILLEGAL: dict[str, tuple[str, Callable[[dict[str, Any]], None], type[Exception], str]] = {
    "no such dimension": (
        "tp",
        _split(NORM, "tp", "zz"),
        IllegalPlanError,
        rf"'{NORM}'.* cannot be split along 'zz' .*its rule",
    ),
    "no such axis": (
        "tp",
        _split(UP, "up", "n"),
        IllegalPlanError,
        rf"'{UP}' is split over axis 'up'; its stage 0 has axes",
    ),
    "no such operator": (
        "tp",
        _split("h.9/linear", "tp", "n"),
        IllegalPlanError,
        "splits 'h.9/linear', which the model does not have",
    ),
    "operator left out": (
        "tp",
        lambda d: _stage(d)["operators"].remove(UP),
        IllegalPlanError,
        rf"operator '{UP}' is in no stage",
    ),
    "operator twice": (
        "pp 1f1b",
        lambda d: d["placement"]["stages"][1]["operators"].append(UP),
        IllegalPlanError,
        rf"operator '{UP}' is in stages \[0, 1\]",
    ),
    "stages backwards": (
        "pp 1f1b",
        lambda d: d["placement"]["stages"].reverse(),
        IllegalPlanError,
        "stages must be in forward order",
    ),
    "lacking task": (
        "pp 1f1b",
        lambda d: d["order"]["lanes"][0].update(tasks="0F0 0B0"),
        IllegalPlanError,
        r"lacks tasks .* of 4 micro-batches",
    ),
    "too many micro-batches": (
        "pp 1f1b",
        lambda d: d["transformation"].update(micro_batches=5),
        IllegalPlanError,
        "a batch of 4 is smaller than 5 micro-batches",
    ),
    "unknown region": (
        "dp",
        lambda d: d["transformation"].update(recompute=["h.7"]),
        IllegalPlanError,
        "region 'h.7' matches no operator or module",
    ),
    "unknown parameter": (
        "dp",
        lambda d: d["transformation"]["parameters"].update({"nope": {}}),
        IllegalPlanError,
        "places parameter 'nope'",
    ),
    "parameter as a sum": (
        "dp",
        lambda d: d["transformation"]["parameters"].update({"ln.weight": {"optimizer": {"dp": "P"}}}),
        IllegalPlanError,
        r"parameter 'ln.weight': optimizer placements must be R or S",
    ),
    "misspelt placement": (
        "dp",
        lambda d: d["transformation"]["parameters"].update({"ln.weight": {"optimizer": {"dp": "Q"}}}),
        PlanFileError,
        r"expected a placement R, P, P\(max\), S\(dim\)",
    ),
    "another model": (
        "dp",
        lambda d: d["model"].update(fingerprint="0" * 16),
        PlanMismatchError,
        "the plan was made for model 'GPT'",
    ),
    "another version": (
        "dp",
        lambda d: d.update(schema_version=99),
        PlanMismatchError,
        "schema version 99 is not supported",
    ),
}


@pytest.mark.parametrize("case", ILLEGAL)
def test_illegal_edits_are_refused_with_operator_and_rule(case: str, tmp_path: Path) -> None:
    name, edit, kind, message = ILLEGAL[case]
    path = edited(tmp_path, forced(GRAPH, 2, name), edit)
    with pytest.raises(kind, match=message):
        autoplan.parallelize(*CALL, plan=path)


def test_a_plan_for_another_shape_of_model_says_what_differs() -> None:
    plan = forced(GRAPH, 2, "dp")
    model, args, kwargs = build("gpt")
    model.ln = autoplan_norm(model.ln)
    with pytest.raises(PlanMismatchError, match=r"not in the plan: ln\.extra"):
        autoplan.parallelize(model, args, kwargs, plan=plan)


def autoplan_norm(norm: Any) -> Any:
    """The norm with one more parameter."""
    import torch

    class Extra(torch.nn.LayerNorm):
        def __init__(self) -> None:
            super().__init__(norm.normalized_shape, dtype=torch.float64)
            self.extra = torch.nn.Parameter(torch.ones((), dtype=torch.float64))

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) * self.extra

    return Extra()
