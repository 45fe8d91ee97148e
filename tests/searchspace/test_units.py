"""Cut units agree along edges."""

from __future__ import annotations

import pytest

from searchspace.graph import Graph, Operator, Tensor
from searchspace.layout import Shape
from searchspace.notation import parse_rule
from searchspace.units import align_units


def graph_of(tensors: dict[str, Shape], operators: list[tuple[str, str, str, str, dict[str, int]]]) -> Graph:
    """Operators as (name, inputs, outputs, rule text, sizes); tensors that none makes are inputs."""
    made = {name for _, _, outputs, _, _ in operators for name in outputs.split()}
    return Graph(
        "test",
        tuple(Tensor(n, s, "float32", "activation" if n in made else "input") for n, s in tensors.items()),
        tuple(
            Operator(
                name, "test", (), (), tuple(ins.split()), tuple(outs.split()),
                parse_rule(text, [tensors[t] for t in (*ins.split(), *outs.split())], **sizes),
            )
            for name, ins, outs, text, sizes in operators
        ),
        tuple(n for n in tensors if n not in made),
        (),
    )  # fmt: skip


def units(graph: Graph, operator: str) -> dict[str, int]:
    op = graph.operator[operator]
    return {i: op.rule.units(i, graph.shapes(op)) for i in op.rule.identifiers}


def heads(features: int, count: int) -> Graph:
    """linear -> view as heads -> view back -> linear."""
    return graph_of(
        {"x": (6, 12), "w": (features, 12), "y": (6, features), "h": (6, count, features // count), "z": (6, features),
         "v": (12, features), "out": (6, 12)},
        [
            ("in", "x w", "y", "a k+, n k+ -> a n", {}),
            ("apart", "y", "h", "a (h d) -> a h d", {"h": count}),
            ("together", "h", "z", "a h d -> a (h d)", {}),
            ("out", "z v", "out", "a k+, n k+ -> a n", {}),
        ],
    )  # fmt: skip


def test_linear_layers_take_the_heads_units() -> None:
    graph = align_units(heads(40, 5))
    assert units(graph, "in") == {"a": 6, "k": 12, "n": 5}
    assert units(graph, "out") == {"a": 6, "k": 5, "n": 12}
    assert graph.operator["in"].rule.text == "a k+, (n 8) k+ -> a (n 8)"
    assert graph.operator["apart"].rule == heads(40, 5).operator["apart"].rule


def test_alignment_is_a_fixpoint_and_deterministic() -> None:
    once = align_units(heads(40, 5))
    assert align_units(once) == once == align_units(heads(40, 5))


def test_neighbours_agree_on_every_dimension() -> None:
    graph = align_units(heads(40, 5))
    for op in graph.operators:
        for name, uses in zip(op.inputs, op.rule.inputs, strict=True):
            maker = graph.producer.get(name)
            if maker is not None:
                made = maker.rule.outputs[maker.outputs.index(name)]
                assert [u and u.unit for u in made] == [u and u.unit for u in uses]


def test_query_heads_follow_key_heads() -> None:
    graph = align_units(
        graph_of(
            {"q": (2, 12, 8), "k": (2, 4, 8), "r": (2, 4, 3, 8), "kk": (2, 12, 8), "y": (2, 12, 8)},
            [
                ("repeat", "k", "r", "b h d -> b h r d", {"r": 3}),
                ("merge", "r", "kk", "b h r d -> b (h r) d", {}),
                ("attend", "q kk", "y", "b h d^, b h d^ -> b h d^", {}),
            ],
        )
    )
    assert graph.operator["attend"].rule.text == "b (h 3) 8, b (h 3) 8 -> b (h 3) 8"
    assert units(graph, "repeat") == {"b": 2, "h": 4, "d": 8, "r": 3}


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (5, 40, (5, 5)),
        (2, 40, (2, 2)),  # the view allows no more than 2 anyway
        (8, 5, (8, 5)),  # nothing in common
        (4, 10, (4, 10)),  # 2 would be a loss for both
        (16, 24, (8, 8)),  # 8 is ample
    ],
)
def test_coarsens_only_where_little_is_lost(first: int, second: int, expected: tuple[int, int]) -> None:
    whole = 240
    graph = align_units(
        graph_of(
            {"x": (first, whole // first), "y": (whole,), "z": (second, whole // second)},
            [
                ("a", "x", "y", "a b -> (a b)", {}),
                ("b", "y", "z", "(a b) -> a b", {"a": second}),
            ],
        )
    )
    assert (units(graph, "a")["a"], units(graph, "b")["a"]) == expected


def test_shared_rules_stay_shared() -> None:
    """Repeated layers keep one rule object, which folding relies on."""
    tensors: dict[str, Shape] = {"x0": (4, 40)}
    operators: list[tuple[str, str, str, str, dict[str, int]]] = []
    for i in range(3):
        tensors |= {f"h{i}": (4, 5, 8), f"x{i + 1}": (4, 40)}
        operators += [
            (f"apart{i}", f"x{i}", f"h{i}", "a (h d) -> a h d", {"h": 5}),
            (f"merge{i}", f"h{i}", f"x{i + 1}", "a h d -> a (h d)", {}),
        ]
    tensors["end"] = (4, 40)
    operators += [("free", "x3", "end", "a b -> a b", {})]
    graph = align_units(graph_of(tensors, operators))
    assert units(graph, "free") == {"a": 4, "b": 5}
    assert graph.operator["apart0"].rule == graph.operator["apart2"].rule
