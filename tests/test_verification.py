"""``verify``: agreement of right plans under each recipe, and disagreement where something is wrong."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoplan import api
from autoplan.capture import capture
from autoplan.reference import SingleDevice
from autoplan.runtime.launch import WorkerPool
from autoplan.runtime.parallel import Parallel
from autoplan.search.uniform import named_plan
from autoplan.verification import Trial, default_tolerance, verify
from searchspace.errors import PlanMismatchError, VerificationError
from searchspace.plan import ClusterInfo, Plan, Precision, Recipe
from tests.runtime.models import gpt

CLUSTER = ClusterInfo(name="cpu:1x4", devices=4)


def plan_of(model: nn.Module, batch: dict[str, Tensor], precision: Precision = "float32", **degrees: Any) -> Plan:
    graph = capture(model, (), batch, precision=precision).graph
    return named_plan(graph, CLUSTER, Recipe(precision=precision), **degrees)


@pytest.mark.parametrize(
    ("dtype", "precision", "tolerance"),
    [
        (torch.float64, "float32", 1e-9),
        (torch.float32, "float32", 1e-4),
        (torch.float32, "bf16", 2e-2),
        (torch.float32, "autocast", 2e-2),
    ],
)
@pytest.mark.parametrize("degrees", [{"dp": 2, "zero": 1}, {"tp": 2, "pp": 2, "micro_batches": 3}], ids=str)
def test_plans_agree_under_the_recipe(
    dtype: torch.dtype, precision: Precision, tolerance: float, degrees: dict[str, Any]
) -> None:
    if precision == "bf16":  # the loss is rounded after the mean, which micro-batches would have to share
        degrees = {**degrees, "micro_batches": 1}
    model, batch = gpt(dtype)
    before = copy.deepcopy(model.state_dict())
    comparison = verify(model, (), batch, plan=plan_of(model, batch, precision, **degrees))
    assert comparison.agrees, comparison.table(3).text()
    assert {d.tolerance for d in comparison.differences} == {tolerance} and comparison.note == ""
    kinds = [d.quantity for d in comparison.differences]
    names = [n for n, _ in model.named_parameters()]
    assert kinds.count("loss") == 3 and kinds.count("gradient") == len(names)
    assert kinds.count("parameter") == len(names) + 1  # the tied one under both names
    assert all(
        value.equal(before[name]) for name, value in model.state_dict().items()
    )  # the user's model is not changed
    moved = {d.name for d in comparison.differences if d.quantity == "parameter" and d.difference > 0}
    assert moved  # the sides are computed apart


def test_recipes_matter() -> None:
    """bf16 and float32 differ by more than what either is allowed, so the reference has to follow the recipe."""
    model, batch = gpt(torch.float32)
    comparison = verify(model, (), batch, plan=plan_of(model, batch, "bf16", dp=2), tolerance=1e-5)
    assert not comparison.agrees


def test_processes(pool: WorkerPool, tmp_path: Any) -> None:
    model, batch = gpt()
    plan_of(model, batch, dp=2).save(tmp_path / "plan.json")
    comparison = verify(model, (), batch, plan=tmp_path / "plan.json", pool=pool, steps=1)
    assert comparison.agrees and len(comparison.worst("loss", 9)) == 1


class _WrongClip(Parallel):
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        return super().clip_grad_norm_(max_norm * 1.01, norm_type)


class _LostGradient(Parallel):
    def full_gradients(self) -> dict[str, Tensor | None]:
        found = super().full_gradients()
        return {**found, "h.1.out.bias": None}


class _StaleGradient(Parallel):
    def full_gradients(self) -> dict[str, Tensor | None]:
        found = super().full_gradients()
        return {**found, "h.1.out.bias": torch.zeros_like(found["h.1.out.bias"])}  # type: ignore[arg-type]


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    yield lambda kind: monkeypatch.setattr(api, "Parallel", kind)


def test_faults_are_found(faulty: Any) -> None:
    model, batch = gpt()
    plan = plan_of(model, batch, tp=2)
    faulty(_StaleGradient)
    comparison = verify(model, (), batch, plan=plan)
    assert not comparison.agrees
    with pytest.raises(VerificationError, match=r"^plan and single device disagree: gradient h.1.out.bias: "):
        comparison.raise_if_different()
    assert comparison.worst("gradient")[0].name == "h.1.out.bias" and comparison.worst("parameter")[0].agrees
    faulty(_LostGradient)
    with pytest.raises(VerificationError, match=r"gradients differ in names: missing \['h.1.out.bias'\]"):
        verify(model, (), batch, plan=plan)
    faulty(_WrongClip)  # SGD follows the length of a gradient, AdamW hardly
    comparison = verify(model, (), batch, plan=plan, optimizer=_sgd, clip=0.1)
    assert comparison.worst("gradient")[0].agrees and not comparison.worst("parameter")[0].agrees


def _sgd(parameters: Any, learning_rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=100 * learning_rate)


def test_loss_functions_and_noisy_gradients_in_float32() -> None:
    """A bias before batch norm has a gradient of mere rounding, which AdamW must not blow up."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, 3))
    x, y = torch.randn(8, 6), torch.randint(0, 3, (8,))
    graph = capture(model, (x,), loss_fn=F.cross_entropy, loss_args=(y,)).graph
    plan = named_plan(graph, CLUSTER, Recipe(), dp=2)
    comparison = verify(model, (x,), plan=plan, loss_fn=F.cross_entropy, loss_args=(y,))
    assert comparison.agrees, comparison.table(3).text()
    assert {d.name for d in comparison.differences if d.quantity == "buffer"} == {
        "1.running_mean", "1.running_var", "1.num_batches_tracked",
    }  # fmt: skip


