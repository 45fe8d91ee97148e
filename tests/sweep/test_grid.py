"""Grids: the product, the file format, resized clusters, keys of cells."""

import threading
from pathlib import Path

import pytest

from autoplan.sweep.cell import Cell
from autoplan.sweep.grid import Grid, read, resized
from searchspace.errors import AutoplanError, ClusterError, SweepError

TEXT = """
output = "out"

[grid]
models = ["gpt-tiny", "models.py:build"]
clusters = ["h100", "a100-80gb:1x4"]
devices = [4, 8]
global_batch = [16, 32, 64]
memory_limit = ["60 GiB", "20 GB"]

[search]
optimizer = "adamw"

[model]
layers = 3
"""


def test_cells_are_the_product_with_the_last_list_fastest(tmp_path: Path) -> None:
    (tmp_path / "models.py").write_text("")
    (tmp_path / "sweep.toml").write_text(TEXT)
    file = read(tmp_path / "sweep.toml")
    cells = file.grid.cells()
    assert file.output == tmp_path / "out"
    assert len(cells) == 2 * (2 * 2) * 3 * 2 and len({cell.key for cell in cells}) == len(cells)
    assert [cell.memory_limit for cell in cells[:2]] == [60 * 2**30, 20 * 10**9]
    assert [cell.global_batch for cell in cells[:6:2]] == [16, 32, 64]
    assert cells[0].model == "gpt-tiny" and cells[-1].model == f"{tmp_path}/models.py:build"
    assert list(dict.fromkeys(c.cluster for c in cells)) == ["h100:1x4", "h100:1x8", "a100-80gb:1x4", "a100-80gb:2x4"]
    assert cells[0].search == {"optimizer": "adamw"} and cells[0].model_options == {"layers": 3}


def test_single_values_need_no_list() -> None:
    (cell,) = read({"grid": {"models": "gpt-tiny", "clusters": "cpu:1x2"}}).grid.cells()
    assert (cell.model, cell.cluster, cell.global_batch, cell.memory_limit) == ("gpt-tiny", "cpu:1x2", None, None)


@pytest.mark.parametrize(
    ("cluster", "devices", "expected"),
    [
        ("h100", None, "h100:1"),
        ("h100:2x4", None, "h100:2x4"),
        ("h100", 2, "h100:1x2"),
        ("h100", 8, "h100:1x8"),
        ("h100", 32, "h100:4x8"),
        ("h100:2x4", 8, "h100:2x4"),
        ("h100:2x4", 3, "h100:1x3"),
    ],
)
def test_resized(cluster: str, devices: int | None, expected: str) -> None:
    assert resized(cluster, devices) == expected


def test_clusters_that_become_equal_are_one_cell() -> None:
    cells = Grid(("gpt-tiny",), ("h100", "h100:2x8"), devices=(8,)).cells()
    assert [cell.cluster for cell in cells] == ["h100:1x8"]


def test_the_key_follows_everything_that_decides_the_result(tmp_path: Path) -> None:
    def build() -> None: ...

    (tmp_path / "m.py").write_text("")
    base = {"model": "gpt-tiny", "cluster": "h100:1x2", "global_batch": 4, "options": {"seed": 1}}
    changes: list[dict] = [
        {"model": "llama-tiny"}, {"cluster": "h100:1x4"}, {"global_batch": 8}, {"sequence": 5}, {"memory_limit": 5},
        {"options": {"seed": 2}}, {"options": {"seed": 1, "loss_fn": build}}, {"model_options": {"layers": 1}},
        {"model": f"{tmp_path}/m.py:f"}, {"model": build},
    ]  # fmt: skip
    keys = [Cell.of(**{**base, **change}).key for change in [{}, *changes]]
    assert len(set(keys)) == len(keys) and keys[0].startswith("gpt-tiny-h100-1x2-b4-")
    assert [Cell.of(**{**base, **change}).key for change in [{}, *changes]] == keys
    (tmp_path / "m.py").write_text("# another model")
    assert Cell.of(**{**base, "model": f"{tmp_path}/m.py:f"}).key != keys[-2]


def test_options_of_the_capture_stay_behind() -> None:
    lock = threading.Lock()
    cell = Cell.of("gpt-tiny", "h100:1x2", options={"seed": 1, "loss_fn": lambda: lock, "mode": "train"})
    assert cell.search == {"seed": 1} and list(cell.capture) == ["loss_fn", "mode"]
    assert cell.portable.capture == {} and cell.portable.key == cell.key


def test_options_that_are_no_json_have_stable_keys() -> None:
    keys = {Cell.of("gpt-tiny", "h100:1x2", options={"constraints": Path(name)}).key for name in ("x", "x", "y")}
    assert len(keys) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grid": {"models": ["gpt-tiny"]}}, "grid.clusters is missing"),
        ({"grid": {"models": [], "clusters": ["h100"]}}, "grid.models is empty"),
        ({"grid": {"models": ["a", "a"], "clusters": ["h100"]}}, "grid.models holds a value twice"),
        (
            {"grid": {"models": ["a"], "clusters": ["h100"], "gpus": 3}},
            "sweep: grid: unknown keys gpus; known are models",
        ),
        (
            {"grid": {"models": ["a"], "clusters": ["h100"], "devices": [0]}},
            "grid.devices: expected whole numbers >= 1",
        ),
        ({"grid": {"models": ["a"], "clusters": ["h100"]}, "search": {"memory_limit": 3}}, "belongs into"),
        ({"grid": {"models": ["a"], "clusters": ["h100"]}, "search": 3}, "expected a table"),
        ({"grid": {"models": ["a"], "clusters": ["h100"]}, "Search": {}}, "unknown keys Search"),
        ({}, r"expected a table \[grid\]"),
    ],
)
def test_wrong_grids_are_explained(change: dict, message: str) -> None:
    with pytest.raises(SweepError, match=message):
        read(change)


@pytest.mark.parametrize(
    ("grid", "error", "message"),
    [
        ({"clusters": ["h100"], "devices": [12]}, SweepError, "12 devices are no whole number of h100 nodes of 8"),
        ({"clusters": ["z100"], "devices": [8]}, ClusterError, "z100"),
        ({"clusters": ["h100:1x8+v100-32gb:1x8"], "devices": [8]}, SweepError, "nodes of several kinds"),
        ({"clusters": ["my.toml"], "devices": [8]}, SweepError, "cannot be resized"),
        ({"clusters": ["h100"], "memory_limit": ["60 lions"]}, SweepError, "grid.memory_limit: expected a quantity"),
        ({"clusters": ["h100"], "memory_limit": [0]}, SweepError, "more than 0 bytes, got 0"),
    ],
)
def test_impossible_cells_are_found_before_the_search(grid: dict, error: type[AutoplanError], message: str) -> None:
    with pytest.raises(error, match=message):
        read({"grid": {"models": ["gpt-tiny"], **grid}}).grid.cells()


def test_broken_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "broken.toml").write_text("[grid\n")
    with pytest.raises(SweepError, match=r"broken\.toml: not TOML"):
        read(tmp_path / "broken.toml")
    with pytest.raises(SweepError, match="cannot read the sweep"):
        read(tmp_path / "none.toml")
