"""Every rule of the captured models is verified where it stands: with its arguments, its units, its data."""

from __future__ import annotations

import pytest

from autoplan.capture import capture
from autoplan.capture.verification import Case, check
from autoplan.operators import resolve
from searchspace.graph import Graph
from tests.capture.interpreter import run_captured
from tests.capture.models import MODELS, build


@pytest.mark.parametrize("name", MODELS)
def test_rules_of_a_model(name: str) -> None:
    model, args, kwargs = build(name)
    captured = capture(model, args, kwargs)
    graph = captured.graph
    values = run_captured(captured, args, kwargs)
    seen = {}
    for op in graph.operators:
        tensors = tuple(values[i].detach().clone().requires_grad_(values[i].requires_grad) for i in op.inputs)
        if any(str(t.dtype) == "torch.float32" for t in tensors):
            tensors = tuple(
                t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t for t in tensors
            )
        key = (op.target, op.args, op.kwargs, op.rule, tuple(t.requires_grad for t in tensors))
        if key not in seen and not op.context.no_grad:
            outputs = tuple(graph.tensor[o].shape for o in op.outputs)
            case = Case(op.name, resolve(op.target), op.args, op.kwargs, tensors, outputs)
            single = any(graph.tensor[o].dtype == "float32" for o in op.outputs)  # a cast inside the model
            seen[key] = check(case, op.rule, (2, 3), 1e-6 if single else 1e-9)
    assert sum(map(len, seen.values())) > 2 * len(seen)


def cut_units(graph: Graph, operator: str) -> dict[str, int]:
    op = graph.operator[operator]
    return {i: op.rule.units(i, graph.shapes(op)) for i in op.rule.identifiers}


def test_projections_of_grouped_query_attention_are_cut_between_key_heads() -> None:
    model, args, kwargs = build("hf_llama")
    graph = capture(model, args, kwargs).graph
    heads = model.config.num_key_value_heads
    layer = "model.layers.0.self_attn"
    assert cut_units(graph, f"{layer}.q_proj/linear")["n"] == heads
    assert cut_units(graph, f"{layer}.k_proj/linear")["n"] == heads
    assert cut_units(graph, f"{layer}.o_proj/linear")["k"] == heads
    assert cut_units(graph, f"{layer}/scaled_dot_product_attention")["h"] == heads


def test_parts_of_a_fused_projection_are_cut_between_heads() -> None:
    model, args, kwargs = build("gpt")
    graph = capture(model, args, kwargs).graph
    fused = next(op for op in graph.operators if op.target == "autoplan.fused_linear.default")
    attention = next(op for op in graph.operators if op.family == "attention")
    assert cut_units(graph, fused.name)["n"] == graph.tensor[attention.outputs[0]].shape[1]
