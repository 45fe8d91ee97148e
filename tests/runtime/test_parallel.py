"""``Parallel`` equals the single device: output, loss, gradients, norms and parameters, by every plan."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoplan.capture import Captured, capture
from autoplan.runtime import launch
from autoplan.runtime.in_process import InProcess
from autoplan.runtime.launch import WorkerPool
from autoplan.runtime.optimizers import register_optimizer
from autoplan.runtime.parallel import Parallel, RuntimeOptions
from autoplan.runtime.parameters import Shards
from searchspace.errors import CaptureError, CheckpointError, ExecutionError, NonFiniteError
from searchspace.plan import Recipe
from tests.runtime.models import OPTIONS, PLANS, captured_gpt, gpt, parallel_gpt, programs, ranks_of

Series = dict[str, Any]
TOLERANCE = 1e-9


@pytest.fixture(scope="module")
def captured() -> Captured:
    return captured_gpt()


def build(captured: Captured, options: RuntimeOptions = OPTIONS, **degrees: Any) -> Parallel:
    return Parallel(captured, programs(captured, **degrees), InProcess(ranks_of(degrees)), options)


def reference(steps: int = 3) -> Series:
    model, batch = gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found: Series = {"losses": [], "norms": [], "logits": model(**batch)["logits"].detach()}
    for step in range(steps):
        loss = model(**batch)["loss"]
        loss.backward()
        if step == 0:
            found["gradients"] = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        found["losses"].append(loss.item())
        found["norms"].append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    found["state"] = model.state_dict()
    return found


def trained(parallel: Parallel, steps: int = 3) -> Series:
    _, batch = gpt()
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    found: Series = {"losses": [], "norms": [], "logits": parallel(**batch)["logits"]}
    for step in range(steps):
        loss = parallel.train_step(**batch)
        if step == 0:
            found["gradients"] = parallel.full_gradients()
        found["losses"].append(loss.item())
        found["norms"].append(parallel.clip_grad_norm_(0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    found["state"] = parallel.state_dict()
    return found


def check(found: Series, expected: Series) -> None:
    assert found["losses"] == pytest.approx(expected["losses"], abs=TOLERANCE)
    assert found["norms"] == pytest.approx(expected["norms"], abs=TOLERANCE)
    assert (found["logits"] - expected["logits"]).abs().max() <= TOLERANCE
    for part in ("gradients", "state"):
        assert list(found[part]) == list(expected[part])
        for name, value in expected[part].items():
            assert found[part][name].shape == value.shape
            assert (found[part][name] - value).abs().max() <= TOLERANCE, (part, name)


@pytest.mark.parametrize("plan", PLANS)
def test_parity_in_one_process(captured: Captured, plan: str) -> None:
    check(trained(build(captured, **PLANS[plan])), reference())


def train_on_this_rank(plan: str) -> Series:
    return trained(parallel_gpt(launch.join(), **PLANS[plan]))


@pytest.mark.parametrize("plan", ["dp", "tp", "pp 1f1b", "zero 1", "zero 3", "dp x tp", "tp x pp"])
def test_parity_on_processes(pool: WorkerPool, plan: str) -> None:
    results = pool.run(train_on_this_rank, plan, ranks=ranks_of(PLANS[plan]))
    for found in results:
        check(found, reference())
        assert found["losses"] == results[0]["losses"] and found["norms"] == results[0]["norms"]


def test_replicas_stay_bit_identical(captured: Captured) -> None:
    parallel = build(captured, **PLANS["dp x tp"])
    trained(parallel)
    seen: dict[tuple[str, Any], Tensor] = {}
    for shard in parallel.shards:
        first = seen.setdefault((shard.name, shard.region), shard.parameter)
        assert first.equal(shard.parameter) and shard.primary == (first is shard.parameter)


def test_gradients_accumulate_over_calls(captured: Captured) -> None:
    _, batch = gpt()
    parallel = build(captured, **PLANS["zero 1"])
    parallel.train_step(**batch)
    once = parallel.full_gradients()
    parallel.train_step(**batch)
    twice = parallel.full_gradients()
    for name, value in once.items():
        torch.testing.assert_close(twice[name], 2 * value)
    parallel.zero_grad()
    assert all(value is None for value in parallel.full_gradients().values())


def test_the_users_model_is_not_changed(captured: Captured) -> None:
    before = copy.deepcopy(captured.model.state_dict())
    trained(build(captured, **PLANS["one"]))
    assert all(value.equal(before[name]) for name, value in captured.model.state_dict().items())


def test_parameter_groups_by_name_and_scheduler(captured: Captured) -> None:
    """No weight decay for norms and biases, and a learning-rate schedule, as always."""

    def run(model: Any, step: Any) -> None:
        plain = [p for n, p in model.named_parameters() if n.endswith("bias") or "ln" in n]
        decayed = [p for n, p in model.named_parameters() if not (n.endswith("bias") or "ln" in n)]
        optimizer = torch.optim.AdamW([{"params": plain, "weight_decay": 0.0}, {"params": decayed}], lr=1e-2)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
        for _ in range(3):
            step()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()

    model, batch = gpt()
    run(model, lambda: model(**batch)["loss"].backward())
    parallel = build(captured, **PLANS["tp x pp"])
    run(parallel, lambda: parallel.train_step(**batch))
    for name, value in parallel.state_dict().items():
        assert (value - model.state_dict()[name]).abs().max() <= TOLERANCE


def test_changes_without_optimizer_are_seen(captured: Captured) -> None:
    """ZeRO-1 keeps a second copy of each weight: any write to the shards reaches it before the next read."""
    _, batch = gpt()
    parallel = build(captured, **PLANS["zero 1"])
    before = parallel.eval_step(**batch)
    with torch.no_grad():
        for parameter in parallel.parameters():
            parameter.mul_(1.5)
    after = parallel.eval_step(**batch)
    model, _ = gpt()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    assert not torch.allclose(before, after)
    torch.testing.assert_close(after, model(**batch)["loss"].detach())


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
def test_norms_count_every_element_once(captured: Captured, norm_type: float) -> None:
    model, batch = gpt()
    model(**batch)["loss"].backward()
    want = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None], norm_type)
    for plan in ("dp x tp", "pp 1f1b", "zero 3 x tp"):
        parallel = build(captured, **PLANS[plan])
        parallel.train_step(**batch)
        torch.testing.assert_close(parallel.grad_norm(norm_type), want)


def test_state_goes_through_other_plans(captured: Captured) -> None:
    first = build(captured, **PLANS["zero 3 x tp"])
    trained(first)
    second = build(captured, **PLANS["pp 1f1b"])
    second.load_state_dict(first.state_dict())
    model, batch = gpt()
    model.load_state_dict(first.state_dict())
    torch.testing.assert_close(second.train_step(**batch), model(**batch)["loss"].detach())
    assert list(second.state_dict()) == list(model.state_dict())
    assert "head.weight" in second.state_dict() and "scale" not in second.state_dict()


def test_state_that_does_not_fit(captured: Captured) -> None:
    parallel = build(captured, **PLANS["tp"])
    state = parallel.state_dict()
    with pytest.raises(CheckpointError, match=r"missing \['ln.bias'\], unexpected \['other'\]"):
        parallel.load_state_dict({**{k: v for k, v in state.items() if k != "ln.bias"}, "other": state["ln.bias"]})
    with pytest.raises(CheckpointError, match=r"ln.bias: expected shape \[10\], got \[4\]"):
        parallel.load_state_dict({"ln.bias": torch.zeros(4)}, strict=False)
    parallel.load_state_dict({"ln.bias": torch.ones(10)}, strict=False)
    assert parallel.state_dict()["ln.bias"].eq(1).all()


def test_meta_model_is_materialised_from_a_state_or_a_function() -> None:
    model, batch = gpt()
    planned = copy.deepcopy(model)
    for module in planned.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                module._parameters[name] = nn.Parameter(parameter.detach().to("meta"))
    planned.head.weight = planned.wte.weight  # type: ignore[union-attr, assignment]
    captured = capture(planned, (), batch)
    parallel = build(captured, **PLANS["tp"])
    with pytest.raises(ExecutionError, match=r"wte\.weight, .* more have no values: the model is on the meta device"):
        parallel.train_step(**batch)
    parallel.load_state_dict(model.state_dict())
    expected = model(**batch)["loss"].detach()
    torch.testing.assert_close(parallel.train_step(**batch), expected)
    parallel = build(captured, **PLANS["zero 1"])
    parallel.initialize(lambda name, shape: model.get_parameter(name).detach())
    torch.testing.assert_close(parallel.train_step(**batch), expected)
    assert parallel.buffers()["scale"].item() == 0.5


@pytest.mark.parametrize("plan", ["one", "dp x tp", "pp 1f1b"])
def test_nonfinite(captured: Captured, plan: str) -> None:
    _, batch = gpt()
    for choice in ("raise", "skip", "ignore"):
        parallel = build(captured, RuntimeOptions(nonfinite=choice), **PLANS[plan])  # type: ignore[arg-type]
        parallel.load_state_dict({"ln.bias": torch.full((10,), float("nan"))}, strict=False)
        if choice == "raise":
            with pytest.raises(
                NonFiniteError, match="step 1: the loss is nan, or a gradient is NaN or infinite"
            ) as raised:
                parallel.train_step(**batch)
            names = str(raised.value).partition("in the gradients of ")[2].split(", ")
            assert names[0] and len(set(names)) == len(names)  # once each, although several ranks are here
        else:
            assert parallel.train_step(**batch).isnan()
        there = [parameter.grad is not None for parameter in parallel.parameters()]
        assert all(there) if choice == "ignore" else not any(there)
        assert parallel.skipped == (choice == "skip")
    with pytest.raises(ExecutionError, match='expected nonfinite to be "ignore", "raise" or "skip", got \'warn\''):
        RuntimeOptions(nonfinite="warn")  # type: ignore[arg-type]


def nonfinite_on_this_rank() -> str:
    """Only rank 1 sees the infinity, in its part of an MLP; both raise."""
    _, batch = gpt()
    parallel = parallel_gpt(launch.join(), RuntimeOptions(nonfinite="raise"), **PLANS["tp"])
    shard = next(s for s in parallel.shards if s.name == "h.0.up.weight")
    if not shard.primary or shard.rank == 1:
        with torch.no_grad():
            shard.parameter[-1, -1] = float("inf")
    try:
        parallel.train_step(**batch)
    except NonFiniteError as error:
        return str(error)
    return "finite"


def test_nonfinite_is_decided_by_all_ranks(pool: WorkerPool) -> None:
    assert all("step 1: the loss is nan" in text for text in pool.run(nonfinite_on_this_rank, ranks=2))


def sharded_on_this_rank(plan: str) -> Series:
    transport = launch.join()
    parallel = parallel_gpt(transport, RuntimeOptions(sharded_input=True), **PLANS[plan])
    _, batch = gpt()
    mine = {name: value[[slice(0, 3), slice(3, 7)][transport.rank]] for name, value in batch.items()}
    return {"loss": parallel.train_step(**mine).item(), "gradients": parallel.full_gradients()}


@pytest.mark.parametrize("plan", ["dp", "pp 1f1b"])
def test_each_rank_passes_its_part(pool: WorkerPool, plan: str) -> None:
    expected = reference(1)
    for found in pool.run(sharded_on_this_rank, plan, ranks=2):
        assert found["loss"] == pytest.approx(expected["losses"][0], abs=TOLERANCE)
        for name, value in expected["gradients"].items():
            assert (found["gradients"][name] - value).abs().max() <= TOLERANCE


def test_calls_that_differ_from_the_capture(captured: Captured) -> None:
    _, batch = gpt()
    parallel = build(captured, **PLANS["one"])
    with pytest.raises(CaptureError, match=r"missing kwargs.ids.*not expected args\.0"):
        parallel.train_step(batch["ids"])
    with pytest.raises(CaptureError, match=r"expected shape \(7, 6\), got \(7, 5\)"):
        parallel.train_step(ids=batch["ids"][:, :5], labels=batch["labels"])


def test_wrong_number_of_ranks(captured: Captured) -> None:
    with pytest.raises(ExecutionError, match=r"the plan runs on ranks \[0, 1\], but 4 ranks were started"):
        Parallel(captured, programs(captured, dp=2), InProcess(4))


def squares(y: Tensor) -> Tensor:
    return y.pow(2).mean()


class Branches(nn.Module):
    """Depends on the mode by itself, without an operator that would say so."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y * 2 if self.training else y


