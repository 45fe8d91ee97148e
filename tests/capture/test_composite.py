"""Composite operators: captured whole, split as their rule says, exact; a wrong rule is refused."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoplan
from autoplan.capture import capture
from autoplan.runtime.launch import WorkerPool
from autoplan.search.uniform import named_plan
from autoplan.verification import verify
from searchspace.conversion import ElementCount
from searchspace.errors import AutoplanWarning, CaptureError, RuleError
from searchspace.graph import Graph, LocalOffset
from searchspace.materialize import train_program
from searchspace.plan import ClusterInfo, Plan, Recipe
from searchspace.program import Exchange


def data(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator)


@autoplan.composite("t d^, t e+, e d^ h+, e h+ f -> t f")
def experts(x: Tensor, gates: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Every expert sees every token, and a gate of zero drops what it makes of it."""
    hidden = torch.relu(torch.einsum("td,edh->teh", x, up))
    return torch.einsum("teh,ehf,te->tf", hidden, down, gates)


@autoplan.composite("t d^, t k^, t k^, e+ d^ f -> t f", offsets={"first": "e"})
def chosen(x: Tensor, gates: Tensor, choice: Tensor, weights: Tensor, *, first: int = 0) -> Tensor:
    """Dispatch by data: an expert computes the tokens that chose it, and no others."""
    result = x.new_zeros(len(x), weights.shape[2])
    for index, weight in enumerate(weights):
        tokens, place = torch.where(choice == first + index)
        result = result.index_add(0, tokens, gates[tokens, place, None] * torch.tanh(x[tokens] @ weight))
    return result


@autoplan.composite("g s^ d, g s^ e -> e g c^ d")
def dispatch(x: Tensor, gates: Tensor, capacity: int) -> Tensor:
    """The ``capacity`` tokens of each group that an expert likes best."""
    value, index = gates.transpose(1, 2).topk(capacity, dim=-1)
    picked = torch.take_along_dim(x[:, None], index[..., None], dim=2)
    return (picked * value[..., None]).transpose(0, 1)


@autoplan.composite("e g c^ d, g s^ e+ -> g s^ d")
def combine(y: Tensor, gates: Tensor) -> Tensor:
    index = gates.transpose(1, 2).topk(y.shape[2], dim=-1).indices
    result = y.new_zeros(y.shape[1], gates.shape[1], y.shape[3])
    for expert in range(y.shape[0]):
        result = result.scatter_add(1, index[:, expert, :, None].expand(-1, -1, y.shape[3]), y[expert])
    return result


