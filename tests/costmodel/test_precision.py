from dataclasses import replace

from costmodel.precision import arithmetic_dtype, tensor_dtypes
from searchspace.graph import Context
from tests.search.models import gpt


def of_target(graph, target):
    return next(op for op in graph.operators if op.target == target)


def test_types_are_as_captured_without_autocast():
    graph = gpt()
    for precision in ("float32", "bf16"):
        assert tensor_dtypes(graph, precision) == {t.name: t.dtype for t in graph.tensors}
        assert all(arithmetic_dtype(op, precision) is None for op in graph.operators)


def test_autocast_lowers_products_and_raises_norms():
    graph = gpt()
    dtypes = tensor_dtypes(graph, "autocast")
    linear, norm = of_target(graph, "aten.linear.default"), of_target(graph, "aten.layer_norm.default")
    assert dtypes[linear.outputs[0]] == "bfloat16"
    assert dtypes[norm.outputs[0]] == "float32"
    assert {dtypes[t.name] for t in graph.parameters} == {"float32"}
    gelu = of_target(graph, "aten.gelu.default")
    assert dtypes[gelu.outputs[0]] == "bfloat16"  # follows its input
    residual = next(op for op in graph.operators if op.name.startswith("add") and op.module == "h.0")
    assert dtypes[residual.outputs[0]] == "float32"  # the wider of float32 and bfloat16
    assert dtypes["ids"] == "int64"


def test_what_was_captured_under_autocast_keeps_its_types():
    graph = gpt()
    lowered = replace(
        graph, operators=tuple(replace(op, context=Context(autocast="float16")) for op in graph.operators)
    )
    assert tensor_dtypes(lowered, "autocast") == {t.name: t.dtype for t in graph.tensors}
    linear, norm = (of_target(lowered, t) for t in ("aten.linear.default", "aten.layer_norm.default"))
    for precision in ("float32", "autocast"):
        assert arithmetic_dtype(linear, precision) == "float16"
        assert arithmetic_dtype(norm, precision) is None
