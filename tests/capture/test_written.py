"""State that forward writes: kept exactly, or refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import autoplan
from autoplan.capture import capture
from searchspace.errors import AutoplanWarning, CaptureError
from tests.capture.test_front import assert_same_as_eager

X = (torch.randn(4, 6, dtype=torch.float64),)
Forward = Callable[[Any, torch.Tensor], torch.Tensor]


class Settings:
    steps = 0


class Stateful(nn.Module):
    average: torch.Tensor

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 6).double()
        self.count, self.width, self.table, self.hidden, self.last = 0, None, None, None, None
        self.history: list[Any] = []
        self.settings = Settings()
        self.register_buffer("average", torch.zeros(6).double())
        self.run = forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self, x).pow(2).mean()


def counts(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.count += 1
    return model.lin(x)


def counts_elsewhere(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.settings.steps += 1
    return model.lin(x)


def collects(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.history.append(x)
    return model.lin(x)


def recurs(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.hidden = model.lin(x) if model.hidden is None else model.lin(x) + model.hidden
    return model.hidden


def starts(model: Any, x: torch.Tensor) -> torch.Tensor:
    if model.width is None:
        model.width = 1
        return model.lin(x) * 2
    return model.lin(x)


@pytest.mark.parametrize(
    ("forward", "name", "line"),
    [
        (counts, "self.count", 1),
        (counts_elsewhere, "self.settings", 1),
        (collects, "self.history", 1),
        (recurs, "self.hidden", 1),
        (starts, "self.width", 2),
    ],
)
def test_state_that_the_next_call_reads_is_refused(forward: Forward, name: str, line: int) -> None:
    place = f"test_written.py:{forward.__code__.co_firstlineno + line}"
    with pytest.raises(CaptureError, match=rf"forward reads and changes {name} \(.*{place}\).*registered buffer"):
        capture(Stateful(forward), X)


def adds_parameter(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.lin.weight = nn.Parameter(model.lin.weight * 2)
    return model.lin(x)


def adds_buffer(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.register_buffer("other", x.mean(0))
    return model.lin(x)


def grows_buffer(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.average = torch.cat([model.average, x.mean(0)])
    return model.lin(x)


def trains_buffer(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.average = model.lin(x).mean(0)
    return model.lin(x)


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (adds_parameter, "adds, removes or replaces the parameter self.lin.weight"),
        (adds_buffer, "adds, removes or replaces the buffer self.other"),
        (grows_buffer, "replaces the buffer self.average .* of torch.float64 (6,) by torch.float64 (12,)"),
        (trains_buffer, "replaces the buffer self.average .* with a gradient"),
    ],
)
def test_what_is_registered_stays(forward: Forward, message: str) -> None:
    with pytest.raises(CaptureError, match=message.replace("(", r"\(").replace(")", r"\)")):
        capture(Stateful(forward), X)


def averages(model: Any, x: torch.Tensor) -> torch.Tensor:
    before = model.average
    model.average = 0.9 * before + 0.1 * x.mean(0)
    return model.lin(x) + model.average - before.sin()


def averages_unread(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.average = x.mean(0)
    return model.lin(x)


class Swaps(nn.Module):
    now: torch.Tensor
    then: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 6).double()
        self.register_buffer("now", torch.ones(6).double())
        self.register_buffer("then", torch.full((6,), 2.0).double())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.now, self.then = self.then, self.now
        return (self.lin(x) * self.now).pow(2).mean()


def test_buffers_that_change_places() -> None:
    assert autoplan.verify(Swaps(), X, ranks=2, steps=3).agrees


def test_a_shared_buffer_is_not_replaced() -> None:
    model = nn.Sequential(Swaps(), nn.Identity())
    model[1].register_buffer("shared", model[0].now)  # type: ignore[arg-type]
    message = r"replaces the buffer self\.0\.now .*which other modules share"
    model[0].forward = partial(forget, model[0])
    with pytest.raises(CaptureError, match=message):
        capture(model, X)


def forget(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.now = model.now * 0.5
    return (model.lin(x) * model.now).mean()


@pytest.mark.parametrize("forward", [averages, averages_unread])
def test_a_buffer_that_is_replaced_is_updated(forward: Forward) -> None:
    torch.manual_seed(0)
    model = Stateful(forward)
    captured = capture(model, X)
    assert [captured.graph.tensor[buffer].source for buffer, _ in captured.graph.buffer_updates] == ["average"]
    assert_same_as_eager(captured, model, X, {})
    assert not model.average.any()
    comparison = autoplan.verify(Stateful(forward), X, ranks=2, steps=3)
    assert comparison.agrees, comparison


def remembers(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.last = model.lin(x)
    model.lin.last = model.last
    return model.last * 2


def test_what_is_only_assigned_is_named() -> None:
    model = Stateful(remembers)
    place = f"test_written.py:{remembers.__code__.co_firstlineno + 1}"
    with pytest.warns(AutoplanWarning, match=re.escape("forward assigns self.last (") + rf".*{place}\) and 1 more"):
        captured = capture(model, X)
    assert_same_as_eager(captured, model, X, {})
    assert model.last is None


def tabulates(model: Any, x: torch.Tensor) -> torch.Tensor:
    if model.table is None:
        model.table = torch.arange(6, dtype=x.dtype)
    if model.width is None:
        model.width = x.shape[1]
    return model.lin(x) * model.width + model.table


def test_what_the_first_call_makes_and_keeps_is_captured() -> None:
    model = Stateful(tabulates)
    captured = capture(model, X)
    assert_same_as_eager(captured, model, X, {})
    kept = capture(model, X)  # the comparison has run the model: its table is there now
    assert_same_as_eager(kept, model, X, {})


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
def test_old_weight_norm_assigns_silently() -> None:
    model = nn.Sequential(nn.utils.weight_norm(nn.Linear(6, 6)), nn.Tanh()).double()
    captured = capture(model, X, loss_fn=lambda y: y.pow(2).mean())
    assert "aten._weight_norm.default" in [op.target for op in captured.graph.operators]
