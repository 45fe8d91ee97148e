"""Folding finds the layers that the model's author wrote."""

from __future__ import annotations

import time

from autoplan.search.folding import fold
from tests.search.models import experts, feed_forward, gpt


def test_gpt_folds_into_embedding_layers_and_head():
    graph = gpt(layers=6)
    folding = fold(graph)
    layers = [b for b in folding.blocks if folding.counts[b.kind] == 6]
    assert len(layers) == 6
    for i, block in enumerate(layers):
        modules = [graph.operator[name].module for name in block.operators]
        assert all(m.startswith(f"h.{i}") for m in modules), modules
        assert len(modules) == 15 + 5  # attention half, feed-forward half
    assert [graph.operator[b.operators[0]].module for b in folding.blocks if b not in layers] == [
        "wte",
        "wpe",
        "",
        "ln_f",
        "head",
        "loss",
    ]


def test_every_operator_is_in_one_place_and_in_order():
    for graph in (gpt(layers=3, tied=True), feed_forward(), experts()):
        folding = fold(graph)
        blocked = [name for b in folding.blocks for name in b.operators]
        assert sorted(blocked + list(folding.repeatable)) == sorted(op.name for op in graph.operators)
        position = {op.name: i for i, op in enumerate(graph.operators)}
        assert [position[n] for n in blocked] == sorted(position[n] for n in blocked)
        assert set(folding.groups) == set(graph.operator)


def test_groups_hold_operators_of_equal_rules_and_shapes():
    graph = gpt(layers=5)
    by_group: dict = {}
    for name, group in fold(graph).groups.items():
        by_group.setdefault(group, []).append(graph.operator[name])
    assert max(map(len, by_group.values())) == 5
    for members in by_group.values():
        assert len({(op.target, op.rule, graph.shapes(op)) for op in members}) == 1


def test_what_depends_on_inputs_alone_is_repeatable():
    graph = gpt()
    targets = {graph.operator[name].target for name in fold(graph).repeatable}
    assert targets == {"aten.arange.default", "autoplan.count.default"}


def test_unfolded_has_the_same_cuts_with_kinds_of_their_own():
    graph = gpt(layers=3)
    folded, single = fold(graph), fold(graph, repeats=False)
    assert [b.operators for b in folded.blocks] == [b.operators for b in single.blocks]
    assert len({b.kind for b in single.blocks}) == len(single.blocks)


def test_a_hundred_layers_fold_in_a_moment():
    graph = gpt(layers=100)
    start = time.process_time()
    folding = fold(graph)
    assert time.process_time() - start < 3
    assert max(folding.counts.values()) == 100
