"""Small models of kinds that have gone wrong once, each under plans of every kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from autoplan.api import parallelize
from autoplan.capture import capture
from autoplan.search.uniform import named_plan
from autoplan.verification import verify
from searchspace.errors import IllegalPlanError
from searchspace.plan import ClusterInfo, Recipe
from tests.capture.models import build

PLANS: dict[str, dict[str, Any]] = {
    "one": {},
    "micro-batches": {"micro_batches": 4},
    "dp": {"dp": 2, "micro_batches": 2},
    "tp": {"tp": 2, "micro_batches": 2},
    "pp": {"pp": 2, "micro_batches": 4},
    "zero 1": {"dp": 2, "zero": 1},
    "zero 3": {"dp": 2, "zero": 3, "micro_batches": 2},
}


class Regularised(nn.Module):
    """A part of the loss depends on parameters alone: it counts once, not once a micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.b(F.relu(self.a(x))), y) + 0.1 * (self.a.weight**2).sum()


class Spectral(nn.Module):
    """A norm estimated without gradient from a reshaped parameter, which has one; its estimate is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = spectral_norm(nn.Linear(5, 8)), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.b(F.relu(self.a(x))), y)


class Bag(nn.Module):
    """A mean of embeddings; ``sparse`` asks for sparse gradients, ours are dense and equal."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(11, 8, sparse=sparse), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.out(self.embedding(x).mean(1)), y)


class Attends(nn.Module):
    """Torch's attention with weights and a Transformer: the batch may be the inner one of the merged dims."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(8, 2, batch_first=batch_first)
        encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=batch_first), 1, enable_nested_tensor=False
        )
        self.transformer = nn.Transformer(8, 2, 1, 1, 12, dropout=0.0, batch_first=batch_first, custom_encoder=encoder)
        self.rows, self.batch_first = nn.Linear(8, 8), batch_first

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if not self.batch_first:
            source, target = source.transpose(0, 1), target.transpose(0, 1)
        attended, weights = self.attend(target, source, source)
        rows = F.relu(self.rows(attended.reshape(-1, 8))).reshape(attended.shape)
        return (self.transformer(source, rows) ** 2).mean() + (weights**2).mean()


class Empty(nn.Module):
    """Parameters and buffers without elements, and layers without features."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(5, 3), nn.Linear(5, 0), nn.Linear(0, 3)
        self.d, self.e = nn.Parameter(torch.zeros(0, 4)), nn.Parameter(torch.zeros(0, 5))
        self.register_buffer("f", torch.zeros(0))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logits = torch.cat([self.a(x) + self.c(self.b(x)), x @ self.e.t()], 1)
        return F.cross_entropy(logits, y) + (2 * self.d).sum() + self.f.sum()


def sequences() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(8, 6, 8).double(), torch.randn(8, 4, 8).double()


def floats() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(8, 5).double(), torch.randint(0, 3, (8,))


def indices() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(0, 11, (8, 4)), torch.randint(0, 3, (8,))


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[torch.Tensor, ...]]]] = {
    "regularised": (Regularised, floats),
    "spectral": (Spectral, floats),
    "bag": (Bag, indices),
    "empty": (Empty, floats),
    "attends batch first": (lambda: Attends(True), sequences),
    "attends sequence first": (lambda: Attends(False), sequences),
}


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_agree_with_the_single_device(kind: str) -> None:
    torch.manual_seed(0)
    build, inputs = KINDS[kind]
    model, args = build().double(), inputs()
    graph = capture(model, args).graph
    for name, settings in PLANS.items():
        ranks = settings.get("dp", 1) * settings.get("tp", 1) * settings.get("pp", 1)
        plan = named_plan(graph, ClusterInfo(name=f"cpu:1x{ranks}", devices=ranks), Recipe(), **settings)
        comparison = verify(model, args, plan=plan)
        assert comparison.agrees, (name, comparison.worst("gradient"))


def test_gradients_scaled_by_frequency_need_all_samples() -> None:
    torch.manual_seed(0)
    model, args = Bag().double(), indices()
    model.embedding.scale_grad_by_freq = True
    graph = capture(model, args).graph
    for name in ("one", "dp", "tp", "zero 3"):
        settings = {k: v for k, v in PLANS[name].items() if k != "micro_batches"}
        ranks = settings.get("dp", 1) * settings.get("tp", 1)
        plan = named_plan(graph, ClusterInfo(name=f"cpu:1x{ranks}", devices=ranks), Recipe(), **settings)
        verify(model, args, plan=plan).raise_if_different()
    with pytest.raises(IllegalPlanError, match=r"aten\.embedding.* couples the samples of a batch"):
        parallelize(
            model, args, plan=named_plan(graph, ClusterInfo(name="cpu:1x1", devices=1), Recipe(), micro_batches=2)
        )


def test_sparse_gradients_become_dense_and_equal() -> None:
    torch.manual_seed(0)
    dense, args = Bag().double(), indices()
    sparse = Bag(sparse=True).double()
    sparse.load_state_dict(dense.state_dict())
    dense(*args).backward()
    parallel = parallelize(sparse, args, cluster="cpu:1x2")
    parallel.train_step(*args)
    found = parallel.full_gradients()
    for name, parameter in dense.named_parameters():
        assert torch.allclose(found[name], parameter.grad, rtol=0, atol=1e-12)


def test_a_tied_weight_with_a_gradient_of_another_layout_at_each_use() -> None:
    """Replicated use and divided use share one buffer, but their gradients must not run together."""
    call = build("gpt")
    graph = capture(*call).graph
    plan = named_plan(graph, ClusterInfo(name="cpu:1x2", devices=2), Recipe(), dp=2, micro_batches=2)
    operators = dict(plan.transformation.operators)
    del operators[next(op.name for op in graph.operators if op.module == "wte")]
    changed = plan.transformation.model_copy(update={"operators": operators})
    verify(*call, plan=plan.replace(transformation=changed)).raise_if_different()