def test_random_models_are_compared_with_their_one_device_plan() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3)).double()
    x = torch.randn(8, 6).double()
    plan = named_plan(capture(model, (x,), loss_fn=_square).graph, CLUSTER, Recipe(), dp=2)
    comparison = verify(model, (x,), plan=plan, loss_fn=_square)
    assert comparison.agrees and "its one-device plan stands for the single device" in comparison.table(1).title


def _square(y: Tensor) -> Tensor:
    return y.pow(2).mean()


def test_inference_compares_outputs() -> None:
    model, batch = gpt()
    graph = capture(model, (), batch, mode="inference").graph
    comparison = verify(model, (), batch, plan=named_plan(graph, CLUSTER, Recipe(mode="inference"), tp=2))
    assert comparison.agrees
    assert [(d.quantity, d.name) for d in comparison.differences] == [("output", "logits"), ("output", "loss")]


class Inner32(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).float().softmax(-1).double().pow(2).mean()


def test_tolerance_by_the_dtype_of_the_computation() -> None:
    assert default_tolerance(capture(Inner32(), (torch.randn(2, 4).double(),))) == 1e-6
    model, batch = gpt()
    assert default_tolerance(capture(model, (), batch, mode="inference")) == 1e-9


def test_the_single_device_under_bf16_is_bf16_with_float32_masters() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    x = torch.randn(16, 4)
    single = SingleDevice(model, "bf16", _square)
    optimizer = torch.optim.SGD(single.parameters(), lr=0.1)
    masters = [p.detach().clone() for p in model.parameters()]
    for _ in range(3):
        lowered = copy.deepcopy(model).bfloat16()
        for p, master in zip(lowered.parameters(), masters, strict=True):
            p.data = master.bfloat16()
        loss = _square(lowered(x.bfloat16()))
        loss.backward()
        assert torch.equal(single.train_step(x), loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        masters = [m - 0.1 * p.grad.float() for m, p in zip(masters, lowered.parameters(), strict=True)]  # type: ignore[union-attr]
    for p, master in zip(single.parameters(), masters, strict=True):
        torch.testing.assert_close(p.detach(), master, rtol=0, atol=1e-7)
        assert p.dtype == torch.float32


def test_bad_requests() -> None:
    model, batch = gpt()
    plan = plan_of(model, batch, dp=2)
    with pytest.raises(VerificationError, match="expected steps >= 1, got 0"):
        Trial(steps=0)
    with pytest.raises(VerificationError, match="expected clip > 0 or None, got 0"):
        Trial(clip=0)
    with pytest.raises(VerificationError, match="have to be sent to other processes, which fails"):
        verify(model, (), batch, plan=plan, processes=True, optimizer=lambda p, rate: torch.optim.SGD(p, rate))
    with pytest.raises(VerificationError, match=r"the single device needs values: \S+ is on the meta device"):
        SingleDevice(nn.Linear(2, 1, device="meta"))
    with pytest.raises(PlanMismatchError, match="the plan was made for model 'GPT', not for 'Linear'"):
        verify(nn.Linear(2, 1), (torch.ones(3, 2),), plan=plan, loss_fn=_square)


def test_the_single_device_keeps_hooks_on_parameters() -> None:
    model, seen = nn.Linear(3, 2), []
    model.weight.register_hook(lambda gradient: gradient * 2)
    model.bias.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.shape))
    hooked, x = SingleDevice(model, loss_fn=torch.sum), torch.ones(1, 3)
    hooked.train_step(x)
    gradients = hooked.full_gradients()
    assert torch.equal(gradients["weight"], torch.full((2, 3), 2.0))  # type: ignore[arg-type]
    assert seen == [(2,)]


def test_a_buffer_that_the_parallel_model_lacks_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting(nn.Module):
        calls: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(3, 2)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls.add_(1)
            total: Tensor = self.lin(x).sum()
            return total

    model, x = Counting(), (torch.ones(2, 3),)
    assert verify(model, x, ranks=2).agrees
    monkeypatch.setattr("autoplan.capture.sources.Sources.updates", lambda *args: [])
    comparison = verify(model, x, ranks=2)
    assert not comparison.agrees
    assert [found.name for found in comparison.worst("buffer")] == ["calls"]
