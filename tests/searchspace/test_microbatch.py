"""The time axis: what is cut, what runs once, what is summed beforehand, and what is refused."""

from __future__ import annotations

import pytest

from searchspace.errors import IllegalPlanError
from searchspace.layout import P, R, Split
from searchspace.microbatch import batch_dims, time_axis
from searchspace.rebatch import rebatch
from tests.search.models import Builder, gpt, rule


def test_the_batch_is_cut_everywhere_and_the_loss_is_a_sum() -> None:
    graph = gpt(layers=1, batch=7)
    axis = time_axis(graph, 2)
    assert graph.loss is not None
    assert axis.placement[graph.loss] == P
    count = next(op for op in graph.operators if op.target == "autoplan.count.default")
    positions = {op.name for op in graph.operators if op.target == "aten.arange.default"}
    assert axis.once == positions | {count.name}
    attention = next(op for op in graph.operators if "attention" in op.target)
    assert axis.placement[attention.outputs[0]] == Split(0)
    assert [axis.base(attention.outputs[0], Split(0), m)[0] for m in (0, 1)] == [(0, 4), (4, 7)]
    division = graph.producer[graph.loss]
    assert [axis.consumed(division, i) for i in (0, 1)] == [P, R]


def _coupled() -> Builder:
    b = Builder()
    x = b.linear(b.input("x", (8, 4)), "up", 4)
    mean = b.op("autoplan.mean.default", [x], (4,), rule("b c -> c", sums="b"))
    b.op("autoplan.centre.default", [x, mean], (8, 4), rule("b c, c -> b c"))
    return b


def test_coupled_samples_are_refused_by_name_but_can_be_planned_at_another_batch() -> None:
    graph = _coupled().graph("coupled", "centre_2", 8)
    with pytest.raises(IllegalPlanError, match=r"operator 'centre_2' .*couples the samples of a batch: .*mean_1"):
        time_axis(graph, 2)
    assert batch_dims(graph) == {"x": 0, "linear_0": 0, "centre_2": 0}
    assert rebatch(graph, 32).tensor["centre_2"].shape == (32, 4)


def test_samples_that_stay_together_are_cut_in_groups() -> None:
    b = Builder()
    x = b.input("x", (8, 4))
    pairs = b.op("aten.view.default", [x], (4, 2, 4), rule("b:2 c -> b . c"))
    graph = b.graph("pairs", pairs, 8)
    assert time_axis(graph, 2).granule == 2
    with pytest.raises(IllegalPlanError, match="groups of 2 cannot be cut into 8 micro-batches"):
        time_axis(graph, 8)


def test_a_batch_smaller_than_the_micro_batches_is_refused() -> None:
    with pytest.raises(IllegalPlanError, match="a batch of 8 is smaller than 9 micro-batches"):
        time_axis(gpt(layers=1), 9)


def test_rebatch_scales_shapes_and_work_and_nothing_else() -> None:
    graph = gpt(layers=2, batch=4)
    larger = rebatch(graph, 12)
    expected = gpt(layers=2, batch=12)
    assert [t.shape for t in larger.tensors] == [t.shape for t in expected.tensors]
    work = [[op.flops for op in g.operators if op.family in ("matmul", "attention")] for g in (larger, expected)]
    assert work[0] == pytest.approx(work[1])
    assert larger.fingerprint == graph.fingerprint and larger.batch == 12
    assert rebatch(graph, 4) is graph
    with pytest.raises(IllegalPlanError, match="captured with a batch of 1"):
        rebatch(gpt(layers=1, batch=1), 4)


def test_masks_of_the_size_of_the_batch_are_scaled() -> None:
    b = Builder()
    x = b.input("x", (4, 3))
    mask = b.op("aten.ones.default", [], (4, 3), rule("-> b c"), family="creation")
    y = b.pointwise("aten.mul.Tensor", x, mask)
    graph = b.graph("masked", y, 4)
    assert rebatch(graph, 6).tensor[mask].shape == (6, 3)
    assert time_axis(graph, 2).once == {mask}
    assert time_axis(graph, 2).placement[mask] == R
