"""The command line, against a stand-in for the API."""

import json
import pickle
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from typer.testing import CliRunner, Result

import autoplan
from autoplan.cli.app import app
from searchspace.errors import AutoplanError, RankLostError
from searchspace.plan import Plan
from tests.plans import fake_api, small_plan


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    made = fake_api()
    monkeypatch.setitem(sys.modules, "autoplan.api", made)
    monkeypatch.setattr(autoplan, "api", made, raising=False)
    monkeypatch.setitem(sys.modules, "autoplan.verification", made)
    monkeypatch.setattr(autoplan, "verification", made, raising=False)
    return made


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    small_plan().save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_plan_searches_on_meta_and_writes_the_plan(api: types.ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "new" / "plan.json"
    result = invoke(
        *("plan", "gpt-tiny", "--cluster", "h100:2x8", "--global-batch", 32, "--precision", "bf16", "--seed", 5),
        *("--memory-limit", "60 GiB", "--sequence", 16, "--set", "layers=3", "-o", path),
    )
    assert result.exit_code == 0, result.output
    ((name, given),) = api.calls
    assert name == "search" and given["cluster"] == "h100:2x8" and given["memory_limit"] == 60 * 2**30
    assert given["precision"] == "bf16" and given["seed"] == 5 and given["time_limit"] is None
    assert given["kwargs"]["tokens"].shape == (32, 16) and given["kwargs"]["tokens"].is_meta
    assert len(given["model"].layers) == 3
    assert Plan.load(path).recipe.global_batch == 32
    assert "Runners-up" in result.output and f"plan written to {path}" in result.output


def test_inference_is_planned_without_labels(api: types.ModuleType) -> None:
    assert invoke("plan", "bert-tiny", "--cluster", "cpu:1x2", "--mode", "inference").exit_code == 0
    assert "labels" not in api.calls[0][1]["kwargs"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plan", "gpt9", "--cluster", "h100"), "error: no model 'gpt9' in the zoo; did you mean"),
        (("plan", "no.py:f", "--cluster", "h100"), "error: no.py: no such file"),
        (
            ("plan", "gpt-tiny", "--cluster", "h100", "--set", "layers"),
            "error: expected --set NAME=VALUE, got 'layers'",
        ),
        (("plan", "gpt-tiny", "--cluster", "h100", "--memory-limit", "1KiB"), "error: needs 5 GiB per device"),
        (("show", "nothing.json"), "error: nothing.json: cannot read the plan"),
        (("cluster", "show", "h100:0x8"), "error: 0 devices in cluster spec 'h100:0x8'"),
        (("cluster", "show", "z100:1x8"), "z100"),
        (("run", "gpt-tiny", "--plan", "nothing.json"), "error: nothing.json: cannot read the plan"),
    ],
)
def test_errors_are_one_message_and_code_2(api: types.ModuleType, arguments: tuple, message: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr and "Traceback" not in result.stderr


def test_an_infeasible_search_writes_no_plan(api: types.ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    assert invoke("plan", "gpt-tiny", "--cluster", "h100", "--memory-limit", "5", "-o", path).exit_code == 2
    assert not path.exists()


@pytest.mark.parametrize(
    ("text", "message"), [("60 lions", "expected a quantity in bytes"), ("0", "more than 0 bytes")]
)
def test_bad_sizes_are_refused(api: types.ModuleType, text: str, message: str) -> None:
    result = invoke("plan", "gpt-tiny", "--cluster", "h100", "--memory-limit", text)
    assert result.exit_code == 2 and message in " ".join(result.stderr.split()).replace("│ ", "")


@pytest.mark.parametrize(
    ("command", "options"),
    [
        (command, option)
        for command, options in {
            "plan": ["--global-batch=0", "--global-batch=x", "--time-limit=nan", "--time-limit=-1", "--precision=int3",
                     "--memory-limit=-3", "--memory-limit=0", "--memory-limit=nan GiB", "--memory-limit=1 parsec",
                     "--mode=sleep", "--set=layers=abc", "--set=layers=True", "--set=layers=2.5", "--set=layers=0",
                     "--set=layers=None2", "--set=tied=3", "--set=nothing=3", "--set=3", "--dtype=int8", "--batch=-1",
                     "--sequence=0", "--seed=x"],
            "run": ["--steps=0", "--learning-rate=nan", "--learning-rate=-1", "--ranks=0", "--set=width=abc"],
            "verify": ["--tolerance=nan", "--tolerance=-1", "--tolerance=inf", "--show=0", "--set=width=[1]"],
        }.items()
        for option in options
    ],
)  # fmt: skip
def test_bad_values_are_refused_before_anything_runs(api: types.ModuleType, command: str, options: str) -> None:
    cluster = ["--cluster", "cpu:1x2"] if command == "plan" else []
    result = invoke(command, "gpt-tiny", *cluster, options)
    assert result.exit_code == 2 and not api.calls, result.output
    assert isinstance(result.exception, SystemExit) and "rror" in result.output
    name = options.removeprefix("--").removeprefix("set=").partition("=")[0]
    assert name in result.output  # says what is wrong


def test_where_no_plan_can_be_written_is_said_before_the_search(api: types.ModuleType, tmp_path: Path) -> None:
    result = invoke("plan", "gpt-tiny", "--cluster", "cpu:1x2", "-o", tmp_path)
    assert result.exit_code == 2 and "is a folder; give the name of a file" in result.output and not api.calls


def test_debug_shows_the_traceback(api: types.ModuleType) -> None:
    result = invoke("--debug", "plan", "gpt9", "--cluster", "h100")
    assert isinstance(result.exception, AutoplanError)


def test_ctrl_c_ends_with_130(api: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(api, "search", interrupted)
    result = invoke("plan", "gpt-tiny", "--cluster", "h100")
    assert result.exit_code == 130 and "interrupted" in result.stderr


def test_show_prints_the_tables(plan_file: Path) -> None:
    result = invoke("show", plan_file)
    assert result.exit_code == 0
    for text in ("tiny (0123456789abcdef)", "layers.{0-1}.up", "lower bound", "does not fit", "3.0 GiB"):
        assert text in result.output
    assert "stage 1  layers.3.up  tp:n" in invoke("show", plan_file, "--operators").output


def test_show_refuses_a_truncated_plan(plan_file: Path) -> None:
    plan_file.write_text(plan_file.read_text()[:100])
    result = invoke("show", plan_file)
    assert result.exit_code == 2 and "not JSON, or cut short" in result.stderr


def test_verify_compares_and_decides_the_exit_code(
    api: types.ModuleType, plan_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = invoke("verify", "gpt-tiny", "--plan", plan_file, "--steps", 2)
    assert good.exit_code == 0 and "agree" in good.output
    ((_, given),) = api.calls
    assert given["ranks"] == 4 and given["steps"] == 2 and given["plan"] == small_plan()
    assert given["kwargs"]["tokens"].shape[0] == 8  # the plan's global batch
    assert given["model"].token.weight.dtype.itemsize == 4  # float32, the zoo's default
    monkeypatch.setattr(api, "verify", fake_api(agree=False).verify)
    bad = invoke("verify", "gpt-tiny", "--plan", plan_file)
    assert bad.exit_code == 1 and "DISAGREE" in bad.output and "DIFFERENT" in bad.output


@pytest.mark.parametrize(
    ("precision", "arguments", "itemsize"),
    [
        ("float32", (), 8),
        ("bf16", (), 4),
        ("float32", ("--dtype", "bf16"), 2),
        (None, (), 8),
        (None, ("--dtype", "float32"), 4),
    ],
)
def test_the_dtype_is_the_plans(
    api: types.ModuleType, tmp_path: Path, precision: str | None, arguments: tuple[str, ...], itemsize: int
) -> None:
    given: tuple[object, ...] = ("--ranks", 2)
    if precision is not None:
        plan = small_plan()
        info = plan.model.model_copy(update={"signature": ("counter [1] int64", "w [3, 4] float64")})
        recipe = plan.recipe.model_copy(update={"precision": precision})
        plan.replace(model=info, recipe=recipe).save(tmp_path / "p.json")
        given = ("--plan", tmp_path / "p.json")
    assert invoke("verify", "mlp-tiny", *given, *arguments).exit_code == 0
    assert next(api.calls[0][1]["model"].parameters()).dtype.itemsize == itemsize


def test_ranks_that_the_plan_does_not_need_are_refused(api: types.ModuleType, plan_file: Path) -> None:
    result = invoke("verify", "gpt-tiny", "--plan", plan_file, "--ranks", 3)
    assert result.exit_code == 2 and "the plan needs 4 ranks, --ranks says 3" in result.stderr


def test_run_in_one_process_trains(api: types.ModuleType) -> None:
    result = invoke("run", "mlp-tiny", "--steps", 3, "--learning-rate", 0.01)
    assert result.exit_code == 0, result.output
    losses = [float(line.split()[3]) for line in result.output.splitlines()]
    assert len(losses) == 3 and losses[2] < losses[0]


def test_run_starts_the_ranks_and_reports_a_failure(
    api: types.ModuleType, plan_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []

    def spawn(function: Callable[..., None], ranks: int, *arguments: Any) -> None:
        started.append(ranks)
        pickle.dumps((function, arguments))
        raise RankLostError("rank 2 was killed by SIGKILL at step 1")

    monkeypatch.setattr("autoplan.runtime.launch.spawn", spawn)
    result = invoke("run", "mlp-tiny", "--plan", plan_file)
    assert started == [4]
    assert result.exit_code == 2 and "error: rank 2 was killed by SIGKILL at step 1" in result.stderr


def test_run_of_an_inference_plan(api: types.ModuleType, tmp_path: Path) -> None:
    plan = small_plan()
    plan.replace(recipe=plan.recipe.model_copy(update={"mode": "inference"})).save(tmp_path / "p.json")
    result = invoke("run", "mlp-tiny", "--plan", tmp_path / "p.json", "--steps", 1, "--in-process")
    assert result.exit_code == 0 and result.output.startswith("step 0  ") and "loss" not in result.output


def test_an_optimizer_that_torch_lacks(api: types.ModuleType, tmp_path: Path) -> None:
    plan = small_plan()
    plan.replace(recipe=plan.recipe.model_copy(update={"optimizer": "magic"})).save(tmp_path / "p.json")
    result = invoke("run", "mlp-tiny", "--plan", tmp_path / "p.json", "--in-process")
    assert result.exit_code == 2 and "optimizer 'magic' is not in torch.optim" in result.stderr


def test_schema_is_one_that_plans_satisfy(plan_file: Path) -> None:
    schema = json.loads(invoke("schema").output)
    jsonschema.validate(json.loads(plan_file.read_text()), schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"model": 3}, schema)


def test_lists_of_models_and_clusters() -> None:
    models = invoke("zoo").output
    assert "gpt3-175b" in models and "174,615.8 M" in models
    assert "h100" in invoke("cluster", "list").output
    assert "16 devices" in invoke("cluster", "show", "h100:2x8").output


def test_version() -> None:
    assert invoke("--version").output.startswith("autoplan 0.")
