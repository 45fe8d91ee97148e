"""Programs made from hand-made plans: consistent for all ranks, and of the expected size."""

from __future__ import annotations

from collections import Counter

import pytest

from searchspace.conversion import ElementCount
from searchspace.errors import IllegalPlanError
from searchspace.materialize import evaluation_program, forward_program, refresh_program, train_program
from searchspace.plan import Lane, Order, ParameterPlan, Recipe, SiteLayouts
from searchspace.program import Backward, Exchange, Forward, Free, Program
from searchspace.program_check import check_program
from searchspace.resolve import resolve
from tests.search.models import Builder, gpt, rule
from tests.searchspace.plans import megatron

PRICES = ElementCount()
ZERO3 = {"h.0.mlp.up.weight": ParameterPlan(sites={0: SiteLayouts(stored={"dp": "S(0)"}, gradient={"dp": "S(0)"})})}
ZERO1 = {"h.0.mlp.up.weight": ParameterPlan(optimizer={"dp": "S(0)"})}
PLANS = {
    "one": {},
    "tp": {"tp": 2},
    "tp uneven": {"tp": 3},
    "dp": {"dp": 2},
    "dp uneven": {"dp": 3, "micro_batches": 2},
    "dp tp": {"dp": 2, "tp": 2},
    "pp": {"pp": 2, "micro_batches": 3},
    "pp gpipe": {"pp": 4, "micro_batches": 3, "schedule": "gpipe"},
    "pp tp dp": {"pp": 2, "tp": 2, "dp": 2, "micro_batches": 2},
    "recompute": {"tp": 2, "micro_batches": 2, "recompute": ("h.0", "h.1")},
    "zero 1": {"dp": 2, "parameters": ZERO1},
    "zero 3": {"dp": 2, "micro_batches": 2, "parameters": ZERO3},
    "zero 3 recompute": {"dp": 2, "micro_batches": 2, "parameters": ZERO3, "recompute": ("h.0",)},
    "bf16": {"dp": 2, "recipe": Recipe(precision="bf16")},
}


def count(program: Program, rank: int = 0) -> Counter[str]:
    return Counter(i.kind if isinstance(i, Exchange) else type(i).__name__ for i in program.of_rank(rank))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", PLANS)
def test_programs_fit_together(name: str, tied: bool) -> None:
    graph = gpt(layers=2, tied=tied, dtype="bfloat16" if name == "bf16" else "float32")
    plan = megatron(graph, **PLANS[name])
    for make in (train_program, forward_program, evaluation_program, refresh_program):
        check_program(make(graph, plan, PRICES))


