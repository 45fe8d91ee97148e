"""Optimizers on shards are exact, or refused at their first step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoplan.capture import capture
from autoplan.runtime import launch
from autoplan.runtime.in_process import InProcess
from autoplan.runtime.launch import WorkerPool
from autoplan.runtime.optimizers import register_optimizer
from autoplan.runtime.parallel import Parallel
from autoplan.runtime.transport import Transport
from searchspace.errors import ExecutionError
from tests.runtime.models import programs, ranks_of

ELEMENTWISE = ["SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adagrad", "RMSprop", "Rprop", "ASGD", "Adamax", "Adadelta"]


def squares(y: Tensor) -> Tensor:
    return y.pow(2).mean()


def example() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6)).double(), torch.randn(8, 6).double()


def parallel_of(transport: Transport, **degrees: Any) -> tuple[Parallel, Tensor]:
    model, x = example()
    captured = capture(model, (x,), loss_fn=squares)
    return Parallel(captured, programs(captured, **degrees), transport), x


def make(name: str, model: Any) -> torch.optim.Optimizer:
    return getattr(torch.optim, name)([p for p in model.parameters() if name != "Muon" or p.ndim == 2], lr=0.01)


def train(model: Any, step: Any, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    for _ in range(3):
        optimizer.zero_grad()
        step()
        optimizer.step()
    return model.state_dict()


def alone(name: str) -> dict[str, Tensor]:
    model, x = example()
    return train(model, lambda: squares(model(x)).backward(), make(name, model))


def check(name: str, **degrees: Any) -> None:
    parallel, x = parallel_of(InProcess(ranks_of(degrees)), **degrees)
    found = train(parallel, lambda: parallel.train_step(x), make(name, parallel))
    for key, value in alone(name).items():
        torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-9, msg=key)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_optimizers_are_exact_on_shards(name: str) -> None:
    check(name, tp=2)
    check(name, dp=2, zero=3)


@pytest.mark.parametrize("name", ["Muon", "Adafactor"])
def test_whole_tensors_or_nothing(name: str) -> None:
    check(name, dp=2)
    check(name, pp=2)
    for degrees in ({"tp": 2}, {"dp": 2, "zero": 1}):
        parallel, x = parallel_of(InProcess(2), **degrees)
        before = copy.deepcopy(parallel.state_dict())
        parallel.train_step(x)
        optimizer = make(name, parallel)
        with pytest.raises(ExecutionError, match=rf"{name} needs whole parameters.* is split; rank 0 holds \[0:6"):
            optimizer.step()
        assert all(value.equal(before[key]) for key, value in parallel.state_dict().items())


def test_only_split_parameters_matter() -> None:
    """A whole parameter may be stepped on beside split ones; a group that is added later is looked at too."""
    parallel, x = parallel_of(InProcess(2), tp=2)
    split = [s.parameter for s in parallel.shards if s.name == "0.weight"]
    kept = [s.parameter for s in parallel.shards if s.name == "2.bias"]
    optimizer = torch.optim.Adafactor(kept)
    parallel.train_step(x)
    optimizer.step()
    optimizer.add_param_group({"params": split})
    with pytest.raises(ExecutionError, match=r"0\.weight"):
        optimizer.step()


def lbfgs_state(model: Any, step: Any) -> tuple[dict[str, Tensor], str]:
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5)

    def closure() -> Tensor:
        optimizer.zero_grad()
        return step()

    try:
        optimizer.step(closure)
    except ExecutionError as error:
        return {}, str(error)
    return model.state_dict(), ""


def lbfgs_on_this_rank(degrees: dict[str, Any]) -> tuple[dict[str, Tensor], str]:
    parallel, x = parallel_of(launch.join(), **degrees)
    return lbfgs_state(parallel, lambda: parallel.train_step(x))


def backward(model: nn.Module, x: Tensor) -> Tensor:
    loss = squares(model(x))
    loss.backward()
    return loss


def test_lbfgs_needs_the_whole_model(pool: WorkerPool) -> None:
    """Its line is that of all parameters: not of one stage, and not of the copies of two ranks in one process."""
    model, x = example()
    want, _ = lbfgs_state(model, lambda: backward(model, x))
    for found, error in pool.run(lbfgs_on_this_rank, {"dp": 2}, ranks=2):
        assert not error
        for name, value in want.items():
            torch.testing.assert_close(found[name], value)
    for degrees in ({"pp": 2}, {"tp": 2}):
        for _, error in pool.run(lbfgs_on_this_rank, degrees, ranks=2):
            assert error.startswith("LBFGS needs the whole model at once to be exact, but ")
    parallel, x = parallel_of(InProcess(2), dp=2)
    assert "several ranks' parts" in lbfgs_state(parallel, lambda: parallel.train_step(x))[1]
    parallel, x = parallel_of(InProcess(1))
    found, error = lbfgs_state(parallel, lambda: parallel.train_step(x))
    assert not error
    torch.testing.assert_close(found["0.weight"], want["0.weight"])


class Mine(torch.optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(0.1 * parameter.grad)


class Heir(torch.optim.AdamW):
    """Steps as AdamW does."""


class Rebel(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def test_unknown_classes_are_refused_until_registered() -> None:
    parallel, x = parallel_of(InProcess(2), tp=2)
    parallel.train_step(x)
    Heir(parallel.parameters()).step()
    for unknown in (Mine, Rebel):
        with pytest.raises(ExecutionError, match=rf"autoplan.register_optimizer\({unknown.__name__}, needs=\"elements"):
            unknown(parallel.parameters()).step()
    register_optimizer(Mine, needs="elements")
    Mine(parallel.parameters()).step()
    with pytest.raises(ExecutionError, match="expected needs to be one of elements, tensors, model, got 'all'"):
        register_optimizer(Mine, needs="all")  # type: ignore[arg-type]
    with pytest.raises(ExecutionError, match=r"expected a subclass of torch.optim.Optimizer"):
        register_optimizer(int, needs="elements")  # type: ignore[arg-type]


def test_other_models_are_left_alone() -> None:
    """The check is of shards: whatever else is trained in the process is not concerned."""
    parallel, _ = parallel_of(InProcess(2), tp=2)
    model, x = example()
    squares(model(x)).backward()
    make("Muon", model).step()
    Rebel(model.parameters()).step()
    assert parallel.step == 0
