import pytest

from costmodel.cluster import Cluster
from costmodel.collectives import CommunicationPrices
from costmodel.evaluate import _Evaluation, evaluate
from costmodel.memory import FRAGMENTATION
from costmodel.model import CostModel
from searchspace.errors import ClusterError, IllegalPlanError
from searchspace.layout import P, R, Split
from searchspace.materialize import refresh_program, train_program
from searchspace.plan import Recipe
from searchspace.program import Exchange
from searchspace.resolve import resolve
from tests.costmodel.plans import uniform
from tests.search.models import feed_forward, gpt

NODE = Cluster.parse("a100-80gb:1x8")
LAYERS = 4
PLANS = {
    "one device": {},
    "dp": {"dp": 2},
    "tp": {"tp": 2},
    "dp x tp": {"dp": 2, "tp": 2, "micro_batches": 2},
    "pp": {"pp": 2, "micro_batches": 4},
    "pp gpipe": {"pp": 4, "micro_batches": 4, "schedule": "gpipe"},
    "zero 1": {"dp": 4, "zero": 1},
    "zero 3": {"dp": 4, "zero": 3, "micro_batches": 2},
    "recompute": {"tp": 2, "recompute": True, "micro_batches": 2},
    "zero 3 recompute": {"dp": 4, "zero": 3, "recompute": True},
    "all": {"dp": 2, "tp": 2, "pp": 2, "micro_batches": 4, "recompute": True, "zero": 1},
}


@pytest.fixture(scope="module")
def graph():
    return gpt(LAYERS, hidden=64, heads=4, seq=16, vocab=96, batch=8)


def evaluated(graph, cluster=NODE, layers=LAYERS, **options):
    return evaluate(resolve(graph, uniform(graph, layers, **options)), cluster)


class EveryExchangeIsOne:
    """Every collective and transfer costs one second, copies nothing."""

    def collective(self, kind, mesh, axes, bytes):
        return 1.0

    def transfer(self, copies):
        return 1.0

    def local(self, bytes):
        return 1e-9


@pytest.mark.parametrize("name", PLANS)
def test_it_prices_the_very_communication_that_is_executed(graph, name):
    """With a price of one per exchange the seconds count the exchanges of the materialized programs."""
    plan = uniform(graph, LAYERS, **PLANS[name])
    resolution = resolve(graph, plan)
    prices = EveryExchangeIsOne()
    figures = {
        "compute.launch": 1e-15,
        "compute.matmul_efficiency": 1.0,
        "memory.bandwidth": 1e30,
        "memory.efficiency": 1.0,
    }
    figures |= {"peak.float32": 1e30}
    cluster = Cluster.parse({"nodes": [{"device": "a100-80gb", "devices": 8, "figures": figures}]})
    model = CostModel(graph, cluster, plan.recipe, resolution.time, prices)
    found = _Evaluation(resolution, model)
    seconds = found.run()
    spent = sum(sum(vars(stage).values()) - stage.bubble for stage in seconds.stages)
    total = spent + found._parameter_seconds()[1] + found._results_seconds()
    programs = train_program(graph, plan, prices), refresh_program(graph, plan, prices)
    executed = sum(
        any(isinstance(i, Exchange) and i.kind != "local" for i in step.ranks.values())
        for program in programs
        for step in program.steps
    )
    assert total == pytest.approx(executed, abs=0.01)
    assert name == "one device" or executed


@pytest.mark.parametrize("name", PLANS)
def test_the_breakdown_adds_up_to_the_step(graph, name):
    found = evaluated(graph, **PLANS[name])
    for stage in found.stages:
        assert sum(vars(stage).values()) == pytest.approx(found.seconds)
        assert min(vars(stage).values()) >= 0
    assert sum(found.breakdown.values()) == pytest.approx(found.seconds)
    prediction = found.prediction()
    assert prediction.seconds == found.seconds
    assert prediction.peak_bytes == found.peak_bytes
    assert prediction.breakdown == dict(found.breakdown)


def test_one_device_is_the_sum_of_its_operators(graph):
    plan = uniform(graph, LAYERS)
    resolution = resolve(graph, plan)
    model = CostModel(graph, NODE, plan.recipe, resolution.time)
    mesh = resolution.mesh(0)
    costs = [model.operator(op, resolution.choices[0, op.name], mesh) for op in graph.operators]
    found = evaluate(resolution, NODE)
    assert found.stages[0].forward == pytest.approx(sum(c.forward for c in costs))
    assert found.stages[0].backward == pytest.approx(sum(c.backward for c in costs))
    elements = sum(t.elements for t in graph.parameters)
    assert found.stages[0].optimizer == pytest.approx(model.step(elements, mesh))
    assert found.seconds == pytest.approx(
        found.stages[0].forward + found.stages[0].backward + found.stages[0].optimizer
    )


