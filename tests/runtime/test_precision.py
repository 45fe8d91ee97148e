"""Precision recipes are executed: what is computed, stored, stepped on and reduced in which dtype."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from autoplan.capture import Captured, capture
from autoplan.runtime.in_process import InProcess
from autoplan.runtime.parallel import Parallel
from searchspace.plan import Precision, Recipe
from tests.runtime.models import gpt, programs, ranks_of

PLANS = [{}, {"tp": 2}, {"pp": 2, "micro_batches": 2}, {"dp": 2, "zero": 1}, {"dp": 2, "zero": 3}]


def build(precision: Precision, degrees: dict[str, int]) -> Parallel:
    captured = captures(precision)
    return Parallel(captured, programs(captured, Recipe(precision=precision), **degrees), InProcess(ranks_of(degrees)))


def captures(precision: Precision) -> Captured:
    model, batch = gpt(torch.float32)
    return capture(model, (), batch, precision=precision)


def bf16_reference(steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """One device: bfloat16 compute, float32 master weights and gradients."""
    master, batch = gpt(torch.float32)
    optimizer = torch.optim.AdamW(master.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        working = copy.deepcopy(master).to(torch.bfloat16)
        loss = working(**batch)["loss"]
        loss.backward()
        for big, small in zip(master.parameters(), working.parameters(), strict=True):
            assert small.grad is not None
            big.grad = small.grad.float()
        optimizer.step()
        losses.append(loss.item())
    return losses, master.state_dict()


@pytest.mark.parametrize("degrees", PLANS, ids=str)
def test_bf16_with_float32_master_weights(degrees: dict[str, int]) -> None:
    parallel = build("bf16", degrees)
    _, batch = gpt(torch.float32)
    assert all(parameter.dtype == torch.float32 for parameter in parallel.parameters())
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        losses.append(parallel.train_step(**batch).item())
        assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in parallel.parameters())
        optimizer.step()
        optimizer.zero_grad()
    want, _ = bf16_reference(3)
    assert losses == pytest.approx(want, rel=2e-2)
    assert parallel(**batch)["logits"].dtype == torch.bfloat16
    # float32 masters: one step moves a weight by the learning rate, less than bfloat16 could see at 1
    state = parallel.state_dict()
    assert state["ln.weight"].dtype == torch.float32
    assert not state["ln.weight"].equal(state["ln.weight"].bfloat16().float())


@pytest.mark.parametrize("degrees", PLANS, ids=str)
def test_autocast(degrees: dict[str, int]) -> None:
    """Equal to one device under the same autocast, whatever autocast surrounds the call."""
    model, batch = gpt(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**batch)["loss"]
    loss.backward()
    parallel = build("autocast", degrees)
    with torch.autocast("cpu", torch.float16):
        found = parallel.train_step(**batch)
    assert found.item() == pytest.approx(loss.item(), rel=1e-2)
    scale = max(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None)
    for name, value in parallel.full_gradients().items():
        assert value is not None and value.dtype == torch.float32
        want = model.get_parameter(name).grad
        assert want is not None and float((value - want).abs().max()) <= 3e-2 * scale


def test_one_rank_autocast_is_bitwise() -> None:
    torch.manual_seed(0)
    linear = nn.Sequential(nn.Linear(10, 7), nn.Tanh(), nn.Linear(7, 3))
    x = torch.randn(4, 10)
    with torch.autocast("cpu", torch.bfloat16):
        want = linear(x).float().pow(2).mean()
    captured = capture(linear, (x,), loss_fn=lambda y: y.float().pow(2).mean(), precision="autocast")
    recipe = Recipe(precision="autocast")
    assert Parallel(captured, programs(captured, recipe), InProcess(1)).train_step(x).equal(want.detach())
