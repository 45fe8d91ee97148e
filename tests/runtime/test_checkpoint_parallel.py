"""A run that goes on from a checkpoint, under another plan, another world size or in the plain model,
equals the uninterrupted run of the single device."""

from __future__ import annotations

import copy
import itertools
import json
import os
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from autoplan.capture import Captured, capture
from autoplan.runtime import launch
from autoplan.runtime.checkpoint import load, optimizer_state_dict, save
from autoplan.runtime.checkpoint_holding import single_device
from autoplan.runtime.in_process import InProcess
from autoplan.runtime.launch import WorkerPool
from autoplan.runtime.parallel import Parallel, RuntimeOptions
from searchspace.errors import CheckpointError, ExecutionError, RankLostError
from searchspace.plan import Recipe
from tests.runtime.models import PLANS, gpt, parallel_gpt, programs, ranks_of

TOLERANCE = 1e-9


@pytest.fixture(scope="module")
def captured() -> Captured:
    model, batch = gpt()
    return capture(model, (), batch)


def build(captured: Captured, plan: str) -> Parallel:
    return Parallel(captured, programs(captured, **PLANS[plan]), InProcess(ranks_of(PLANS[plan])))


class Run:
    """A model with AdamW (no decay for vectors), a schedule and clipping; ``model`` may be parallel or plain."""

    def __init__(self, model: Any) -> None:
        self.model = model
        vectors = [p for _, p in model.named_parameters() if p.dim() < 2]
        matrices = [p for _, p in model.named_parameters() if p.dim() >= 2]
        self.optimizer = torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=6)

    def steps(self, count: int) -> list[float]:
        _, batch = gpt()
        losses = []
        for _ in range(count):
            if isinstance(self.model, Parallel):
                loss = self.model.train_step(**batch)
                self.model.clip_grad_norm_(0.5)
            else:
                loss = self.model(**batch)["loss"]
                loss.backward()
                nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
            losses.append(loss.item())
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
        return losses

    def save(self, path: Path | str, **more: Any) -> None:
        self.model.save(path, optimizer=self.optimizer, scheduler=self.scheduler, **more)

    def load(self, path: Path | str, **more: Any) -> Any:
        return self.model.load(path, optimizer=self.optimizer, scheduler=self.scheduler, **more)


def check(run: Run, losses: list[float], expected: Run, expected_losses: list[float]) -> None:
    assert losses == pytest.approx(expected_losses, abs=TOLERANCE)
    state = run.model.state_dict()
    assert list(state) == list(expected.model.state_dict())
    for name, value in expected.model.state_dict().items():
        assert (state[name] - value).abs().max() <= TOLERANCE * max(1.0, value.abs().max().item()), name


def uninterrupted() -> tuple[Run, list[float]]:
    run = Run(gpt()[0])
    return run, run.steps(4)


def spoiled(run: Run) -> Run:
    """Nothing of what it holds is right."""
    for parameter in run.model.parameters():
        parameter.data.fill_(7.0)
    return run