def test_saved_bytes_of_operators_add_up_to_what_is_kept(graph):
    """On one device without adapters; the evaluation keeps the loss besides (the segment's output)."""
    plan = uniform(graph, LAYERS)
    resolution = resolve(graph, plan)
    model = CostModel(graph, NODE, plan.recipe, resolution.time)
    mesh = resolution.mesh(0)
    added = sum(model.operator(op, resolution.choices[0, op.name], mesh).saved for op in graph.operators)
    kept = _Evaluation(resolution, model)._activations(0).saved
    constants = sum(
        graph.tensor[n].bytes
        for n in sorted(model.kept)
        if graph.tensor[n].kind == "activation" and graph.producer[n].name in resolution.time.once
    )
    assert kept == pytest.approx(added - constants, abs=8)


def test_memory_of_parameters_by_hand(graph):
    elements = sum(t.elements for t in graph.parameters)
    assert evaluated(graph).parameters[0].total == 16 * elements
    half = gpt(LAYERS, hidden=64, heads=4, seq=16, vocab=96, batch=8, dtype="bfloat16")
    assert evaluated(half, recipe=Recipe(precision="bf16")).parameters[0].total == 18 * elements
    split = evaluated(graph, dp=4, zero=3).parameters[0]
    assert 16 * elements / 4 <= split.total < 16 * elements / 4 * 1.2  # what has no 4 equal rows stays whole
    states = evaluated(graph, dp=4, zero=1).parameters[0]
    assert states.stored == 4 * elements
    assert states.state < 8 * elements / 4 * 1.2


def test_memory_of_activations_by_hand():
    """Feed-forward, one device: x [64, 1024] is an input of the segment and saved by ``up``; relu saves its output,
    which ``down`` saves too; ``up``'s output dies.  At the peak of backward (``down``): x, relu's output, the
    gradients of y and of relu's output, and the weight's gradient."""
    graph = feed_forward(batch=64, hidden=1024, inner=4096)
    plan = uniform(graph, 1)
    resolution = resolve(graph, plan)
    model = CostModel(graph, NODE, plan.recipe, resolution.time)
    memory = _Evaluation(resolution, model)._activations(0)
    x, wide, weight = 4 * 64 * 1024, 4 * 64 * 4096, 4 * 1024 * 4096
    assert memory.saved == wide + 4  # and the loss; x is on every rank anyway
    assert memory.backward == pytest.approx(wide + 4 + x + wide + weight, abs=8)
    found = evaluate(resolution, NODE)
    assert found.peak_bytes[0] == pytest.approx(
        x + 16 * 2 * 1024 * 4096 + (1 + FRAGMENTATION) * max(memory.backward, 4 * 2 * 1024 * 4096), abs=64
    )


def test_recomputation_trades_seconds_for_bytes(graph):
    plain, again = evaluated(graph, pp=2, micro_batches=4), evaluated(graph, pp=2, micro_batches=4, recompute=True)
    assert again.seconds > plain.seconds
    assert again.peak_bytes[0] < plain.peak_bytes[0]
    assert again.stages[0].recompute > 0 == plain.stages[0].recompute


def test_gpipe_takes_as_long_as_1f1b_and_keeps_more(graph):
    first, second = (evaluated(graph, pp=4, micro_batches=8, schedule=s) for s in ("1f1b", "gpipe"))
    assert first.seconds == pytest.approx(second.seconds, rel=0.02)
    assert first.peak_bytes[0] < second.peak_bytes[0]
    assert first.timeline.in_flight[0] == 4
    assert second.timeline.in_flight[0] == 8


def test_compute_divides_over_data_and_tensor_parallel_devices():
    graph = gpt(2, hidden=2048, heads=16, seq=512, vocab=32000, batch=16, dtype="bfloat16")
    recipe = Recipe(precision="bf16")
    one, dp, tp = (evaluated(graph, layers=2, recipe=recipe, **k) for k in ({}, {"dp": 8}, {"tp": 8}))
    assert one.stages[0].forward / dp.stages[0].forward == pytest.approx(8, rel=0.25)
    assert 4 < one.stages[0].forward / tp.stages[0].forward < 8  # norms and residuals are repeated
    assert dp.stages[0].synchronise > 0 == tp.stages[0].synchronise
    assert tp.stages[0].communication > dp.stages[0].communication


def test_crossing_nodes_costs_more():
    graph = gpt(2, hidden=1024, heads=16, seq=256, vocab=32000, batch=16, dtype="bfloat16")
    plan = uniform(graph, 2, tp=8, recipe=Recipe(precision="bf16"))
    resolution = resolve(graph, plan)
    inside, across = (evaluate(resolution, Cluster.parse(spec)) for spec in ("a100-80gb:1x8", "a100-80gb:2x4"))
    assert across.stages[0].communication > 1.5 * inside.stages[0].communication
    assert across.stages[0].forward == inside.stages[0].forward