def test_one_rank_is_one_segment_without_communication() -> None:
    graph = gpt(layers=2)
    found = count(train_program(graph, megatron(graph), PRICES))
    assert found["Forward"] == found["Backward"] == 1
    assert not set(found) & {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_receive"}


def test_tensor_parallelism_costs_two_all_reduces_a_layer_and_direction() -> None:
    layers = 3
    graph = gpt(layers=layers)
    found = count(train_program(graph, megatron(graph, tp=2), PRICES))
    assert found["all_reduce"] == layers * 2 * 2


def test_data_parallelism_reduces_each_parameter_once() -> None:
    graph = gpt(layers=2)
    program = train_program(graph, megatron(graph, dp=2, micro_batches=2), PRICES)
    reduces = [i for i in program.of_rank(0) if isinstance(i, Exchange) and i.kind == "all_reduce"]
    scalars = [i for i in reduces if i.shape == ()]
    assert len(reduces) - len(scalars) == len(graph.parameters)


def test_zero_1_gathers_after_the_step_only() -> None:
    graph = gpt(layers=1)
    plan = megatron(graph, dp=2, parameters=ZERO1)
    assert count(refresh_program(graph, plan, PRICES))["all_gather"] == 1
    assert count(train_program(graph, plan, PRICES))["reduce_scatter"] == 1


def test_zero_3_gathers_for_forward_and_again_for_backward() -> None:
    graph = gpt(layers=1)
    plan = megatron(graph, dp=2, micro_batches=2, parameters=ZERO3)
    program = train_program(graph, plan, PRICES)
    gathers = [i for i in program.of_rank(0) if isinstance(i, Exchange) and i.kind == "all_gather"]
    assert len([i for i in gathers if i.target and i.target[0].startswith("h.0.mlp.up.weight")]) == 2 * 2
    assert not count(refresh_program(graph, plan, PRICES))
    released = [i for i in program.of_rank(0) if isinstance(i, Forward) and i.released]
    fetched = [i for i in program.of_rank(0) if isinstance(i, Backward) and i.fetched]
    assert len(released) == len(fetched) == 2


def test_recomputation_runs_a_region_again_and_keeps_its_inputs_alone() -> None:
    graph = gpt(layers=2)
    plain = count(train_program(graph, megatron(graph), PRICES))
    again = train_program(graph, megatron(graph, recompute=("h.0", "h.1")), PRICES)
    assert count(again)["Backward"] > plain["Backward"]
    names = [i.segment.name for i in again.of_rank(0) if isinstance(i, Forward)]
    assert sorted(Counter(names).values())[-2:] == [2, 2]
    assert sum(isinstance(i, Forward) and i.keep for i in again.of_rank(0)) == count(again)["Backward"]


def test_a_tied_weight_on_two_stages_has_one_optimizer_shard() -> None:
    graph = gpt(layers=2, tied=True)
    program = train_program(graph, megatron(graph, pp=2), PRICES)
    (tied,) = [b for b in program.parameters if b.source == "wte.weight"]
    assert len(tied.stored) == 2 and len(tied.shared) == 1
    assert program.slots[tied.optimizer].mesh.devices == (0,)


def test_every_buffer_is_freed() -> None:
    graph = gpt(layers=2)
    program = train_program(graph, megatron(graph, pp=2, micro_batches=4), PRICES)
    freed = [key for i in program.of_rank(0) if isinstance(i, Free) for key in i.keys]
    kept = {i.outputs for i in program.of_rank(0) if isinstance(i, Forward)}
    assert {key for outputs in kept for key in outputs} <= set(freed)


def test_orders_that_contradict_themselves_are_refused_with_the_tasks() -> None:
    graph = gpt(layers=2)
    plan = megatron(graph, pp=2, micro_batches=2)
    lanes = (Lane(devices=(0,), tasks="0F0 0B0 0F1 0B1"), Lane(devices=(1,), tasks="1F0 1F1 1B0 1B1"))
    with pytest.raises(IllegalPlanError, match=r"devices \[0\] wait at 0B0, devices \[1\] wait at 1F1"):
        train_program(graph, plan.replace(order=Order(lanes=lanes)), PRICES)
    lanes = (Lane(devices=(0,), tasks="0F0 0F1 0B0"), Lane(devices=(1,), tasks="1F0 1B0 1F1 1B1"))
    with pytest.raises(IllegalPlanError, match=r"lane 0 \(devices \[0\]\) lacks tasks 0B1 of 2 micro-batches"):
        train_program(graph, plan.replace(order=Order(lanes=lanes)), PRICES)


def test_a_split_that_the_rule_lacks_is_refused_with_operator_and_rule() -> None:
    graph = gpt(layers=1)
    plan = megatron(graph, tp=2)
    name = next(op.name for op in graph.operators if op.target == "aten.layer_norm.default")
    operators = {**plan.transformation.operators, name: {"tp": "h"}}
    broken = plan.replace(transformation=plan.transformation.model_copy(update={"operators": operators}))
    with pytest.raises(IllegalPlanError, match=rf"'{name}' .*cannot be split along 'h' over axis 'tp': its rule"):
        resolve(graph, broken)
    with pytest.raises(IllegalPlanError, match=r"4 units of 'h' for 5 parts \(a part would be empty\)"):
        resolve(graph, megatron(graph, tp=5))


def test_too_many_micro_batches_are_refused_with_the_numbers() -> None:
    graph = gpt(layers=1, batch=4)
    with pytest.raises(IllegalPlanError, match="a batch of 4 is smaller than 5 micro-batches"):
        resolve(graph, megatron(graph, micro_batches=5))


def test_separate_regions_are_segments_of_their_own() -> None:
    graph = gpt(layers=2)
    plan = megatron(graph, dp=2, parameters=ZERO3)
    apart = plan.replace(transformation=plan.transformation.model_copy(update={"separate": ("h.0", "h.1")}))
    (segments,) = resolve(graph, apart).segments
    for segment in segments:
        assert len({graph.operator[name].module.startswith("h.0") for name in segment.operators}) == 1
        assert segment.region is None
    check_program(train_program(graph, apart, PRICES))


def test_readers_with_and_without_gradient_share_a_conversion() -> None:
    """``mul(y, gt(y))`` after a row-parallel product: one reduce-scatter serves both, one gather the gradient."""
    b = Builder()
    y = b.linear(b.input("x", (4, 6)), "down", 8, bias=False)
    mask = b.op("aten.gt.Scalar", [y], (4, 8), rule("a b -> a b"), grad=False)
    z = b.pointwise("aten.mul.Tensor", y, mask)
    loss = b.op("aten.sum.default", [z], (), rule("a b -> ", sums="a b", linear=((0,),)), family="reduction")
    graph = b.graph("gate", loss, 4)
    plan = megatron(graph, tp=2)
    labels = {op.name: {"tp": "k" if "linear" in op.name else "b"} for op in graph.operators}
    split = plan.replace(transformation=plan.transformation.model_copy(update={"operators": labels}))
    program = train_program(graph, split, PRICES)
    check_program(program)
    found = count(program)
    assert found["reduce_scatter"] == 1 and found["all_gather"] == 1