def plain_from(path: Path) -> Run:
    """The plain model, read by torch."""
    run = spoiled(Run(gpt()[0]))
    state = {"model": run.model.state_dict()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(state, checkpoint_id=path)
    run.model.load_state_dict(state["model"])
    run.optimizer.load_state_dict(optimizer_state_dict(path, run.model, run.optimizer))
    return run


@pytest.mark.parametrize("before", ["zero 3 x tp", "tp x pp", "zero 1"])
def test_every_plan_goes_on_under_every_other_and_in_the_plain_model(
    captured: Captured, before: str, tmp_path: Path
) -> None:
    expected, losses = uninterrupted()
    first = Run(build(captured, before))
    assert first.steps(2) == pytest.approx(losses[:2], abs=TOLERANCE)
    first.save(tmp_path / "ck", extra={"epoch": 1})
    check(first, first.steps(2), expected, losses[2:])  # saving changes nothing

    for after in ("zero 3 x tp", "tp x pp", "zero 1", "one", "pp 1f1b"):
        second = spoiled(Run(build(captured, after)))
        assert second.load(tmp_path / "ck") == {"epoch": 1}
        assert second.model.step == 2
        check(second, second.steps(2), expected, losses[2:])

    plain = plain_from(tmp_path / "ck")
    load(single_device(plain.model), tmp_path / "ck", scheduler=plain.scheduler)
    check(plain, plain.steps(2), expected, losses[2:])


def test_the_plain_model_goes_on_by_a_plan(captured: Captured, tmp_path: Path) -> None:
    expected, losses = uninterrupted()
    first = Run(gpt()[0])
    first.steps(2)
    save(single_device(first.model), tmp_path / "ck", optimizer=first.optimizer, scheduler=first.scheduler)
    second = spoiled(Run(build(captured, "dp x tp")))
    second.load(tmp_path / "ck")
    check(second, second.steps(2), expected, losses[2:])


def on_this_rank(plan: str, resume: str | None, path: str | None) -> tuple[list[float], dict[str, Any]]:
    run = Run(parallel_gpt(launch.join(), **PLANS[plan]))
    if resume is not None:
        spoiled(run).load(resume)
    losses = run.steps(2)
    if path is not None:
        run.save(path)
    return losses, run.model.state_dict()


@pytest.mark.parametrize(("before", "after"), list(itertools.permutations(["tp x pp", "zero 1", "one"], 2)))
def test_world_sizes_in_processes(pool: WorkerPool, before: str, after: str, tmp_path: Path) -> None:
    expected, losses = uninterrupted()
    path = str(tmp_path / "ck")
    pool.run(on_this_rank, before, None, path, ranks=ranks_of(PLANS[before]))
    for found, state in pool.run(on_this_rank, after, path, None, ranks=ranks_of(PLANS[after])):
        assert found == pytest.approx(losses[2:], abs=TOLERANCE)
        for name, value in expected.model.state_dict().items():
            assert (state[name] - value).abs().max() <= TOLERANCE * max(1.0, value.abs().max().item()), name
    plain = plain_from(tmp_path / "ck")
    load(single_device(plain.model), path, scheduler=plain.scheduler)
    check(plain, plain.steps(2), expected, losses[2:])


def killed_while_saving(path: str) -> None:
    run = Run(parallel_gpt(launch.join(), **PLANS["zero 1"]))
    run.steps(1)
    run.save(path)
    run.steps(1)
    if torch.distributed.get_rank() == 1:
        real = torch.save

        def die(*args: Any, **kwargs: Any) -> None:
            real(*args, **kwargs)
            os.kill(os.getpid(), signal.SIGKILL)

        torch.save = die
    run.save(path)


def test_a_rank_killed_while_it_saves_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    with WorkerPool(2, timeout_seconds=20) as pool, pytest.raises(RankLostError, match="rank 1 was killed by SIGKILL"):
        pool.run(killed_while_saving, str(tmp_path / "ck"))
    assert not (tmp_path / ".ck.saving" / ".metadata").exists()
    found, expected = plain_from(tmp_path / "ck"), Run(gpt()[0])
    expected.steps(1)
    for name, value in expected.model.state_dict().items():
        assert (found.model.state_dict()[name] - value).abs().max() <= TOLERANCE
    save(single_device(expected.model), tmp_path / "ck")
    assert [p.name for p in tmp_path.iterdir()] == ["ck"]


class Mixed(nn.Module):
    """Dropout, batch norm, and parameters and buffers that forward does not use; one of them is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 2))
        self.unused = nn.Parameter(torch.randn(3))
        self.frozen = nn.Parameter(torch.randn(2), requires_grad=False)
        self.register_buffer("note", torch.arange(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.body(x) + self.frozen).pow(2).mean()

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.version = state["version"]


def mixed(weights: int, dp: int = 1, **options: Any) -> tuple[Parallel, torch.Tensor, nn.Module]:
    torch.manual_seed(weights)
    model, x = Mixed().double(), torch.linspace(-1, 1, 16).reshape(4, 4).double()
    found = capture(copy.deepcopy(model), (x,))
    return Parallel(found, programs(found, dp=dp), InProcess(dp), RuntimeOptions(**options)), x, model


def test_dropout_masks_buffers_and_unused_tensors_go_on(tmp_path: Path) -> None:
    def train(parallel: Parallel, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> float:
        loss = parallel.train_step(x)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    first, x, model = mixed(0, dp=2, seed=5)
    optimizer = torch.optim.AdamW(first.parameters(), eps=1e-4)  # batch norm makes a gradient of mere rounding
    train(first, optimizer, x)
    first.save(tmp_path / "ck", optimizer=optimizer)
    second, _, _ = mixed(1)
    other = torch.optim.AdamW(second.parameters(), eps=1e-4)
    second.load(tmp_path / "ck", optimizer=other)
    for _ in range(2):
        assert train(first, optimizer, x) == pytest.approx(train(second, other, x), abs=TOLERANCE)
    found, wanted = second.state_dict(), first.state_dict()
    assert list(found) == list(model.state_dict())
    for name, value in wanted.items():
        if isinstance(value, torch.Tensor):
            assert (found[name].double() - value.double()).abs().max() <= TOLERANCE, name
    assert torch.equal(found["unused"], model.get_parameter("unused")) and found["_extra_state"] == {"version": 3}
    assert found["body.1.num_batches_tracked"] == 3

    plain = Mixed().double()  # its optimizer has the parameter that no plan steps on
    group = torch.optim.AdamW(plain.parameters())
    restored = load(single_device(plain), tmp_path / "ck", optimizer=group)
    assert restored.objects == {"_extra_state": {"version": 3}} and len(group.state) == 6


def test_a_model_on_meta_is_filled_from_a_checkpoint(tmp_path: Path) -> None:
    model, batch = gpt()
    model.unused = nn.Parameter(torch.randn(3))
    save(single_device(model), tmp_path / "ck")
    planned = copy.deepcopy(model)
    for module in planned.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                module._parameters[name] = nn.Parameter(parameter.detach().to("meta"))
    planned.head.weight = planned.wte.weight  # type: ignore[union-attr, assignment]
    found = capture(planned, (), batch)
    parallel = build(found, "zero 1")
    with pytest.raises(ExecutionError, match="have no values: the model is on the meta device"):
        parallel.save(tmp_path / "other")
    parallel.load(tmp_path / "ck")
    torch.testing.assert_close(parallel.train_step(**batch), model(**batch)["loss"].detach())
    assert torch.equal(parallel.state_dict()["unused"], model.get_parameter("unused"))


def test_master_weights_are_what_is_saved(tmp_path: Path) -> None:
    """Under the bf16 recipe the checkpoint holds the float32 weights that the optimizer steps on."""
    model, batch = gpt(torch.float32)
    found = capture(model, (), batch, precision="bf16")
    recipe = Recipe(precision="bf16")

    def fresh() -> Run:
        return Run(Parallel(found, programs(found, recipe, tp=2), InProcess(2)))

    first = fresh()
    first.steps(2)
    first.save(tmp_path / "ck")
    metadata = dcp.FileSystemReader(tmp_path / "ck").read_metadata().state_dict_metadata
    assert {m.properties.dtype for n, m in metadata.items() if n.startswith("model.")} == {torch.float32}
    second = spoiled(fresh())
    second.load(tmp_path / "ck")
    assert second.steps(2) == first.steps(2)
    for name, value in first.model.state_dict().items():
        assert torch.equal(second.model.state_dict()[name], value)


def test_information_and_other_models(captured: Captured, tmp_path: Path) -> None:
    parallel = build(captured, "tp")
    parallel.information["plan"] = json.dumps({"a": 1})
    parallel.save(tmp_path / "ck")
    restored = load(single_device(gpt()[0]), tmp_path / "ck")
    assert restored.information == {"plan": '{"a": 1}', "step": 0, "seed": 0}
    save(single_device(nn.Linear(2, 2)), tmp_path / "other")
    with pytest.raises(
        CheckpointError, match=r"another model: 28 missing \(wte.weight, .*; 2 unknown \(weight, bias\)"
    ):
        parallel.load(tmp_path / "other")
