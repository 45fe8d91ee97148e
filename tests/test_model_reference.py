"""Models by reference: files, modules, zoo names, and what is said when they are none."""

from pathlib import Path

import pytest
import torch

from autoplan.model_reference import example_of, load_model, source_digest
from searchspace.errors import ModelError

SOURCE = """
import torch
from torch import nn

LINEAR = nn.Linear(2, 2)

class Net(nn.Module):
    pass

def build():
    return nn.Linear(4, 4), (torch.ones(2, 4),), {}

def sized(batch=3, width=4, device="cpu"):
    return nn.Linear(width, 1, device=device), torch.ones(batch, width, device=device)

def keywords():
    return nn.Linear(4, 4), {"input": torch.ones(2, 4)}

def needs(x):
    return x

def fails():
    raise RuntimeError("no such luck")

def wrong():
    return nn.Linear(1, 1)

def pair():
    return 3, 4
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "models_under_test.py"
    path.write_text(SOURCE)
    return str(path)


def test_function_of_a_file(file: str) -> None:
    model, args, kwargs = load_model(f"{file}:build", device="meta", seed=3)
    assert model(*args, **kwargs).shape == (2, 4)


def test_a_function_gets_the_parameters_that_it_has(file: str) -> None:
    model, args, _ = load_model(f"{file}:sized", batch=5, width=7, device="meta", dtype="float64", sequence=None)
    assert args[0].shape == (5, 7) and args[0].is_meta and model.weight.is_meta


def test_keyword_inputs(file: str) -> None:
    _, args, kwargs = load_model(f"{file}:keywords")
    assert args == () and list(kwargs) == ["input"]


def test_a_file_may_import_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_model.py").write_text("from torch import nn\nWIDTH = 6\n")
    (tmp_path / "model.py").write_text(
        "import torch, neighbour_of_model as n\ndef f(): return n.nn.Linear(n.WIDTH, 1), torch.ones(1, n.WIDTH)\n"
    )
    assert load_model(f"{tmp_path}/model.py:f").args[0].shape == (1, 6)


def test_function_of_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "module_of_models.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load_model("module_of_models:build").model.in_features == 4


def test_zoo_names_and_functions() -> None:
    assert load_model("gpt-tiny", batch=3).kwargs["tokens"].shape == (3, 64)
    assert load_model(lambda batch: (torch.nn.Linear(1, 1), torch.ones(batch, 1)), batch=4).args[0].shape == (4, 1)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (":biuld", "no function 'biuld'; there is build"),
        (":zzz", "no function 'zzz'; there is build, sized, keywords, needs, fails"),
        (":Net", "is a module; name a function that returns"),
        (":LINEAR", "is a module; name a function that returns"),
        (":SOURCE", "no function 'SOURCE'"),
        (":needs", "needs a value of x; give the parameter a default"),
        (":fails", r"RuntimeError: no such luck \(at .*models_.*:23\)"),
        (":wrong", r"expected \(model, args, kwargs\), or .*, got Linear"),
        (":pair", "got a tuple of int, int"),
        ("", "say which function makes the model, .*:FUNCTION"),
    ],
)
def test_what_is_wrong_is_said(file: str, name: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load_model(file + name)


def test_options_that_a_function_lacks_are_refused(file: str) -> None:
    with pytest.raises(ModelError, match=r"build has no parameter batch, sequence; it has \(\)"):
        load_model(f"{file}:build", batch=3, sequence=4)


def test_missing_files_and_modules(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"nothing\.py: no such file"):
        load_model(f"{tmp_path}/nothing.py:f")
    with pytest.raises(ModelError, match=r"no module 'nothing_at_all'; for a file write PATH\.py:FUNCTION"):
        load_model("nothing_at_all:f")
    (tmp_path / "broken.py").write_text("import torch\ndef f(:\n")
    with pytest.raises(ModelError, match=r"broken\.py: SyntaxError"):
        load_model(f"{tmp_path}/broken.py:f")


def test_inputs_that_are_none_are_refused() -> None:
    with pytest.raises(ModelError, match="got a tuple of Linear, int"):
        example_of("f", (torch.nn.Linear(1, 1), 3))
    with pytest.raises(ModelError, match="got a tuple of Linear, tuple, int"):
        example_of("f", (torch.nn.Linear(1, 1), (), 3))
    with pytest.raises(ModelError, match="got a tuple of nothing"):
        example_of("f", ())


def test_the_digest_follows_the_text(tmp_path: Path) -> None:
    path = tmp_path / "m.py"
    path.write_text(SOURCE)
    first = source_digest(f"{path}:build")
    path.write_text(SOURCE + "\n# changed")
    assert first != source_digest(f"{path}:build")
    assert source_digest("gpt-tiny") != source_digest("llama-tiny")
    assert source_digest("tests.plans:small_plan") == source_digest("tests.plans:other")
    with pytest.raises(ModelError, match="cannot read the model"):
        source_digest(f"{tmp_path}/none.py:f")
