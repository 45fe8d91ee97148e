"""The search from graph to plan, on small hand-made models."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from autoplan.search import SearchOptions, search_plan
from autoplan.search.candidates import Candidate
from autoplan.search.context import Context
from autoplan.search.search import Limits, _Search
from costmodel.cluster import Cluster
from costmodel.collectives import CommunicationPrices
from costmodel.evaluate import evaluate
from searchspace.conversion import cheapest_path
from searchspace.errors import InfeasibleError, SearchError
from searchspace.graph import Graph
from searchspace.plan import Plan, Recipe
from searchspace.resolve import EVERYWHERE, resolve
from tests.search.models import Builder, experts, feed_forward, gpt, rule

ONE_AXIS = SearchOptions(stages=(1,), inner=(1,), micro_batches=(1,), runners_up=False)


def cluster(devices: int, nodes: int = 1, device: str = "h100") -> Cluster:
    """Without communication buffers, which would hide the memory of small models."""
    entry = {"device": device, "devices": devices, "count": nodes, "figures": {"memory.communication": "1 B"}}
    return Cluster.parse({"name": f"{device}:{nodes}x{devices}", "nodes": [entry]})


def labels(plan: Plan, operator: str) -> set[str]:
    return set(plan.transformation.operators.get(operator, {}).values())


# -- the plan is what it says ------------------------------------------------------------------------


@pytest.mark.parametrize("devices", [1, 2, 3, 4])
@pytest.mark.parametrize("limit", [None, 0.7])
def test_reported_costs_are_those_of_the_referee(devices, limit):
    graph = gpt(layers=2)
    plan = search_plan(graph, cluster(devices), Recipe())
    if limit is not None:
        try:
            plan = search_plan(graph, cluster(devices), Recipe(), memory_limit=limit * max(plan.prediction.peak_bytes))
        except InfeasibleError:
            return
    again = evaluate(resolve(graph, plan), cluster(devices))
    assert plan.prediction.seconds == again.seconds
    assert plan.prediction.peak_bytes == again.peak_bytes
    assert 0 < plan.search.bound_seconds <= plan.prediction.seconds
    assert plan.search.gap == pytest.approx(1 - plan.search.bound_seconds / plan.prediction.seconds)
    assert plan.devices == tuple(range(devices))
    assert Plan.from_json(plan.to_json()) == plan


def test_it_is_no_worse_than_its_runners_up():
    plan = search_plan(gpt(layers=4, hidden=256, seq=64, batch=16), cluster(4, 2), Recipe())
    fitting = [r.seconds for r in plan.search.runners_up if r.fits]
    assert len(fitting) >= 3 and plan.prediction.seconds <= min(fitting)
    assert {"DP", "FSDP"} <= {r.name for r in plan.search.runners_up}


def test_the_same_search_gives_the_same_plan():
    first, second = (search_plan(gpt(layers=2), cluster(4), Recipe(), work_limit=1) for _ in range(2))
    assert first.replace(search=None) == second.replace(search=None)
    assert first.search.status == "work limit"


def test_time_hardly_depends_on_the_number_of_layers():
    options = SearchOptions(runners_up=False, referees=1)
    few, many = (Context(gpt(layers=n, hidden=256, seq=64), cluster(4), Recipe(), None, None, options) for n in (4, 64))
    small, large = (c.exploration(Candidate(2, 2, 1, 4)).selection.wiring for c in (few, many))
    assert len(small.nodes) == len(large.nodes) and len(small.links) == len(large.links)


def test_estimates_are_near_the_referee():
    graph = gpt(layers=8, hidden=1024, heads=16, seq=512, vocab=8192, batch=64)
    context = Context(graph, cluster(8), Recipe(), None, None, SearchOptions(runners_up=False))
    search = _Search(context, _limits(), None)
    best = search.run()
    estimate = min(f.seconds for f in search.found)
    assert best.evaluation.seconds == pytest.approx(estimate, rel=0.1)


def _limits():
    return Limits(time.monotonic(), None, None)


# -- planner decisions -------------------------------------------------------------------------------


def boundaries(batch: int, blocks: int) -> Graph:
    """Feed-forward blocks between two copies whose batch split can be pinned."""
    b = Builder()
    y = b.pointwise("aten.clone.default", b.input("x", (batch, 1024)))
    for i in range(blocks):
        y = b.linear(y, f"{i}.up", 4096, bias=False)
        y = b.pointwise("aten.relu.default", y, module=f"{i}.act", saved=(1,))
        y = b.linear(y, f"{i}.down", 1024, bias=False)
    y = b.pointwise("aten.clone.default", y)
    loss = b.op("aten.sum.default", [y], (), rule("a b -> ", sums="a b", linear=((0,),)), family="reduction")
    return b.graph("feed_forward", loss, batch)


def planned(batch: int, blocks: int = 1, limit: float | None = None) -> tuple[Graph, Plan]:
    graph = boundaries(batch, blocks)
    clones = [op.name for op in graph.operators if "clone" in op.target]
    options = replace(ONE_AXIS, pins={name: {"dp": "a"} for name in clones}, recompute=False)
    return graph, search_plan(graph, cluster(8), Recipe(), memory_limit=limit, options=options)


def linears(graph: Graph, plan: Plan) -> list[set[str]]:
    return [labels(plan, op.name) for op in graph.operators if "linear" in op.target]


def test_ddp_without_a_memory_limit():
    graph, plan = planned(16384)
    assert linears(graph, plan) == [{"a"}, {"a"}]
    site = resolve(graph, plan).parameters["0.up.weight"].sites[0]
    assert all(str(p) == "R" for p in site.stored.layout)


def test_fsdp_under_a_tight_memory_limit():
    _, free = planned(16384, blocks=8)
    graph, plan = planned(16384, blocks=8, limit=0.75 * max(free.prediction.peak_bytes))
    assert linears(graph, plan) == [{"a"}] * 16
    stored = [str(home.sites[0].stored.layout[0]) for home in resolve(graph, plan).parameters.values()]
    assert sum(p.startswith("S") for p in stored) >= 12, stored
    assert plan.transformation.separate
    assert plan.prediction.seconds > free.prediction.seconds


def test_megatron_at_a_small_batch():
    graph, plan = planned(64)
    assert linears(graph, plan) == [{"n"}, {"k"}]


def test_experts_need_no_communication():
    plan = search_plan(experts(), cluster(8), Recipe(), options=ONE_AXIS)
    assert labels(plan, "bmm_0") == {"e"}
    assert plan.prediction.breakdown["gather"] == plan.prediction.breakdown["synchronise"] == 0.0
    resolution = resolve(experts(), plan)
    prices = CommunicationPrices(cluster(8))
    for adapter in resolution.adapters.values():
        if adapter.target.stage != EVERYWHERE:  # the loss goes to every rank
            ends = [(resolution.mesh(v.stage), v.layout) for v in (adapter.source, adapter.target)]
            shape = resolution.graph.tensor[adapter.source.tensor].shape
            assert {move.kind for move in cheapest_path(shape, 4, *ends, prices).moves} == {"local"}


# -- invariants --------------------------------------------------------------------------------------


def test_less_memory_is_never_faster():
    graph = gpt(layers=2, hidden=128, seq=32, batch=8)
    seconds, peak = [], None
    for share in (1.0, 0.9, 0.75, 0.6, 0.5):
        limit = None if peak is None else share * peak
        try:
            plan = search_plan(
                graph, cluster(2), Recipe(), memory_limit=limit, options=replace(ONE_AXIS, runners_up=True)
            )
        except InfeasibleError:
            break
        peak = peak or max(plan.prediction.peak_bytes)
        assert limit is None or max(plan.prediction.peak_bytes) <= limit
        seconds.append(plan.prediction.seconds)
    assert len(seconds) >= 3 and seconds == sorted(seconds)
    assert seconds[-1] > seconds[0]


def test_pins_hold_and_never_help():
    graph = feed_forward(batch=256)
    free = search_plan(graph, cluster(4), Recipe(), options=ONE_AXIS)
    for label in ("", "a", "n", "k"):
        pinned = search_plan(graph, cluster(4), Recipe(), options=replace(ONE_AXIS, pins={"linear_0": {"dp": label}}))
        assert labels(pinned, "linear_0") == ({label} if label else set())
        assert pinned.prediction.seconds >= free.prediction.seconds - 1e-12


def test_layers_of_their_own_are_never_slower_than_folded_ones():
    graph = gpt(layers=3, hidden=128, seq=32)
    seconds = [
        search_plan(graph, cluster(2), Recipe(), options=replace(ONE_AXIS, fold=fold)).prediction.seconds
        for fold in (True, False)
    ]
    assert seconds[1] <= seconds[0] * (1 + 1e-9)


def test_one_device_communicates_nothing():
    plan = search_plan(gpt(layers=2), cluster(1), Recipe())
    assert plan.transformation.operators == {}
    assert plan.prediction.breakdown["communication"] == plan.prediction.breakdown["synchronise"] == 0.0


# -- odd models and sizes ----------------------------------------------------------------------------


def test_odd_batch_and_three_devices():
    graph = gpt(layers=2, batch=7, vocab=101)
    resolve(graph, search_plan(graph, cluster(3), Recipe()))


def test_another_global_batch_than_captured():
    plan = search_plan(gpt(layers=2, batch=4), cluster(2), Recipe(), global_batch=32)
    assert plan.recipe.global_batch == 32


def test_a_model_without_parameters():
    b = Builder()
    y = b.pointwise("aten.relu.default", b.input("x", (8, 16)))
    loss = b.op("aten.sum.default", [y], (), rule("a b -> ", sums="a b", linear=((0,),)), family="reduction")
    graph = b.graph("nothing", loss, 8)
    resolve(graph, search_plan(graph, cluster(2), Recipe()))


def test_an_empty_graph():
    b = Builder()
    x = b.input("x", (8, 16))
    graph = Graph("empty", tuple(b.tensors.values()), (), (x,), (x,), None, (), 8)
    plan = search_plan(graph, cluster(2), Recipe(mode="inference"))
    assert plan.placement.stages[0].operators == ()
    assert plan.devices == (0, 1)


def test_inference_plans_have_no_backward():
    graph = gpt(layers=4, hidden=256, seq=64)
    plan = search_plan(graph, cluster(4), Recipe(mode="inference"))
    assert "B" not in plan.order.lanes[0].tasks
    assert plan.transformation.recompute == ()
    resolve(graph, plan)


def coupled() -> Graph:
    """Normalised by the mean over the batch: micro-batches are impossible."""
    b = Builder()
    y = b.linear(b.input("x", (8, 16)), "up", 16)
    mean = b.op("autoplan.mean.default", [y], (16,), rule("a b -> b", sums="a"), family="reduction")
    y = b.op("aten.sub.Tensor", [y, mean], (8, 16), rule("a b, b -> a b"))
    loss = b.op("aten.sum.default", [y], (), rule("a b -> ", sums="a b", linear=((0,),)), family="reduction")
    return b.graph("coupled", loss, 8)


def test_models_that_couple_samples_get_one_micro_batch():
    plan = search_plan(coupled(), cluster(4), Recipe())
    assert plan.transformation.micro_batches == 1
    with pytest.raises(SearchError, match="couples the samples of a batch"):
        search_plan(coupled(), cluster(4), Recipe(), options=SearchOptions(micro_batches=(2,)))


# -- limits and errors -------------------------------------------------------------------------------


def test_nothing_fits_says_by_how_much_and_what_would_help():
    text = r"are missing\. It would fit in devices with .* devices of this kind"
    with pytest.raises(InfeasibleError, match=text) as e:
        search_plan(gpt(layers=2), cluster(2), Recipe(), memory_limit=20e3)
    need = 20e3 + e.value.missing_bytes
    plan = search_plan(gpt(layers=2), cluster(2), Recipe(), memory_limit=1.001 * need)
    assert max(plan.prediction.peak_bytes) <= 1.001 * need


def test_interruption_keeps_the_best_plan():
    calls = []

    def interrupt(text: str, share: float | None) -> None:
        calls.append(text)
        if len(calls) == 3:
            raise KeyboardInterrupt

    plan = search_plan(gpt(layers=2), cluster(4), Recipe(), progress=interrupt)
    assert plan.search.status == "interrupted"
    resolve(gpt(layers=2), plan)


def test_a_time_limit_still_gives_a_plan():
    plan = search_plan(gpt(layers=2), cluster(4), Recipe(), time_limit=1e-9)
    assert plan.search.status == "time limit"


@pytest.mark.parametrize(
    "options, message",
    [
        (SearchOptions(micro_batches=(9,)), "no candidate for gpt with a batch of 8 on 2 devices"),
        (SearchOptions(pins={"nobody": {"dp": "a"}}), "pinned operator 'nobody' is not in the model"),
        (SearchOptions(pins={"layer_norm_4": {"dp": "zz"}}), "cannot be pinned to 'zz' on axis 'dp': its rule"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(SearchError, match=message):
        search_plan(gpt(layers=2), cluster(2), Recipe(), options=options)


def test_bad_limits():
    with pytest.raises(SearchError, match="memory limit > 0 bytes, got -1"):
        search_plan(gpt(layers=2), cluster(2), Recipe(), memory_limit=-1)
    with pytest.raises(SearchError, match="global batch >= 1, got 0"):
        search_plan(gpt(layers=2), cluster(2), Recipe(), global_batch=0)