def test_inference_has_no_backward(graph):
    found = evaluated(graph, tp=2, recipe=Recipe(mode="inference"))
    training = evaluated(graph, tp=2)
    for kind in ("backward", "recompute", "accumulate", "synchronise", "optimizer", "refresh"):
        assert getattr(found.stages[0], kind) == 0
    assert found.stages[0].forward == pytest.approx(training.stages[0].forward)
    assert found.parameters[0].total == found.parameters[0].stored
    assert found.peak_bytes[0] < training.peak_bytes[0]


def test_autocast_is_faster_than_float32_and_keeps_float32_states():
    graph = gpt(2, hidden=2048, heads=16, seq=512, vocab=32000, batch=4)
    full, mixed = (evaluated(graph, layers=2, recipe=Recipe(precision=p)) for p in ("float32", "autocast"))
    assert mixed.seconds < full.seconds / 2
    assert mixed.parameters == full.parameters
    assert mixed.peak_bytes[0] < full.peak_bytes[0]


def test_a_plan_fits_or_does_not():
    graph = gpt(2, hidden=512, heads=8, seq=256, vocab=32000, batch=64)
    roomy = evaluated(graph, layers=2)
    assert roomy.fits
    assert roomy.limits == (NODE.device(0).usable_memory,)
    tight = Cluster.parse({"nodes": [{"device": "a100-80gb", "devices": 1, "figures": {"memory.capacity": "2 GiB"}}]})
    assert not evaluated(graph, cluster=tight, layers=2).fits


def test_the_slower_devices_of_a_mesh_decide(graph):
    plan = uniform(graph, LAYERS, dp=2)
    resolution = resolve(graph, plan)
    mixed, slow, fast = (
        evaluate(resolution, Cluster.parse(spec)) for spec in ("h100:1x1+v100-16gb:1x1", "v100-16gb:2x1", "h100:2x1")
    )
    assert mixed.stages[0].forward == slow.stages[0].forward > fast.stages[0].forward
    assert mixed.limits == slow.limits


def test_a_shared_model_changes_nothing(graph):
    resolution = resolve(graph, uniform(graph, LAYERS, **PLANS["all"]))
    model = CostModel(graph, NODE, resolution.plan.recipe, resolution.time)
    alone = evaluate(resolution, NODE)
    for _ in range(2):
        again = evaluate(resolution, NODE, model=model)
        assert (again.seconds, again.peak_bytes, again.stages) == (alone.seconds, alone.peak_bytes, alone.stages)


def test_parameters_as_the_search_sees_them(graph):
    """``CostModel.parameter`` gives for one parameter what the evaluation adds up for all."""
    resolution = resolve(graph, uniform(graph, LAYERS, dp=4, zero=3))
    model = CostModel(graph, NODE, resolution.plan.recipe, resolution.time)
    mesh, home = resolution.mesh(0), resolution.parameters["h.0.mlp.up.weight"]
    split = (Split(0), R)
    assert home.optimizer == split
    cost = model.parameter(
        "h.0.mlp.up.weight", mesh, used=(R, R), delivered=(P, R), stored=split, held=split, optimizer=split
    )
    size = 4 * 256 * 64
    assert cost.gather_forward == cost.gather_backward == along_dp(mesh, "all_gather", size)
    assert cost.accumulate == along_dp(mesh, "reduce_scatter", size)
    assert cost.synchronise == cost.refresh == 0
    assert cost.bytes.total == 16 * 256 * 64 // 4
    plain = model.parameter(
        "h.0.mlp.up.weight", mesh, used=(R, R), delivered=(P, R), stored=(R, R), held=(P, R), optimizer=(R, R)
    )
    assert plain.synchronise == along_dp(mesh, "all_reduce", size)
    assert plain.gather_forward == plain.refresh == plain.accumulate == 0
    zero_1 = model.parameter(
        "h.0.mlp.up.weight", mesh, used=(R, R), delivered=(P, R), stored=(R, R), held=(P, R), optimizer=split
    )
    assert zero_1.synchronise == along_dp(mesh, "reduce_scatter", size)
    assert zero_1.refresh == along_dp(mesh, "all_gather", size)
    assert zero_1.step < plain.step


def along_dp(mesh, kind, size):
    return CommunicationPrices(NODE).collective(kind, mesh, (0,), size)


def test_bad_plans(graph):
    resolution = resolve(graph, uniform(graph, LAYERS, dp=4))
    with pytest.raises(ClusterError, match="cluster 'h100:1x2' has devices 0 to 1, not 3"):
        evaluate(resolution, Cluster.parse("h100:1x2"))
    with pytest.raises(IllegalPlanError, match="unknown optimizer 'muon'"):
        evaluate(resolution, NODE, Recipe(optimizer="muon"))
