from dataclasses import replace
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel.compute import (
    FILL,
    TILE,
    WAVE_SHARE,
    Work,
    copy_seconds,
    operator_seconds,
    product_seconds,
    product_shape,
    work_fraction,
)
from costmodel.device import preset, preset_names
from searchspace.graph import DTYPE_BYTES
from tests.search.models import Builder, gpt, rule

A100 = preset("a100-80gb")
MEMORY = 2039e9 * 0.85
LAUNCH = 4e-6


def priced(builder, name, local=None, wants=None, device=A100, **more):
    op = next(op for op in builder.operators if op.name == name)
    names = op.inputs + op.outputs
    whole = [builder.tensors[n].shape for n in names]
    dtypes = [builder.tensors[n].dtype for n in names]
    wants = wants if wants is not None else [builder.tensors[n].requires_grad for n in op.inputs]
    return operator_seconds(op, whole, local or whole, dtypes, wants, device, **more)


def linear(m=4096, k=8192, n=8192, bias=False):
    b = Builder("bfloat16")
    name = b.linear(b.input("x", (1, m, k)), "l", n, bias=bias)
    return b, name


def test_a_large_product_runs_at_the_best_rate_but_for_the_last_wave_and_the_fill():
    b, name = linear()
    forward, backward = priced(b, name, wants=[True, True])
    ideal = 2 * 4096 * 8192 * 8192 / (312e12 * 0.869)
    tiles = 4096 * 8192 / TILE**2
    expected = ideal * (1 + FILL / 8192) * (1 + WAVE_SHARE * 108 / tiles) + LAUNCH
    assert forward == pytest.approx(expected, rel=1e-9)
    assert 1.9 < backward / forward < 2.1


def test_backward_of_a_product_is_one_product_for_each_gradient():
    b, name = linear()
    none, one, both = ([False, False], [False, True], [True, True])
    _, nothing = priced(b, name, wants=none)
    forward, weight_only = priced(b, name, wants=one)
    _, full = priced(b, name, wants=both)
    assert nothing == 0
    assert weight_only == pytest.approx(forward, rel=0.1)
    assert full == pytest.approx(2 * forward, rel=0.1)


def test_a_bias_first_is_not_a_factor():
    b = Builder("bfloat16")
    x, w, bias = b.input("x", (512, 1024)), b.parameter("w", 1024, 2048), b.parameter("bias", 2048)
    how = rule("n, m k, k n -> m n", sums="k", added=(0,))
    name = b.op("aten.addmm.default", [bias, x, w], (512, 2048), how, family="matmul", flops=2.0 * 512 * 1024 * 2048)
    forward, backward = priced(b, name)
    assert backward == pytest.approx(forward, rel=0.2)  # of the weight alone: x needs no gradient


def test_shapes_of_products():
    assert product_shape("matmul", 2.0 * 3 * 5 * 7 * 11, [(3, 5, 11), (7, 11), (3, 5, 7)], 2) == (1, 15, 7, 11)
    assert product_shape("matmul", 2.0 * 3 * 5 * 7 * 11, [(3, 5, 11), (3, 11, 7), (3, 5, 7)], 2) == (3, 5, 7, 11)
    convolution = [(2, 16, 8, 8), (32, 16, 3, 3), (2, 32, 6, 6)]
    flops = 2.0 * 2 * 32 * 36 * 16 * 9
    assert product_shape("convolution", flops, convolution, 2) == (1, 2 * 36, 32, 144)


@pytest.mark.parametrize("name", preset_names())
@given(m=st.integers(1, 20000), n=st.integers(1, 20000), k=st.integers(1, 20000))
@settings(max_examples=20, deadline=None)
def test_no_product_beats_the_best_measured_rate(name, m, n, k):
    device = preset(name)
    rate = device.peak_of("bfloat16") * device.matmul_efficiency
    assert 2.0 * m * n * k / product_seconds(1, m, n, k, rate, device.processors) <= rate * (1 + 1e-9)


@given(st.integers(1, 9000), st.integers(1, 9000), st.integers(1, 9000), st.integers(1, 8), st.integers(0, 3))
@settings(max_examples=200, deadline=None)
def test_products_take_longer_in_every_extent(m, n, k, batch, which):
    shape = [batch, m, n, k]
    larger = [extent + (i == which) for i, extent in enumerate(shape)]
    rate = 1e14
    assert product_seconds(*larger, rate, 108) > product_seconds(*shape, rate, 108)


def test_small_products_are_bound_by_memory():
    b, name = linear(m=1)
    forward, _ = priced(b, name)
    moved = 2 * (8192 + 8192 * 8192 + 8192)
    assert forward == pytest.approx(moved / MEMORY + LAUNCH, rel=1e-9)


def test_pointwise_operators_move_their_bytes():
    b = Builder("bfloat16")
    x = b.linear(b.input("x", (8, 1024, 1024)), "l", 1024, bias=False)
    name = b.pointwise("aten.gelu.default", x, saved=(0,))
    size = 2 * 8 * 1024 * 1024
    forward, backward = priced(b, name)
    assert forward == pytest.approx(2 * size / MEMORY + LAUNCH)
    assert backward == pytest.approx(3 * size / MEMORY + LAUNCH)  # reads x and the gradient, writes a gradient


