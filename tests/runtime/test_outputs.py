"""``parallel(x)`` is the model's output: the loss, and what only the loss needs, are neither demanded nor computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoplan.capture import Captured, capture
from autoplan.runtime import launch
from autoplan.runtime.in_process import InProcess
from autoplan.runtime.launch import WorkerPool
from autoplan.runtime.parallel import Parallel, RuntimeOptions
from autoplan.runtime.transport import Transport
from searchspace.errors import CaptureError
from searchspace.program import Forward, Program
from tests.runtime.models import programs, ranks_of

PLANS: dict[str, dict[str, Any]] = {
    "dp": {"dp": 2},
    "tp": {"tp": 2},
    "zero 3": {"dp": 2, "zero": 3, "micro_batches": 2},
    "pp": {"pp": 2, "micro_batches": 2},
}


class Twice(nn.Module):
    """Returns two tensors, of which the loss reads one."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = F.gelu(self.up(x))
        return {"hidden": hidden, "y": self.down(hidden)}


def against(output: dict[str, Tensor], target: Tensor, weight: float) -> Tensor:
    return weight * F.mse_loss(output["y"], target)


def alone(output: dict[str, Tensor]) -> Tensor:
    return output["y"].pow(2).mean()


def example(with_arguments: bool) -> tuple[nn.Module, Tensor, tuple[Any, ...], Captured]:
    torch.manual_seed(0)
    model, x, target = Twice().double(), torch.randn(6, 5).double(), torch.randn(6, 4).double()
    loss_args = (target, 0.5) if with_arguments else ()
    captured = capture(model, (x,), loss_fn=against if with_arguments else alone, loss_args=loss_args)
    return model, x, loss_args, captured


def run(transport: Transport, plan: str, with_arguments: bool, sharded: bool) -> tuple[dict[str, Tensor], Tensor]:
    """The outputs and the evaluated loss, after a step so that stored copies of parameters are stale."""
    _, x, loss_args, captured = example(with_arguments)
    parallel = Parallel(captured, programs(captured, **PLANS[plan]), transport, RuntimeOptions(sharded_input=sharded))
    if sharded:
        part = [slice(0, 2), slice(2, 6)][transport.ranks[0]]
        x, loss_args = x[part], tuple(v[part] if isinstance(v, Tensor) else v for v in loss_args)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    first = parallel(x)
    assert first["y"].shape == (6, 4)
    parallel.train_step(x, loss_args=loss_args)
    optimizer.step()
    return parallel(x), parallel.eval_step(x, loss_args=loss_args)


def check(found: tuple[dict[str, Tensor], Tensor], with_arguments: bool) -> None:
    model, x, loss_args, _ = example(with_arguments)
    loss_fn = against if with_arguments else alone
    loss_fn(model(x), *loss_args).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    output = model(x)
    assert list(found[0]) == ["hidden", "y"]
    for name, value in output.items():
        torch.testing.assert_close(found[0][name], value.detach(), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found[1], loss_fn(output, *loss_args).detach(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("with_arguments", [False, True])
@pytest.mark.parametrize("plan", PLANS)
def test_outputs_without_the_loss(plan: str, with_arguments: bool) -> None:
    check(run(InProcess(ranks_of(PLANS[plan])), plan, with_arguments, sharded=False), with_arguments)


def run_on_this_rank(plan: str, sharded: bool) -> tuple[dict[str, Tensor], Tensor]:
    return run(launch.join(), plan, True, sharded)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("plan", ["dp", "tp", "pp"])
def test_outputs_on_processes(pool: WorkerPool, plan: str, sharded: bool) -> None:
    for found in pool.run(run_on_this_rank, plan, sharded, ranks=2):
        check(found, True)


def targets(program: Program) -> set[str]:
    steps = [instruction for step in program.steps for instruction in step.ranks.values()]
    return {op.operator.target for i in steps if isinstance(i, Forward) for op in i.segment.operators}


@pytest.mark.parametrize("plan", PLANS)
def test_each_forward_computes_what_it_returns(plan: str) -> None:
    _, _, _, captured = example(True)
    made = programs(captured, **PLANS[plan])
    forward, evaluation = made.forward(), made.evaluation()
    assert targets(evaluation) - targets(forward) == {
        "aten.mse_loss.default",
        "autoplan.mean.default",
        "aten.mul.Tensor",
    }
    assert set(forward.outputs) == set(captured.graph.outputs) and forward.loss is None
    assert not evaluation.outputs and evaluation.loss is not None


def in_place(output: Tensor, target: Tensor) -> Tensor:
    return output.sub_(target).pow(2).mean()


def test_a_loss_that_changes_the_output_in_place() -> None:
    """The model's output is what the model returned."""
    torch.manual_seed(0)
    model, x, target = nn.Linear(5, 4).double(), torch.randn(6, 5).double(), torch.randn(6, 4).double()
    captured = capture(model, (x,), loss_fn=in_place, loss_args=(target,))
    parallel = Parallel(captured, programs(captured, tp=2), InProcess(2))
    torch.testing.assert_close(parallel(x), model(x).detach())
    torch.testing.assert_close(parallel.train_step(x, loss_args=(target,)), F.mse_loss(model(x), target).detach())


def test_calls_of_the_model_alone_are_checked() -> None:
    _, x, loss_args, captured = example(True)
    parallel = Parallel(captured, programs(captured), InProcess(1))
    with pytest.raises(CaptureError, match=r"missing args\.0"):
        parallel()
    with pytest.raises(CaptureError, match=r"not expected kwargs\.more.*Expected are args\.0 \(a tensor of shape"):
        parallel(x, more=x)
    with pytest.raises(CaptureError, match=r"missing loss_args\.0, loss_args\.1\. Expected"):
        parallel.eval_step(x)
    with pytest.raises(CaptureError, match=r"loss_args\.1: 0\.5 was baked in at capture, got 0\.25"):
        parallel.eval_step(x, loss_args=(loss_args[0], 0.25))
