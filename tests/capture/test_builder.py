"""The builder: metas by running on fake tensors, common subexpressions, dead operators, names."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from autoplan.capture.builder import GraphBuilder, Value
from autoplan.capture.call import Call, Traits
from searchspace.errors import CaptureError
from searchspace.graph import Context, InputRef, Symbol
from searchspace.rule import Rule


class Describe:
    """Opaque rules; remembers what it was asked."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def __call__(self, call: Call) -> Traits:
        self.calls.append(call)
        shapes = [meta.shape for meta in call.inputs], [meta.shape for meta in call.outputs]
        return Traits(call.args, call.kwargs, Rule.opaque(*shapes), saved_inputs=tuple(range(len(call.inputs))))


@pytest.fixture
def builder() -> GraphBuilder:
    return GraphBuilder(FakeTensorMode(), "cpu", Describe())


def parameter(builder: GraphBuilder, *shape: int, name: str = "w") -> Value:
    return builder.source("parameter", name, shape, torch.float32, requires_grad=True)


def test_metas_come_from_running_the_operator(builder: GraphBuilder) -> None:
    w = parameter(builder, 4, 6)
    values, indices = builder.emit("aten.topk.default", w, 2)
    assert (values.shape, values.dtype, values.requires_grad) == ((4, 2), "float32", True)
    assert (indices.shape, indices.dtype, indices.requires_grad) == ((4, 2), "int64", False)
    assert not builder.emit("aten.transpose.int", w, 0, 1).contiguous
    assert builder.results("aten.sum.default", w)[0].shape == ()
    with builder.at("", Context(no_grad=True)):
        assert not builder.emit("aten.exp.default", w).requires_grad
    with builder.at("", Context(autocast="bfloat16")):
        assert builder.emit("aten.mm.default", w, builder.emit("aten.t.default", w)).dtype == "bfloat16"


def test_inference_has_no_gradients() -> None:
    builder = GraphBuilder(FakeTensorMode(), "cpu", Describe(), gradients=False)
    assert not builder.emit("aten.exp.default", parameter(builder, 3)).requires_grad


def test_equal_calls_are_one_operator(builder: GraphBuilder) -> None:
    w = parameter(builder, 4)
    first = builder.emit("aten.mul.Tensor", w, 2)
    assert builder.emit("aten.mul.Tensor", w, 2) is first
    for other in (2.0, True):
        assert builder.emit("aten.mul.Tensor", w, other) is not first
    with builder.at("", Context(no_grad=True)):
        assert builder.emit("aten.mul.Tensor", w, 2) is not first
    assert builder.emit("aten.bernoulli.default", w) is not builder.emit("aten.bernoulli.default", w)


def test_context_that_makes_no_difference_is_left_out(builder: GraphBuilder) -> None:
    ids = builder.source("input", "args.0", (3,), torch.int64)
    with builder.at("", Context(no_grad=True, autocast="bfloat16")):
        doubled = builder.emit("aten.add.Tensor", ids, 1)
    assert doubled.origin is not None and doubled.origin.call.context == Context()


def test_finish_drops_dead_operators_and_names_the_others(builder: GraphBuilder) -> None:
    w = parameter(builder, 4, 4, name="a.b.weight")
    x = builder.source("input", "kwargs.x-y", (4,), torch.float32, batch_dim=0)
    builder.source("input", "kwargs.x_y", (4,), torch.float32)
    with builder.at("a.b", Context()):
        builder.emit("aten.cos.default", w)
        y = builder.emit("aten.mv.default", w, x)
        z = builder.emit("aten.mv.default", w, y)
    a, _ = builder.emit("aten.topk.default", z, 2)
    graph = builder.finish("g", [a], None, [], 4)
    assert [(op.name, op.inputs, op.outputs) for op in graph.operators] == [
        ("a.b/mv", ("p_a_b_weight", "x_x_y"), ("t_mv",)),
        ("a.b/mv_1", ("p_a_b_weight", "t_mv"), ("t_mv_1",)),
        ("topk", ("t_mv_1",), ("t_topk", "t_topk_1")),
    ]
    assert graph.inputs == ("x_x_y", "x_x_y_1")
    assert graph.operators[0].saved == ("p_a_b_weight", "x_x_y")
    assert graph.tensor["x_x_y"].batch_dim == 0
    assert [call.target for call in builder.describe.calls] == [  # type: ignore[attr-defined]
        "aten.mv.default", "aten.mv.default", "aten.topk.default",
    ]  # fmt: skip


def test_a_tensor_used_twice_is_two_inputs(builder: GraphBuilder) -> None:
    w = parameter(builder, 4, 4)
    y = builder.emit("aten.cat.default", (w, w), 0)
    assert y.origin is not None
    assert y.origin.call.args == ((InputRef(0), InputRef(1)), 0)
    assert y.shape == (8, 4)


def test_symbols(builder: GraphBuilder) -> None:
    value = builder.emit("aten.full.default", (2,), 1, dtype=Symbol("torch.float64"), device=Symbol("device"))
    assert (value.shape, value.dtype) == ((2,), "float64")


def test_unannounced_writes_are_refused(builder: GraphBuilder) -> None:
    x, mean = parameter(builder, 2, 3, 4), builder.source("buffer", "mean", (3,), torch.float32)
    with pytest.raises(CaptureError, match=r"instance_norm\.default writes to its inputs \[1, 2\]"):
        builder.emit("aten.instance_norm.default", x, None, None, mean, mean, True, 0.1, 1e-5, False)


def test_failing_operator_is_named(builder: GraphBuilder) -> None:
    w = parameter(builder, 4, 6)
    with (
        builder.at("a.b", Context()),
        pytest.raises(CaptureError, match=r"operator aten\.mm\.default in module 'a\.b'"),
    ):
        builder.emit("aten.mm.default", w, w)
    with pytest.raises(CaptureError, match=r"no torch operator is called 'aten\.nope\.default'"):
        builder.emit("aten.nope.default", w)