DEPENDENT: dict[str, tuple[nn.Module, str]] = {
    "dropout": (nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), r"autoplan.dropout.default in 1"),
    "batch norm": (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), "in 1"),
    "branches": (nn.Sequential(nn.Linear(4, 4), Branches()), r"aten.mul.* in 1"),
}


@pytest.mark.parametrize("case", DEPENDENT)
def test_evaluation_is_exact_or_refused(case: str) -> None:
    """What was captured in training mode is never passed off as evaluation; the way that the error names works."""
    model, place = DEPENDENT[case]
    x = torch.randn(6, 4)
    parallel = build(capture(model, (x,), loss_fn=squares))
    assert parallel.training
    for call in (parallel.eval, lambda: parallel.eval_step(x)):
        with pytest.raises(ExecutionError, match=f"captured in training mode and .* evaluation mode .*{place}"):
            call()
    parallel.train_step(x)
    with pytest.raises(ExecutionError, match=r'so that eval_step would be wrong; .* mode="inference"'):
        parallel.eval_step(x)
    assert all(module.training for module in model.modules())

    evaluated = capture(model, (x,), mode="inference")
    second = Parallel(evaluated, programs(evaluated, Recipe(mode="inference"), tp=2), InProcess(2))
    second.load_state_dict(parallel.state_dict())
    plain = copy.deepcopy(model).eval()
    plain.load_state_dict(parallel.state_dict())
    torch.testing.assert_close(second.eval_step(x), plain(x).detach())
    assert second.eval() is second and not second.training

    frozen = build(capture(plain, (x,), loss_fn=squares))
    torch.testing.assert_close(frozen.eval_step(x), squares(plain(x)).detach())
    with pytest.raises(ExecutionError, match=r"captured in evaluation mode .* training mode .*call model.train\(\)"):
        frozen.train()


