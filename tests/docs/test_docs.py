"""The documentation: commands parse and run, examples run, fields and links exist."""

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

from autoplan.cli.app import app
from searchspace.plan import Plan

ROOT = Path(__file__).parents[2]
USAGE_ERROR: Any = typer.BadParameter.__base__
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, language: str) -> Iterator[tuple[str, str]]:
    """(rest of the info string, text) of each fenced block."""
    for info, text in re.findall(r"^```(.*?)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
        first, _, rest = info.partition(" ")
        if first == language:
            yield rest, text


def commands(page: Path, run: bool | None = None) -> list[list[str]]:
    """The command lines of a page; only those that are to be run, or not, when asked."""
    return [
        shlex.split(line, comments=True)
        for info, text in blocks(page, "bash")
        if run is None or run == (info != "parse-only")
        for line in text.splitlines()
        if line.strip()
    ]


def parse(words: list[str]) -> None:
    """Raise unless ``autoplan`` has the command and each option, with a value of the right type."""
    command: Any = get_command(app)
    while hasattr(command, "commands"):
        name, *words = words
        command = command.commands[name]
    command.make_context(command.name, words)


def targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_is_one_that_exists(page: Path) -> None:
    for words in commands(page):
        match words:
            case ["autoplan", *rest]:
                parse(rest)
            case ["make", target]:
                assert target in targets(), words
            case ["torchrun", *_]:
                parse(words[words.index("autoplan") + 1 :])
            case _:
                pytest.fail(f"{page.name}: nobody runs {words}")


def test_the_parser_notices_what_does_not_exist() -> None:
    for wrong in (["plan", "m", "--clusters", "x"], ["plan", "m"], ["run", "m", "--steps", "0"]):
        with pytest.raises(USAGE_ERROR):
            parse(wrong)
    with pytest.raises(KeyError):
        parse(["plans"])


def test_continuous_integration_runs_the_readmes_test_command() -> None:
    assert ["make", "test"] in commands(ROOT / "README.md")
    assert "make test" in (ROOT / ".ci" / "run").read_text().splitlines()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", [page for page in PAGES if commands(page, run=True)], ids=lambda page: page.name)
def test_commands_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for _, text in blocks(page, "toml"):
        (tmp_path / "sweep.toml").write_text(text)
    for words in commands(page, run=True):
        result = CliRunner().invoke(app, words[1:])
        assert result.exit_code == 0, f"{shlex.join(words)}\n{result.output}\n{result.exception!r}"


@pytest.mark.parametrize("page", [page for page in PAGES if list(blocks(page, "python"))], ids=lambda page: page.name)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_python_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "example"}
    for _, text in blocks(page, "python"):
        exec(compile(text, str(page), "exec"), names)
    if "plan.save" in page.read_text():
        assert Plan.load(tmp_path / "plan.json").world_size <= 4


def test_the_plan_format_names_every_field() -> None:
    page = (ROOT / "docs" / "plan-format.md").read_text()
    schema = Plan.json_schema()
    parts = [schema, *schema["$defs"].values()]
    missing = [field for part in parts for field in part.get("properties", {}) if f"`{field}`" not in page]
    assert not missing


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_first_screen_shows_what_it_is_and_two_commands() -> None:
    """Within fifty lines: one table, and the first block of commands is exactly two."""
    lines = (ROOT / "README.md").read_text().splitlines()
    assert sum(line.startswith("|---") for line in lines[:50]) == 1
    assert commands(ROOT / "README.md")[:2] == [["make", "demo"], ["make", "test"]]


def test_the_help_lists_every_target() -> None:
    described = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert targets() == described and {"help", "demo", "test", "check"} <= described


def test_python_of_the_tests_is_one_that_the_package_supports() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    least = tuple(map(int, project["requires-python"].removeprefix(">=").split(".")))
    assert sys.version_info >= least