class Mixture(nn.Module):
    """A mixture of experts in one of three ways."""

    def __init__(self, way: str, width: int = 6, hidden: int = 8, count: int = 4) -> None:
        super().__init__()
        self.way = way
        self.router = nn.Linear(width, count)
        self.up = nn.Parameter(data(count, width, hidden) / 3)
        self.down = nn.Parameter(data(count, hidden, width) / 3)

    def forward(self, x: Tensor) -> Tensor:
        gates = self.router(x).softmax(-1)
        if self.way == "all to all":
            tokens = dispatch(x, gates, x.shape[1] // 2)
            hidden = torch.einsum("egcd,edh->egch", tokens, self.up).relu()
            return (x + combine(torch.einsum("egch,ehd->egcd", hidden, self.down), gates)).pow(2).mean()
        x, gates = x.flatten(0, 1), gates.flatten(0, 1)
        if self.way == "dense":
            return (x + experts(x, gates, self.up, self.down)).pow(2).mean()
        best, choice = gates.topk(2, dim=-1)
        return (x + chosen(x, best, choice, self.up)[:, : x.shape[1]]).pow(2).mean()


def plan_with(graph: Graph, ranks: int = 2, **labels: str) -> Plan:
    """Replicated, but for the operators that end in these names; what each reads and writes is converted."""
    plan = named_plan(graph, ClusterInfo(name=f"cpu:1x{ranks}", devices=ranks), Recipe(), dp=ranks)
    chosen_labels = {
        op.name: {"dp": label} for op in graph.operators for end, label in labels.items() if op.name.endswith(end)
    }
    assert len(chosen_labels) == len(labels)
    operators = {**plan.transformation.operators, **chosen_labels}
    return plan.model_copy(update={"transformation": plan.transformation.model_copy(update={"operators": operators})})


@pytest.mark.parametrize(
    ("way", "ranks", "labels"),
    [
        ("dense", 2, {"experts": "e"}),
        ("dense", 2, {"experts": "h"}),
        ("dense", 3, {"experts": "f"}),
        ("choice", 2, {"chosen": "e"}),
        ("choice", 3, {"chosen": "t"}),
        ("all to all", 2, {"dispatch": "e", "combine": "e"}),
    ],
)
def test_mixture(way: str, ranks: int, labels: dict[str, str]) -> None:
    model, batch = Mixture(way).double(), data(6, 4, 6)
    graph = capture(model, (batch,)).graph
    verify(model, (batch,), plan=plan_with(graph, ranks, **labels)).raise_if_different()
    verify(model, (batch,), ranks=ranks).raise_if_different()


def test_mixture_on_processes(pool: WorkerPool) -> None:
    """What a rank's process knows of a composite does not depend on what was captured in it before, and where."""
    model, batch = Mixture("choice").double(), data(6, 4, 6)
    plan = plan_with(capture(model, (batch,)).graph, 2, chosen="e")
    verify(model, (batch,), plan=plan, pool=pool).raise_if_different()


def test_experts_are_dispatched_by_all_to_all() -> None:
    """Groups of tokens on each rank, experts on each rank: the layouts between them are exchanged all to all."""
    model, batch = Mixture("all to all").double(), data(6, 4, 6)
    graph = capture(model, (batch,)).graph
    plan = plan_with(graph, 2, dispatch="g", einsum="e", relu="a", einsum_1="e", combine="g")
    verify(model, (batch,), plan=plan).raise_if_different()
    program = train_program(graph, plan, ElementCount())
    kinds = Counter(i.kind for step in program.steps for i in step.ranks.values() if isinstance(i, Exchange))
    assert kinds["all_to_all"] >= 2 * 2 * 2  # there and back, forward and backward, on two ranks


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return 6 * x * x * gradient  # twice the derivative, so that it is seen which backward runs


@autoplan.composite("* -> *")
def cube(x: Tensor) -> Tensor:
    return Cube.apply(x)


@autoplan.composite("b^ d^, d^ n -> b^ n")
def halved(x: Tensor, weight: Tensor) -> Tensor:
    """Control flow that depends on the data of the whole batch."""
    while x.abs().max() > 1:
        x = x / 2
    return x @ weight


@autoplan.composite("b s^ (h d^), n+ (h d^) -> b h s^", sizes={"h": 2})
def scores(x: Tensor, keys: Tensor) -> Tensor:
    b, s, _ = x.shape
    return torch.einsum("bshd,nhd->bhs", x.reshape(b, s, -1, 3), keys.reshape(len(keys), -1, 3))


@autoplan.composite("t d^, d^, d^, n^ d^, n^ -> t n^, t 1")
class Head(nn.Module):
    def __init__(self, width: int, classes: int, scale: float = 1.0) -> None:
        super().__init__()
        self.norm, self.linear, self.scale = nn.LayerNorm(width), nn.Linear(width, classes), scale

    def forward(self, x: Tensor, *, bias: float = 0.0) -> dict[str, Tensor]:
        y = self.norm(x)
        return {"logits": self.linear(y) * self.scale + bias, "norm": y.pow(2).sum(-1, keepdim=True)}


@autoplan.composite("t d^, n d^, n -> t n")
class Classes(nn.Linear):
    """A module class whose forward is inherited."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.keys = nn.Parameter(data(5, 6))
        self.heads = nn.ModuleList([Head(6, 6), Head(6, 6), Head(6, 6, scale=2.0)])

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(cube(x))
        for head in self.heads:
            found = head(y, bias=0.5)
            y = found["logits"] + found["norm"]
        y = halved(y, self.first.weight)
        return scores(y.unflatten(0, (-1, 2)), self.keys).pow(2).mean() + y.pow(2).mean()


def test_composites_of_all_kinds_are_exact() -> None:
    model, batch = Model().double(), data(8, 6)
    graph = capture(model, (batch,)).graph
    names = [op.name for op in graph.operators if op.family == "composite"]
    assert names == ["cube", "heads.0/Head", "heads.1/Head", "heads.2/Head", "halved", "scores"]
    assert graph.operator["heads.0/Head"].saved  # and what autograd keeps is known
    for labels in ({}, {"heads.1/Head": "t", "scores": "h", "halved": "n"}, {"scores": "n", "cube": "l1"}):
        verify(model, (batch,), plan=plan_with(graph, 2, **labels)).raise_if_different()
    verify(model, (batch,), ranks=2).raise_if_different()


def test_eager_calls_run_the_function_itself() -> None:
    x = data(3).requires_grad_()
    cube(x).sum().backward()
    assert x.grad is not None and torch.allclose(x.grad, 6 * x.detach() ** 2)
    assert set(Head(4, 2)(torch.zeros(3, 4))) == {"logits", "norm"}


def test_equal_modules_are_equal_operators() -> None:
    """So that repeated layers fold; another number inside makes another operator."""
    graph = capture(Model().float(), (torch.zeros(8, 6),)).graph
    keys = [op.args[1] for op in graph.operators if op.target == "autoplan_composite.Head.default"]
    assert keys[0] == keys[1] != keys[2]


def test_offsets_follow_the_shard() -> None:
    model = Mixture("choice")
    graph = capture(model, (torch.zeros(6, 4, 6),)).graph
    (starts,) = (op.args[2] for op in graph.operators if op.name == "chosen")
    assert isinstance(starts, tuple) and isinstance(starts[0], LocalOffset)


def test_operations_are_counted() -> None:
    graph = capture(Mixture("dense").float(), (torch.zeros(5, 4, 6),)).graph
    (flops,) = (op.flops for op in graph.operators if op.name == "experts")
    assert flops >= 2 * 20 * 4 * (6 * 8 + 8 * 6)


def test_verify_rule_takes_composites() -> None:
    tensors = [t.requires_grad_() for t in (data(4, 6), data(4, 4), data(4, 6, 5), data(4, 5, 3))]
    assert autoplan.verify_rule(experts, tensors) == ("t", "e", "h", "f")
    assert autoplan.verify_rule(Head(6, 4).double(), (data(4, 6).requires_grad_(),), kwargs={"bias": 2.0}) == ("t",)
    assert autoplan.verify_rule(Classes(6, 4).double(), (data(4, 6).requires_grad_(),)) == ("t", "n")


def refused(function: Any, *tensors: Tensor) -> str:
    class Owner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, *given: Tensor) -> Tensor:
            return sum((t.sum() for t in [function(*given)]), torch.zeros(())) * self.weight

    with pytest.raises(CaptureError) as error:
        capture(Owner(), tensors)
    return str(error.value)


def test_wrong_rules_are_refused() -> None:
    wrong = autoplan.composite("b d, d n -> b n", name="wrong")(lambda x, w: (x / x.sum()) @ w)
    message = refused(wrong, data(4, 6), data(6, 4))
    assert "composite" in message and "fails along 'b' in 2 parts" in message and "^" in message
    shapes = autoplan.composite("b d -> d", name="shapes")(lambda x: x.sum(1))
    message = refused(shapes, data(4, 6))
    assert "d is a multiple of 6, but the tensor has 4" in message and "argument 0 [4, 6]" in message
    few = autoplan.composite("b d -> b d", name="few")(lambda x, y: x + y)
    assert "describes 1 input tensors, got 2" in refused(few, data(4, 6), data(4, 6))


def test_what_parts_cannot_agree_on_is_refused() -> None:
    noisy = autoplan.composite("b d -> b d", name="noisy")(lambda x: nn.functional.dropout(x, 0.5))
    assert "composite noisy draws random numbers" in refused(noisy, data(4, 6))
    number = autoplan.composite("b d -> b", name="number")(lambda x: 3)
    assert "composite number returned ['int']" in refused(number, data(4, 6))
    broken = autoplan.composite("b d -> b d", name="broken")(lambda x: x @ x)
    assert "composite broken fails: RuntimeError" in refused(broken, data(4, 6))
    writing = autoplan.composite("b d -> b d", name="writing")(lambda x: x.mul_(2))
    assert "writing" in refused(writing, data(4, 6))


def test_a_rule_that_cannot_be_tried_is_said_so() -> None:
    picky = autoplan.composite("b d -> b d", name="picky", shapes=torch.empty_like)(only_positive)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")

        class Owner(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                return picky(super().forward(x)).mean()

        capture(Owner(6, 6), (torch.zeros(4, 6),))
    messages = [str(w.message) for w in caught if issubclass(w.category, AutoplanWarning)]
    assert any("composite picky could not be verified" in m and "verify_rule" in m for m in messages)


def only_positive(x: Tensor) -> Tensor:
    if bool((x < 0).any()):
        raise ValueError("negative")
    return x


def test_decorator_refuses_what_it_cannot_take() -> None:
    with pytest.raises(RuleError, match=r"expected one '->'"):
        autoplan.composite("b d")
    with pytest.raises(RuleError, match=r"'first' is to start 'e', which no input of rule"):
        autoplan.composite("b d -> b d", offsets={"first": "e"})
    with pytest.raises(CaptureError, match=r"expected a function or an nn\.Module class, got 3"):
        autoplan.composite("b d -> b d")(3)  # type: ignore[type-var]
    with pytest.raises(CaptureError, match=r"an identifier, got '<lambda>'"):
        autoplan.composite("b d -> b d")(lambda x: x)
