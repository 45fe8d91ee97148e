"""Every family's rule is what it should be, and is verified by running the operator whole and split."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

from autoplan.capture import rules
from autoplan.capture.call import Call, TensorMeta
from autoplan.capture.rules import describe
from autoplan.capture.verification import make_call, verify_rule
from autoplan.operators import names
from searchspace.errors import AutoplanWarning, RuleError
from searchspace.graph import InputRef, LocalSize, Symbol, TensorDim
from searchspace.notation import parse_rule
from tests.capture.operator_cases import CASES, Case, I, T


@pytest.mark.parametrize("case", CASES, ids=[f"{i}-{case.target}" for i, case in enumerate(CASES)])
def test_rule_is_known_and_exact(case: Case) -> None:
    """Parts of one element, uneven parts, forward, backward, partial sums."""
    torch.manual_seed(0)
    args = case.args()
    call, _ = make_call(case.target, args, case.kwargs)
    rule = describe(call).rule
    assert rule.text == case.text
    assert tuple(label for label in rule.choices if label.startswith("+")) == case.passing
    assert parse_rule(rule.text, [t.shape for t in call.inputs + call.outputs], rule.linear).choices == rule.choices
    verified = verify_rule(case.target, args, parts=(2, 3, 4), kwargs=case.kwargs)
    assert verified == tuple(label for label in rule.choices if label)


def test_every_local_operator_is_tried() -> None:
    assert set(names()) <= {case.target for case in CASES}


def meta(*shape: int, dtype: str = "float32", grad: bool = True) -> TensorMeta:
    return TensorMeta(shape, dtype, grad)


def linear_call(grad_x: bool, grad_w: bool) -> Call:
    x, w = meta(2, 8, 16, grad=grad_x), meta(32, 16, grad=grad_w)
    return Call("aten.linear.default", (InputRef(0), InputRef(1)), (), (x, w), (meta(2, 8, 32, grad=grad_x or grad_w),))


@pytest.mark.parametrize(
    ("grad_x", "grad_w", "saved"), [(True, True, (0, 1)), (False, True, (0,)), (True, False, (1,)), (False, False, ())]
)
def test_linear_keeps_what_the_other_side_needs(grad_x: bool, grad_w: bool, saved: tuple[int, ...]) -> None:
    traits = describe(linear_call(grad_x, grad_w))
    assert traits.saved_inputs == saved
    assert traits.flops == 2 * (2 * 8) * 16 * 32
    assert traits.family == "matmul"


@pytest.mark.parametrize(
    ("target", "args", "inputs", "outputs", "extra"),
    [
        ("aten.relu.default", [T(4, 5)], (), (0,), 0),
        ("aten.gelu.default", [T(4, 5)], (0,), (), 0),
        ("aten.silu.default", [T(4, 5)], (0,), (), 0),
        ("aten.tanh.default", [T(4, 5)], (), (0,), 0),
        ("aten.add.Tensor", [T(4, 5), T(4, 5)], (), (), 0),
        ("aten.mul.Tensor", [T(4, 5), T(4, 5)], (0, 1), (), 0),
        ("aten.mul.Tensor", [T(4, 5), T(4, 5, grad=False)], (1,), (), 0),
        ("aten.mul.Tensor", [T(4, 5), 2.0], (), (), 0),
        ("aten.softmax.int", [T(4, 5), -1], (), (0,), 0),
        ("aten.layer_norm.default", [T(4, 6), [6], T(6), T(6)], (0, 1), (), 4 * 2 * 8),
        ("aten.sum.default", [T(4, 5)], (), (), 0),
        ("aten.reshape.default", [T(4, 5), (20,)], (), (), 0),
        ("aten.embedding.default", [T(9, 6), I(9, 4)], (1,), (), 0),
        ("autoplan.dropout.default", [T(4, 5), 0.5, 7, [0, 0]], (), (), 20),
        ("aten.scaled_dot_product_attention.default", [T(2, 3, 5, 8)] * 3, (0, 1, 2), (0,), 2 * 3 * 5 * 4),
    ],
)
def test_saved_for_backward(
    target: str, args: list[object], inputs: tuple[int, ...], outputs: tuple[int, ...], extra: int
) -> None:
    traits = describe(make_call(target, args)[0])
    assert (traits.saved_inputs, traits.saved_outputs, traits.saved_extra_bytes) == (inputs, outputs, extra)


def test_nothing_is_saved_without_gradient() -> None:
    traits = describe(make_call("aten.gelu.default", [T(4, 5, grad=False)])[0])
    assert (traits.saved_inputs, traits.saved_outputs) == ((), ())


def test_causal_attention_costs_half() -> None:
    q = [T(2, 3, 8, 4)] * 3
    full = describe(make_call("aten.scaled_dot_product_attention.default", q)[0]).flops
    assert full == 2 * (2 * 3 * 8 * 8) * (4 + 4)
    causal = make_call("aten.scaled_dot_product_attention.default", q, {"is_causal": True})[0]
    assert describe(causal).flops == full / 2


def test_sizes_follow_the_shard_where_it_can_be_split() -> None:
    traits = describe(make_call("aten.reshape.default", [T(4, 40), (4, 5, 8)])[0])
    assert traits.args == (
        InputRef(0),
        (LocalSize(TensorDim(0, 0, output=True)), LocalSize(TensorDim(0, 1, output=True)), 8),
    )


def test_keyword_sizes_and_devices_stay() -> None:
    call = Call(
        "aten.full.default", ((4, 1), 2.0), (("device", Symbol("device")), ("dtype", Symbol("torch.float32"))), (),
        (meta(4, 1, grad=False),),
    )  # fmt: skip
    traits = describe(call)
    assert traits.args == ((LocalSize(TensorDim(0, 0, output=True)), 1), 2.0)
    assert traits.kwargs == call.kwargs


def test_random_operators_say_so() -> None:
    assert describe(make_call("autoplan.dropout.default", [T(4, 5), 0.5, 7, [0, 0]])[0]).random
    assert describe(make_call("aten.randn.default", [[4, 5]])[0]).random
    assert describe(make_call("aten.rrelu.default", [T(4, 5), 0.1, 0.3, True])[0]).random
    assert describe(make_call("aten.alpha_dropout.default", [T(4, 5), 0.1, True])[0]).random
    assert not describe(make_call("aten.relu.default", [T(4, 5)])[0]).random


def test_unknown_operator_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "_warned", {})
    describe.cache_clear()
    calls = [make_call("aten.linalg_matrix_exp.default", [T(n, n, grad=False)])[0] for n in (6, 7)]
    with pytest.warns(AutoplanWarning, match=r"linalg_matrix_exp\.default has no dimension rule") as caught:
        traits = [describe(call) for call in calls]
    assert len(caught) == 1
    assert traits[0].rule.identifiers == ()
    assert traits[0].family == "composite"


def test_discovery_keeps_extents_apart() -> None:
    """Large shapes are tried on small stand-ins, equal extents staying equal."""
    x, y = meta(512, 96, 768), meta(512, 384, 768)
    call = Call("aten.cdist.default", (InputRef(0), InputRef(1)), (), (x, y), (meta(512, 96, 384),))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert describe(call).rule.text == "d0 d1 768, d0 d2 768 -> d0 d1 d2"


def test_wrong_rules_are_refused() -> None:
    x, w = T(4, 6), T(5, 6)

    def linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x @ w.T

    shapes = [(4, 6), (5, 6)]
    assert verify_rule(linear, [x, w], parse_rule("a k+, n k+ -> a n", shapes, ((0,),))) == ("a", "k", "n", "+0")
    with pytest.raises(RuleError, match=r"linear: rule 'a k, n k\^ -> a n'|marked"):
        verify_rule(linear, [x, w], parse_rule("a k, n k^ -> a n", shapes))
    with pytest.raises(RuleError, match=r"rule 'a k\+max, n k -> a n' fails along 'k' in 2 parts: output 0 differs by"):
        verify_rule(linear, [x, w], parse_rule("a k+max, n k -> a n", shapes))
    with pytest.raises(RuleError, match=r"fails along '\+0' in 2 parts: output 0 differs by"):
        verify_rule(lambda x, w: x @ w.T + 1e-6, [x, w], parse_rule("a k^, n k^ -> a n", shapes, ((0,),)))


def test_wrong_gradients_are_refused() -> None:
    """A maximum over parts is right forward, and wrong backward."""
    rule = parse_rule("a b+max -> a", [(4, 6)])
    x = T(4, 6)
    assert verify_rule(lambda x: x.amax(1), [x.detach()], rule) == ("a", "b")
    with pytest.raises(RuleError, match=r"fails along 'b' in 2 parts: the gradient of input 0 of part 0 differs by"):
        verify_rule(lambda x: x.amax(1), [x], rule)


def test_rules_fit_the_given_tensors() -> None:
    rule = parse_rule("a b -> a b", [(4, 6)])
    with pytest.raises(RuleError, match="describes 2 tensors, the operator has 3"):
        verify_rule(torch.add, [T(4, 6), T(4, 6)], rule)


def test_a_function_needs_a_rule() -> None:
    with pytest.raises(RuleError, match="a rule is needed to verify the function"):
        verify_rule(torch.add, [T(4), T(4)])


def test_one_rule_for_each_family() -> None:
    """No file of rules grows into a list of operators."""
    for path in Path(rules.__file__).parent.glob("*.py"):
        assert len(path.read_text().splitlines()) < 400, path.name
