"""Generated segments: the text, what it computes, and how it is cached."""

from __future__ import annotations

import pytest
import torch

from autoplan.runtime.codegen import SegmentCompiler, SegmentOptions, bind, load, source
from searchspace.errors import ExecutionError
from searchspace.graph import Context, GlobalSize, InputRef, LocalEnd, LocalOffset, LocalSize, Symbol, TensorDim
from tests.runtime.handmade import Code

CPU = torch.device("cpu")


def mlp() -> Code:
    code = Code("block", x=(2, 4), w=(3, 4), b=(3,))
    code.call("aten.linear.default", ["x", "w", "b"], {"h": (2, 3)}, module="net.fc")
    code.call("aten.gelu.default", ["h"], {"class": (2, 3)}, module="net.act")
    code.call("aten.mul.Tensor", ["h", "class"], {"y": (2, 3)}, module="net.act")
    return code


def test_golden_text() -> None:
    assert (
        source(mlp().build(["y"]), CPU)
        == '''"""Segment block: 3 operators."""

import torch

from autoplan.runtime.codegen import bind

device = torch.device('cpu')
linear = bind('aten.linear.default')
gelu = bind('aten.gelu.default')
mul_Tensor = bind('aten.mul.Tensor')


def block(x, w, b):
    # net.fc
    h = linear(x, w, b)  # [2, 3]
    # net.act
    v_class = gelu(h)  # [2, 3]
    y = mul_Tensor(h, v_class)  # [2, 3]
    del h, v_class
    return (y,)
'''
    )


def test_computes_and_is_cached_by_text(tmp_path) -> None:
    compiler = SegmentCompiler(CPU, SegmentOptions(dump=tmp_path))
    first, second = compiler(mlp().build(["y"])), compiler(mlp().build(["y"]))
    assert first is second
    x, w, b = torch.randn(2, 4), torch.randn(3, 4), torch.randn(3)
    h = torch.nn.functional.linear(x, w, b)
    (y,) = first(x, w, b)
    assert torch.equal(y, h * torch.nn.functional.gelu(h))
    (file,) = tmp_path.iterdir()
    assert load(file.read_text(), "block")(x, w, b)[0].equal(y)


def test_local_sizes_offsets_and_global_sizes() -> None:
    dim = TensorDim(0, 1)
    code = Code("s", x=(2, 3)).call(
        "aten.new_full.default", ["x"], {"y": (4,)},
        args=[InputRef(0), ((LocalSize(dim), LocalOffset(dim), LocalEnd(dim), GlobalSize(dim))), float("inf")],
        regions=[((0, 2), (5, 8)), ((0, 4),)], wholes=[(2, 11), (4,)],
        kwargs={"dtype": Symbol("torch.float32"), "device": Symbol("device")},
    )  # fmt: skip
    text = source(code.build(["y"]), CPU)
    assert 'new_full(x, [3, 5, 8, 11], float("inf"), dtype=torch.float32, device=device)' in text
    (y,) = load(text, "s")(torch.zeros(2, 3))
    assert y.shape == (3, 5, 8, 11) and y.isinf().all()


def test_contexts_become_with_blocks() -> None:
    code = Code("s", x=(2, 2))
    code.call("aten.mm.default", ["x", "x"], {"a": (2, 2)}, context=Context(autocast="bfloat16"))
    code.call("aten.mm.default", ["a", "a"], {"b": (2, 2)}, context=Context(autocast="bfloat16"))
    code.call("aten.add.Tensor", ["x", "x"], {"c": (2, 2)}, context=Context(no_grad=True))
    code.call("aten.mul.Tensor", ["c", "x"], {"d": (2, 2)})
    text = source(code.build(["b", "c", "d"]), CPU)
    assert text.count("with torch.autocast(device.type, torch.bfloat16):") == 1
    assert text.count("with torch.no_grad():") == 1
    b, c, d = load(text, "s")(torch.ones(2, 2, requires_grad=True))
    assert b.dtype == torch.bfloat16 and not c.requires_grad and d.requires_grad


def test_lists_and_several_outputs() -> None:
    code = Code("s", x=(4, 2))
    code.call("aten.split_with_sizes.default", ["x"], {"a": (1, 2), "b": (3, 2)}, extra=[(1, 3)])
    code.call("aten.chunk.default", ["a"], {"only": (1, 2)}, extra=[1])
    code.call("aten.cat.default", ["b", "only"], {"y": (4, 2)}, args=[(InputRef(0), InputRef(1)), 0])
    x = torch.arange(8.0).view(4, 2)
    (y,) = SegmentCompiler(CPU)(code.build(["y"]))(x)
    assert y.equal(torch.cat([x[1:], x[:1]]))


def test_same_tensor_in_two_layouts_and_clashing_names() -> None:
    code = Code("linear", torch=(2, 2), x=(2, 2))
    code.call("aten.linear.default", ["torch", "x"], {"device": (2, 2)})
    x = torch.randn(2, 2)
    (y,) = SegmentCompiler(CPU)(code.build(["device"]))(x, x)
    assert y.equal(x @ x.T)


@pytest.mark.parametrize("target", ["aten.nothing.default", "nonsense", "autoplan.nothing.default"])
def test_unknown_target(target: str) -> None:
    with pytest.raises(ExecutionError, match=f"no operator is called '{target}'"):
        bind(target)


def test_traceback_shows_generated_line() -> None:
    function = load(source(mlp().build(["y"]), CPU), "block")
    with pytest.raises(RuntimeError) as caught:
        function(torch.zeros(2, 5), torch.zeros(3, 4), torch.zeros(3))
    import traceback

    assert "h = linear(x, w, b)" in "".join(traceback.format_exception(caught.value))


def test_compiled_segment_computes_the_same() -> None:
    segment = mlp().build(["y"], differentiable=["x", "w", "b"])
    values = [torch.randn(2, 4), torch.randn(3, 4), torch.randn(3)]
    plain = SegmentCompiler(CPU)(segment)
    compiled = SegmentCompiler(CPU, SegmentOptions(compile="aot_eager"))(segment)
    leaves = [[v.clone().requires_grad_() for v in values] for _ in range(2)]
    for got, want in zip(
        torch.autograd.grad(compiled(*leaves[0])[0].sum(), leaves[0]),
        torch.autograd.grad(plain(*leaves[1])[0].sum(), leaves[1]),
        strict=True,
    ):
        assert torch.allclose(got, want)


def test_fast_builtins_agree_with_the_overloads() -> None:
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    for target, arguments in {
        "aten.linear.default": (x, y),
        "aten.softmax.int": (x, -1, torch.float32),
        "aten.mean.dim": (x, [0], True),
        "aten.sum.dim_IntList": (x, [1]),
        "aten.layer_norm.default": (x, [4], None, None, 1e-5),
        "aten.view.default": (x, [2, 8]),
        "aten.transpose.int": (x, 0, 1),
        "aten.where.self": (x > 0, x, y),
        "aten.pow.Tensor_Scalar": (x, 2),
        "aten.expand.default": (x, [2, 4, 4]),
        "aten.index_select.default": (x, 0, torch.tensor([1, 2])),
        "aten.squeeze.dims": (x, [0, 1]),
        "aten.gelu.default": (x,),
        "aten.clamp.default": (x, 0, None),
        "aten.scaled_dot_product_attention.default": (x, y, y, None, 0.0, True),
    }.items():
        namespace, packet, overload = target.split(".")
        assert bind(target)(*arguments).equal(getattr(getattr(torch.ops.aten, packet), overload)(*arguments)), namespace
