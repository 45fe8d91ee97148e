"""Small plans and a stand-in for the API, for tests of what is shown and stored."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from autoplan.report.comparison import Outcome, compare
from searchspace.errors import InfeasibleError
from searchspace.plan import (
    ClusterInfo,
    Lane,
    ModelInfo,
    Order,
    ParameterPlan,
    Placement,
    Plan,
    Prediction,
    Recipe,
    RunnerUp,
    SearchRecord,
    SiteLayouts,
    Stage,
    Transformation,
)


def small_plan(name: str = "tiny", global_batch: int | None = 8, layers: int = 4) -> Plan:
    """Two stages of two devices; every layer split along ``n``, the first parameter sharded."""
    operators = [f"layers.{i}.up" for i in range(layers)]
    half = layers // 2
    return Plan(
        model=ModelInfo(name=name, fingerprint="0123456789abcdef"),
        cluster=ClusterInfo(name="cpu:1x4", devices=4),
        recipe=Recipe(global_batch=global_batch),
        transformation=Transformation(
            micro_batches=2,
            operators={operator: {"tp": "n"} for operator in operators} | {"loss": {"tp": ""}},
            parameters={
                "layers.0.up.weight": ParameterPlan(
                    optimizer={"tp": "S(0)"}, sites={0: SiteLayouts(stored={"tp": "S(0)"}, gradient={"tp": "P"})}
                ),
                "layers.1.up.weight": ParameterPlan(),
            },
            recompute=("layers.0", "layers.1"),
        ),
        placement=Placement(
            stages=(
                Stage(axes={"tp": 2}, devices=(0, 1), operators=tuple(operators[:half])),
                Stage(axes={"tp": 2}, devices=(2, 3), operators=(*operators[half:], "loss")),
            )
        ),
        order=Order(
            lanes=(
                Lane(devices=(0, 1), tasks="0F0 0F1 0B0 0B1"),
                Lane(devices=(2, 3), tasks="1F0 1B0 1F1 1B1"),
            )
        ),
        prediction=Prediction(
            seconds=0.5, peak_bytes=(3 * 2**30, 2**30), breakdown={"compute": 0.4, "communication": 0.1}
        ),
        search=SearchRecord(
            seed=7,
            seconds=1.25,
            bound_seconds=0.4,
            gap=0.2,
            status="optimal",
            runners_up=(
                RunnerUp(name="dp 4", seconds=0.6, peak_bytes=2**30),
                RunnerUp(name="pp 4", seconds=0.45, peak_bytes=2**40, fits=False),
            ),
        ),
    )


@dataclass(frozen=True)
class FakeCapture:
    """What the stand-in's capture returns."""

    graph: str
    model: Any
    constants: Mapping[str, Any] = field(default_factory=dict)


def fake_api(agree: bool = True) -> types.ModuleType:
    """A module with the API's functions; ``calls`` records what they were given."""
    api = types.ModuleType("autoplan.api")
    calls: list[tuple[str, dict[str, Any]]] = []

    def search(
        model: Any,
        args: Any = (),
        kwargs: Any = None,
        *,
        cluster: str,
        global_batch: int | None = None,
        optimizer: str = "adamw",
        precision: str = "float32",
        mode: str = "train",
        memory_limit: int | None = None,
        time_limit: float | None = None,
        seed: int = 0,
        progress: Any = None,
        constraints: Any = None,
    ) -> Plan:
        calls.append(("search", dict(locals())))
        if memory_limit is not None and memory_limit < 2**20:
            raise InfeasibleError("needs 5 GiB per device, the limit is 1 KiB", missing_bytes=5 * 2**30 - 2**10)
        if progress is not None:
            progress("stages", 0.5)
        return small_plan(str(cluster), global_batch)

    def capture(model: Any, args: Any, kwargs: Any, *, mode: str = "train", loss_fn: Any = None) -> FakeCapture:
        calls.append(("capture", dict(locals())))
        return FakeCapture(f"graph of {type(model).__name__}", model)

    def verify(model: Any, args: Any, kwargs: Any, **options: Any) -> Any:
        calls.append(("verify", {"model": model, "args": args, "kwargs": kwargs, **options}))
        reference = Outcome([1.0], {"w": torch.ones(2)}, {"w": torch.ones(2)}, {})
        other = Outcome([1.0], {"w": torch.ones(2)}, {"w": torch.ones(2) * (1.0 if agree else 1.5)}, {})
        return compare(reference, other, options["tolerance"] or 1e-9)

    def parallelize(model: Any, args: Any, kwargs: Any, **options: Any) -> Any:
        calls.append(("parallelize", options))
        return _Alone(model)

    for function in (search, capture, verify, parallelize):
        setattr(api, function.__name__, function)
    api.calls = calls  # type: ignore[attr-defined]
    return api


class _Alone:
    """A parallel module of one rank."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def parameters(self) -> Any:
        return self.model.parameters()

    def train_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = self.model(*args, **kwargs)
        loss.backward()
        return loss

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)