def test_views_are_free():
    b = Builder()
    x = b.linear(b.input("x", (4, 8)), "l", 8, bias=False)
    name = b.op("aten.view.default", [x], (4, 2, 4), rule("a h:4 -> a h ."), family="view", flops=0)
    assert priced(b, name) == (0.0, 0.0)


def test_the_backward_of_a_slice_writes_the_whole():
    b = Builder()
    x = b.linear(b.input("x", (4, 1024)), "l", 1024, bias=False)
    name = b.op("aten.slice.Tensor", [x], (4, 256), rule("a . -> a ."), family="view", flops=0)
    forward, backward = priced(b, name)
    assert forward == 0
    assert backward == pytest.approx(4 * (4 * 256 + 4 * 1024) / MEMORY + LAUNCH)


def test_the_gradient_of_an_embedding_is_dense():
    b = Builder()
    name = b.embedding(b.input("ids", (4, 16), "int64"), "wte", 50257, 64)
    forward, backward = priced(b, name)
    looked_up = 4 * 4 * 16 * 64
    assert forward == pytest.approx((2 * looked_up + 8 * 64) / MEMORY + LAUNCH)
    assert backward == pytest.approx((2 * looked_up + 4 * 50257 * 64) / MEMORY + 2 * LAUNCH)


def test_losses_pass_over_the_logits_several_times():
    b = Builder("bfloat16")
    logits = b.linear(b.input("x", (2, 64, 128)), "head", 50257, bias=False)
    b.cross_entropy(logits, b.input("labels", (2, 64), "int64"))
    name = next(op.name for op in b.operators if op.target == "autoplan.sum_exp.default")
    forward, backward = priced(b, name)
    elements = 2 * 64 * 50257
    assert forward == pytest.approx(elements * (2 + 4 * 4) / MEMORY + 3 * LAUNCH)
    assert backward == pytest.approx(elements * (2 + 5 * 4 + 4 + 2) / MEMORY + 4 * LAUNCH)
    top = next(op.name for op in b.operators if op.target == "autoplan.row_max.default")
    assert priced(b, top, wants=[False]) == pytest.approx((2 * (elements + 2 * 64) / MEMORY + LAUNCH, 0))


def test_casts_of_autocast_cost_memory_traffic():
    b = Builder("float32")
    name = b.linear(b.input("x", (1, 512, 512)), "l", 512, bias=False)
    plain, _ = priced(b, name, computes_in=None)
    cast, _ = priced(b, name, computes_in="bfloat16")
    half = Builder("bfloat16")
    other = half.linear(half.input("x", (1, 512, 512)), "l", 512, bias=False)
    lowered, _ = priced(half, other)
    one = 512 * 512 * 6 / MEMORY + LAUNCH  # read float32, write bfloat16
    assert plain > lowered
    assert cast > lowered + 2 * one - 1e-9


def test_the_work_of_a_shard_is_the_product_of_its_shares():
    how = rule("b s k, n k -> b s n", sums="k")
    whole = [(8, 16, 32), (64, 32), (8, 16, 64)]
    assert work_fraction(how, whole, whole) == 1
    assert work_fraction(how, whole, [(2, 16, 32), (64, 32), (2, 16, 64)]) == 1 / 4
    assert work_fraction(how, whole, [(2, 16, 8), (64, 8), (2, 16, 64)]) == 1 / 16
    assert work_fraction(how, whole, [(3, 16, 32), (11, 32), (3, 16, 11)]) == pytest.approx(3 / 8 * 11 / 64)


@given(st.integers(1, 16), st.integers(1, 16), st.integers(1, 16))
@settings(max_examples=50, deadline=None)
def test_shards_cost_less_than_the_whole(parts_b, parts_n, parts_k):
    b, name = linear(m=64, k=64, n=64)
    local = [(1, 64 // parts_b, 64 // parts_k), (64 // parts_n, 64 // parts_k), (1, 64 // parts_b, 64 // parts_n)]
    whole, whole_back = priced(b, name, wants=[True, True])
    part, part_back = priced(b, name, local=local, wants=[True, True])
    assert part <= whole
    assert part_back <= whole_back


def test_every_operator_of_a_model_has_a_price():
    graph = gpt()
    for op in graph.operators:
        whole = graph.shapes(op)
        dtypes = [graph.tensor[n].dtype for n in op.inputs + op.outputs]
        wants = [graph.tensor[n].requires_grad for n in op.inputs]
        forward, backward = operator_seconds(op, whole, whole, dtypes, wants, A100)
        assert (forward > 0) == (op.family != "view"), op.name
        assert backward >= 0
        slow = replace(A100, matmul_efficiency=A100.matmul_efficiency / 2, memory_efficiency=A100.memory_efficiency / 2)
        assert operator_seconds(op, whole, whole, dtypes, wants, slow)[0] >= forward


def test_work_and_copies():
    assert Work(kernels=0, bytes=1e9).seconds("float32", A100) == 0
    assert copy_seconds(1e9, A100) == pytest.approx(2e9 / MEMORY + LAUNCH)
    assert copy_seconds(1e9, A100, passes=3) == pytest.approx(3e9 / MEMORY + LAUNCH)
    assert Work(flops=312e12 * 0.869, kernels=1).seconds("bfloat16", A100) == pytest.approx(1 + LAUNCH)
    assert prod((2, 3)) * DTYPE_BYTES["bfloat16"] == 12
