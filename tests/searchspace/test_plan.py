"""The plan file: what is written is what is read, and what cannot be read says where."""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path

import jsonschema
import pytest

from searchspace.errors import IllegalPlanError, PlanFileError, PlanMismatchError
from searchspace.plan import Order, Plan, write_atomically
from tests.search.models import gpt
from tests.searchspace.plans import megatron

PLAN = megatron(gpt(layers=1), dp=2, tp=2, pp=2, micro_batches=2)


def test_json_round_trip_is_stable(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "plan.json"
    PLAN.save(path)
    again = Plan.load(path)
    assert again == PLAN
    assert again.to_json() == path.read_text()
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o644


def test_the_published_schema_accepts_plans_and_refuses_unknown_fields() -> None:
    schema = Plan.json_schema()
    data = json.loads(PLAN.to_json())
    jsonschema.validate(data, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**data, "colour": "red"}, schema)


def test_parts_recombine_and_predictions_do_not_survive_that() -> None:
    other = megatron(gpt(layers=1), dp=2, tp=2, pp=2, micro_batches=2, schedule="gpipe")
    mixed = PLAN.replace(order=other.order)
    assert mixed.order == other.order and mixed.transformation == PLAN.transformation
    assert mixed.prediction is None and PLAN.order != other.order


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t[: len(t) // 2], r"not JSON, or cut short: .* at line \d+ column \d+"),
        (lambda t: "[]", "expected a JSON object, got list"),
        (lambda t: "{}", "/model: Field required"),
        (lambda t: t.replace('"micro_batches": 2', '"micro_batches": "two"'), "/transformation/micro_batches: "),
        (lambda t: t.replace('"micro_batches": 2', '"micro_batches": "2"'), "/transformation/micro_batches: .*integer"),
        (
            lambda t: t.replace('"micro_batches": 2', '"micro_batches": true'),
            "/transformation/micro_batches: .*integer",
        ),
        (lambda t: t.replace('"schema_version": 1', '"schema_version": true'), "/schema_version: .*integer"),
        (lambda t: t.replace('"recipe": {', '"recipe": {}, "recipe": {'), "the key 'recipe' is there twice"),
        (lambda t: t.replace('"global_batch": null', '"global_batch": 0'), "/recipe/global_batch: "),
        (
            lambda t: re.sub(r'"devices": \d+\n', '"devices": 7\n', t, count=1),
            "/cluster/devices: .* has 7 devices, .* 7",
        ),
        (lambda t: "[" * 100_000, "recursion"),
        (lambda t: t.replace('"recipe": {', '"colour": 1, "recipe": {'), "/colour: Extra inputs are not permitted"),
        (lambda t: t.replace("0F0", "0G0"), "/order/lanes/0: .*expected a task like 0F3"),
        (lambda t: t.replace('"dp": 2,', '"dp": 3,', 1), r"/placement/stages/0: .*mesh axes .* need 6 devices, got 4"),
    ],
)
def test_broken_files_say_where(edit, message: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "plan.json"
    path.write_text(edit(PLAN.to_json()))
    with pytest.raises(PlanFileError, match=message) as error:
        Plan.load(path)
    assert str(path) in str(error.value)


def test_another_schema_version_is_refused_with_both_versions() -> None:
    text = PLAN.to_json().replace('"schema_version": 1', '"schema_version": 7')
    with pytest.raises(PlanMismatchError, match="schema version 7 is not supported; this autoplan reads version 1"):
        Plan.from_json(text)


def test_a_missing_file_is_an_error_of_ours(tmp_path: Path) -> None:
    with pytest.raises(PlanFileError, match="cannot read the plan"):
        Plan.load(tmp_path / "nothing.json")


def test_where_no_file_can_be_is_said_before(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    for path, message in [(tmp_path, "is a folder"), (tmp_path / "file" / "plan.json", "is no folder")]:
        with pytest.raises(PlanFileError, match=message):
            PLAN.save(path)
    assert (tmp_path / "file").read_text() == "kept"


def test_an_interrupted_save_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    PLAN.save(path)
    before = path.read_text()

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, "half")
    assert path.read_text() == before
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_a_device_in_two_lanes_is_refused() -> None:
    from searchspace.order import global_order

    plan = megatron(gpt(layers=1), tp=2)
    lane = plan.order.lanes[0]
    with pytest.raises(IllegalPlanError, match="device 0 is in two lanes"):
        global_order(plan.replace(order=Order(lanes=(lane, lane))), {}, None)