def test_evaluation_of_a_model_without_modes(captured: Captured) -> None:
    model, batch = gpt()
    parallel = build(captured, **PLANS["tp"])
    assert parallel.training
    torch.testing.assert_close(parallel.eval_step(**batch), model.eval()(**batch)["loss"].detach())
    assert not parallel.eval().training and parallel.train().training
    off = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0))
    x = torch.randn(6, 4)
    torch.testing.assert_close(build(capture(off, (x,), loss_fn=squares)).eval_step(x), squares(off(x)).detach())


def test_batch_norm_buffers_follow_the_forward() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double()
    x = torch.randn(6, 4).double()
    captured = capture(model, (x,), loss_fn=lambda y: y.pow(2).mean())
    parallel = build(captured)
    plain = copy.deepcopy(model)
    for _ in range(2):
        torch.testing.assert_close(parallel(x), plain(x).detach())
    parallel.train_step(x)
    plain(x)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(parallel.state_dict()[name], value)


def test_inference() -> None:
    model, batch = gpt()
    captured = capture(model, (), batch, mode="inference")
    parallel = Parallel(captured, programs(captured, Recipe(mode="inference"), tp=2), InProcess(2))
    torch.testing.assert_close(parallel(**batch)["logits"], model(**batch)["logits"].detach())
    with pytest.raises(ExecutionError, match='planned with mode="inference"; it has no train_step'):
        parallel.train_step(**batch)


