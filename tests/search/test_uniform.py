"""Uniform plans: legal for every combination, and the known plans where they are known."""

from __future__ import annotations

import pytest

from autoplan.search.folding import fold
from autoplan.search.uniform import balanced, data_identifiers, named_plan, tensor_labels
from searchspace.errors import IllegalPlanError
from searchspace.layout import P, R, Split
from searchspace.plan import ClusterInfo, Plan, Recipe
from searchspace.resolve import resolve
from tests.search.models import feed_forward, gpt

EIGHT = ClusterInfo(name="cpu:1x8", devices=8)

COMBINATIONS = {
    "dp": {"dp": 4},
    "tp": {"tp": 4},
    "tp+sp": {"tp": 2, "sequence": True},
    "pp-1f1b": {"pp": 4, "micro_batches": 4},
    "pp-gpipe": {"pp": 2, "micro_batches": 4, "schedule": "gpipe"},
    "dp x tp": {"dp": 2, "tp": 2},
    "dp x pp": {"dp": 2, "pp": 2, "micro_batches": 2},
    "tp x pp": {"tp": 2, "pp": 2, "micro_batches": 2},
    "dp x tp x pp": {"dp": 2, "tp": 2, "pp": 2, "micro_batches": 4, "sequence": True},
    "zero1": {"dp": 4, "zero": 1},
    "zero2": {"dp": 4, "zero": 2, "micro_batches": 2},
    "zero3": {"dp": 4, "zero": 3},
    "zero3 x tp": {"dp": 2, "tp": 2, "zero": 3},
    "recompute": {"dp": 2, "recompute": True, "micro_batches": 2},
    "uneven stages": {"pp": 2, "stage_sizes": (3, 1), "micro_batches": 2},
    "one device": {},
}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", COMBINATIONS)
def test_every_combination_is_legal_and_survives_json(name, tied):
    graph = gpt(layers=4, tied=tied, batch=9)
    plan = named_plan(graph, EIGHT, Recipe(), **COMBINATIONS[name])
    resolve(graph, plan)
    assert Plan.from_json(plan.to_json()) == plan


def chosen(graph, labels, module, target):
    return {labels[op.name] for op in graph.operators if op.module.endswith(module) and target in op.target}


def test_tensor_parallelism_is_megatron():
    graph = gpt(layers=3, heads=4, vocab=96)
    labels = tensor_labels(graph, fold(graph), 4)
    for column in ("attn.q", "attn.k", "attn.v", "mlp.up", "head"):
        assert chosen(graph, labels, column, "linear") == {"n"}
    for row in ("attn.out", "mlp.down"):
        assert chosen(graph, labels, row, "linear") == {"k"}
    assert chosen(graph, labels, "attn", "attention") == {"h"}
    assert chosen(graph, labels, "ln_1", "layer_norm") == {""}
    plan = named_plan(graph, EIGHT, Recipe(), tp=4)
    crossing = [
        a for a in resolve(graph, plan).adapters.values()
        if a.source.tensor.startswith("linear") and a.source.layout != a.target.layout and a.target.stage == 0
    ]  # fmt: skip
    assert {(a.source.layout, a.target.layout) for a in crossing if "85" not in a.source.tensor} == {((P,), (R,))}


def test_sequence_parallelism_splits_norms_along_the_sequence():
    graph = gpt(layers=3)
    labels = tensor_labels(graph, fold(graph), 2, sequence=True)
    for norm in ("ln_1", "ln_2"):
        assert chosen(graph, labels, norm, "layer_norm") == {"b"}  # dims are a (batch), b (sequence)
    for row in ("attn.out", "mlp.down"):
        assert chosen(graph, labels, row, "linear") == {"k"}


def test_data_dimensions_are_those_of_the_inputs():
    graph = gpt(layers=1)
    found = data_identifiers(graph)
    up = next(op for op in graph.operators if op.module == "h.0.mlp.up")
    assert found[up.name] == {"a", "b"}


def test_zero_levels_split_what_they_say():
    graph = gpt(layers=2)
    for level in (1, 2, 3):
        resolution = resolve(graph, named_plan(graph, EIGHT, Recipe(), dp=4, zero=level))
        home = resolution.parameters["h.0.mlp.up.weight"]
        site = home.sites[0]
        assert home.optimizer == (Split(0),)
        assert site.stored.layout == ((Split(0),) if level == 3 else (R,))
        assert site.gradient == ((Split(0),) if level >= 2 else (P,))


def test_zero_with_tensor_parallelism_splits_the_other_dimension():
    graph = gpt(layers=2)
    resolution = resolve(graph, named_plan(graph, EIGHT, Recipe(), dp=2, tp=2, zero=3))
    assert resolution.parameters["h.0.mlp.up.weight"].sites[0].stored.layout == (Split(1), Split(0))


def test_stages_hold_what_was_asked():
    graph = gpt(layers=5)
    plan = named_plan(graph, EIGHT, Recipe(), pp=2, stage_sizes=(1, 4), micro_batches=2)
    first = {graph.operator[name].module.split(".mlp")[0] for name in plan.placement.stages[0].operators}
    assert "h.0" in first and not any(m.startswith("h.1") for m in first)
    assert [s.devices for s in plan.placement.stages] == [(0,), (1,)]
    assert plan.order.lanes[0].tasks == "0F0 0F1 0B0 0B1"


def test_fewer_layers_than_stages_are_cut_inside():
    graph = feed_forward()
    plan = named_plan(graph, EIGHT, Recipe(), pp=4, micro_batches=4)
    assert [len(s.operators) for s in plan.placement.stages] == [1, 1, 1, 1]
    resolve(graph, plan)


def test_balanced_equals_brute_force():
    import itertools

    weights = [5, 1, 1, 7, 2, 2, 3]
    for parts in range(1, 6):
        best = min(
            max(sum(weights[a:b]) for a, b in itertools.pairwise((0, *cuts, 7)))
            for cuts in itertools.combinations(range(1, 7), parts - 1)
        )
        ends = balanced(weights, parts)
        assert max(sum(weights[a:b]) for a, b in itertools.pairwise((0, *ends))) == best


@pytest.mark.parametrize(
    "options, message",
    [
        ({"dp": 4, "micro_batches": 4}, "a batch of 8 cannot be cut into 4 micro-batches for 4 data-parallel devices"),
        ({"dp": 4, "tp": 4}, "dp 4 x tp 4 x pp 1 = 16 devices; the cluster has 8"),
        ({"pp": 2, "stage_sizes": (2, 3), "micro_batches": 2}, r"add up to 4 layers or 10 blocks, got \[2, 3\]"),
        ({"zero": 4}, "ZeRO level of 0, 1, 2 or 3, got 4"),
        ({"schedule": "2f2b"}, "'1f1b' or 'gpipe', got '2f2b'"),
        ({"dp": 0}, "expected dp >= 1, got 0"),
    ],
)
def test_messages(options, message):
    with pytest.raises(IllegalPlanError, match=message):
        named_plan(gpt(), EIGHT, Recipe(), **options)
