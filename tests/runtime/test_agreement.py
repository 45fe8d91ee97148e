"""What differs between ranks is mended from rank 0 or refused on all of them, never silently wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from autoplan.api import parallelize
from autoplan.capture import capture
from autoplan.runtime.agreement import checksum, differing
from autoplan.runtime.launch import WorkerPool, join
from searchspace.errors import AutoplanError, ExecutionError, PlanMismatchError
from searchspace.plan import Plan
from tests.parity.plans import forced


class Net(nn.Module):
    def __init__(self, seed: int, hidden: int = 12) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.inner = nn.Linear(8, hidden)
        self.norm = nn.BatchNorm1d(hidden)
        self.outer = nn.Linear(hidden, 8)
        self.register_buffer("scale", torch.rand(8))
        self.unused = nn.Parameter(torch.rand(3))

    def forward(self, x: Tensor) -> Tensor:
        return (self.outer(self.norm(self.inner(x)).relu()) * self.scale).square().mean()


def batch(seed: int = 0) -> Tensor:
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(seed))


def plan(name: str = "dp") -> str:
    return forced(capture(Net(0), (batch(),)).graph, 2, name).to_json()


def train(texts: list[str], models: list[tuple[int, int]], batches: list[int], meta: bool, options: list[Any]) -> Any:
    """This rank's losses and state after two steps, each rank with its own entry of every list; or its error."""
    rank = join().rank
    model = Net(*models[rank])
    if meta and rank == 1:
        model.to("meta")
    try:
        parallel = parallelize(model, (batch(),), plan=Plan.from_json(texts[rank]), **options[rank])
        optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
        losses = []
        for _ in range(2):
            losses.append(parallel.train_step(batch(batches[rank])).item())
            optimizer.step()
            optimizer.zero_grad()
        return losses, parallel.state_dict()
    except AutoplanError as error:
        return error


def on_both(pool: WorkerPool, **change: Any) -> list[Any]:
    text = plan()
    usual = {"texts": [text] * 2, "models": [(0, 12)] * 2, "batches": [0, 0], "meta": False, "options": [{}, {}]}
    return pool.run(train, *(usual | change).values(), ranks=2)


@pytest.mark.parametrize("meta", [False, True])
@pytest.mark.parametrize("name", ["dp", "tp", "zero 1"])
def test_rank_0_decides_on_the_values(pool: WorkerPool, name: str, meta: bool) -> None:
    text = plan(name)
    change = {"meta": True} if meta else {"models": [(0, 12), (1, 12)]}
    same = on_both(pool, texts=[text] * 2)
    different = on_both(pool, texts=[text] * 2, **change)
    for (losses, state), (want, wanted) in zip(different, same, strict=True):
        assert losses == want
        assert state.keys() == wanted.keys()
        assert all(torch.equal(state[key], wanted[key]) for key in wanted)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"batches": [0, 1]}, ExecutionError, "args.0: not the same on all ranks; .*sharded_input=True"),
        ({"models": [(0, 12), (0, 16)]}, PlanMismatchError, "must be the same: the model"),
        ({"options": [{"seed": 0}, {"seed": 1}]}, PlanMismatchError, "must be the same: seed="),
        ({"options": [{}, {"sharded_input": True}]}, PlanMismatchError, "must be the same: sharded_input="),
        ({"texts": ["dp", "tp"]}, PlanMismatchError, "must be the same: plan="),
    ],
)
def test_all_ranks_refuse(pool: WorkerPool, change: dict[str, Any], kind: type[Exception], message: str) -> None:
    if "texts" in change:
        change = {"texts": [plan(name) for name in change["texts"]]}
    for error in on_both(pool, **change):
        with pytest.raises(kind, match=message):
            raise error


def number_of(rank_numbers: list[dict[str, int]]) -> list[str]:
    transport = join()
    return differing(transport, rank_numbers[transport.rank])


def test_differing_names_are_the_same_on_all_ranks(pool: WorkerPool) -> None:
    numbers = [{"a": 1, "b": 2**62, "c": 0}, {"a": 1, "b": 2**62 + 1, "c": 0}, {"a": 1, "b": 2**62, "c": -1}]
    assert pool.run(number_of, numbers, ranks=3) == [["b", "c"]] * 3


@given(
    st.integers(0, 70_000),
    st.sampled_from([torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64, torch.float64]),
    st.data(),
)
def test_a_checksum_sees_values_and_not_strides(size: int, dtype: torch.dtype, data: st.DataObject) -> None:
    values = torch.rand(size, generator=torch.Generator().manual_seed(size)).round(decimals=1).to(dtype)
    spread = torch.stack((values, values), 1)[:, 0]
    assert checksum(values) == checksum(spread) == checksum(values.clone())
    if size:
        changed = values.clone()
        place = data.draw(st.integers(0, size - 1))
        changed[place] = 1 - changed[place] if dtype != torch.bool else ~changed[place]
        assert torch.equal(changed, values) == (checksum(changed) == checksum(values))
    assert checksum(values.to("meta")) == -1