def test_model_wholly_on_meta() -> None:
    """Persistent buffers come with the state; the others must be given."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double()
    x = torch.randn(6, 4).double()

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model
            self.register_buffer("table", torch.tensor([2.0]).double(), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            return (self.inner(x) * self.table).pow(2).mean()

    plain = Scaled()
    parallel = build(capture(copy.deepcopy(plain).to("meta"), (x,)))
    parallel.load_state_dict(plain.state_dict())
    with pytest.raises(ExecutionError, match="table has no value: it is on the meta device"):
        parallel.train_step(x)
    parallel.load_state_dict({**plain.state_dict(), "table": plain.table})
    torch.testing.assert_close(parallel.train_step(x), plain(x).detach())


def test_an_optimizer_that_writes_behind_the_version_counter(captured: Captured) -> None:
    class Old(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {})

        def step(self, closure: Any = None) -> None:
            for parameter in self.param_groups[0]["params"]:
                parameter.data.sub_(parameter.grad)

    register_optimizer(Old, needs="elements")
    _, batch = gpt()
    losses = []
    for plan in ("one", "zero 1"):
        parallel = build(captured, **PLANS[plan])
        optimizer = Old(parallel.parameters())
        parallel.train_step(**batch)
        optimizer.step()
        losses.append(parallel.eval_step(**batch).item())
    assert losses[0] == pytest.approx(losses[1], abs=TOLERANCE)


class Elsewhere(InProcess):
    """A process whose only rank has no part of the plan's parameters."""

    @property
    def ranks(self) -> tuple[int, ...]:
        return (3,)


