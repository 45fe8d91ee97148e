import pytest

from costmodel.aliasing import copying_views
from tests.search.models import Builder, rule


def view(builder, target, x, shape):
    dims = " ".join("." for _ in builder.tensors[x].shape)
    out = " ".join("." for _ in shape)
    return builder.op(target, [x], shape, rule(f"{dims} -> {out}"), family="view", flops=0)


def names(builder):
    builder.tensors = dict(builder.tensors)
    loss = next(reversed(builder.tensors))
    return copying_views(builder.graph("g", loss, 2))


PERMUTE, CONTIGUOUS = ("aten.permute.default", (4, 2, 8)), ("aten.contiguous.default", (4, 2, 8))
TRANSPOSE, UNSQUEEZE = ("aten.transpose.int", (2, 8, 4)), ("aten.unsqueeze.default", (2, 1, 8, 4))
EXPAND, RESHAPE, VIEW = (
    ("aten.expand.default", (3, 2, 4, 8)),
    ("aten.reshape.default", (64,)),
    ("aten.view.default", (64,)),
)


@pytest.mark.parametrize(
    ("chain", "copies"),
    [
        ([RESHAPE], []),
        ([TRANSPOSE, RESHAPE], [1]),
        ([TRANSPOSE, UNSQUEEZE, RESHAPE], [2]),
        ([EXPAND, ("aten.reshape.default", (6, 4, 8))], [1]),
        ([PERMUTE, CONTIGUOUS, VIEW], [1]),
        ([PERMUTE, CONTIGUOUS, RESHAPE], [1]),
    ],
)
def test_what_was_reordered_is_copied_by_a_reshape(chain, copies):
    b = Builder()
    x = b.input("x", (2, 4, 8))
    made = []
    for target, shape in chain:
        x = view(b, target, x, shape)
        made.append(x)
    assert names(b) == {made[i] for i in copies}


def test_the_result_of_attention_is_contiguous_once_transposed_back():
    b = Builder()
    b.attention(b.input("x", (2, 4, 8)), "attn", heads=2)
    assert names(b) == frozenset()