def test_a_rank_without_parameters_can_have_an_optimizer(captured: Captured) -> None:
    program = programs(captured, **PLANS["tp"]).train
    assert program is not None
    values = {tensor.name: captured.model.get_parameter(tensor.source) for tensor in captured.graph.parameters}
    shards = Shards(captured.graph, program, Elsewhere(4), values)
    ((name, parameter),) = shards.named_parameters()
    assert name == "autoplan.no_parameters" and parameter.numel() == 0
    torch.optim.AdamW([parameter], lr=1e-2).step()


def dropout_losses(transport: InProcess, **degrees: Any) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Dropout(0.5), nn.Linear(12, 6)).double()
    x = torch.randn(8, 6).double()
    captured = capture(model, (x,), loss_fn=lambda y: y.pow(2).mean())
    parallel = Parallel(captured, programs(captured, **degrees), transport, RuntimeOptions(seed=7))
    return [parallel.train_step(x).item() for _ in range(3)]


def test_every_plan_draws_the_same_dropout() -> None:
    want = dropout_losses(InProcess(1))
    assert len(set(want)) == 3 and dropout_losses(InProcess(1)) == want
    for degrees in ({"dp": 2}, {"tp": 2}, {"pp": 2, "micro_batches": 2}, {"micro_batches": 4}):
        assert dropout_losses(InProcess(ranks_of(degrees)), **degrees) == pytest.approx(want, abs=TOLERANCE)


@pytest.mark.gpu
@pytest.mark.parametrize("plan", ["one", "one, micro-batches"])
def test_parity_with_nccl_on_one_gpu(plan: str) -> None:
    """The CPU twin is test_parity_on_processes."""
    with WorkerPool(1, device="cuda") as gpu:
        (found,) = gpu.run(train_on_this_gpu, plan)
    check(found, reference())


def train_on_this_gpu(plan: str) -> Series:
    found = train_on_this_rank(plan)
    for part in ("gradients", "state"):
        found[part] = {name: value.cpu() for name, value in found[part].items()}
    return {**found, "logits": found["logits"].cpu()}
