"""Every operator of torch's core ATen set has a rule, or a reason why not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from autoplan.capture.call import Call, TensorMeta
from autoplan.capture.canonical import DROPPED, FOLDS, out_of_place, writes
from autoplan.capture.rewrites import REWRITES
from autoplan.capture.rules import describe, family_rule
from searchspace.errors import CaptureError
from searchspace.graph import Argument, InputRef

BACKWARD = "a step of a backward pass: models have its forward"
NUMBER = "gives a number: of a shape it is known at capture, of data it is refused"
SHAPE = "gives a shape that depends on data: refused"
DECOMPOSED = "torch traces the operator that it is a part of"
DISCOVERED = "its rule is found by running it on small data"

WITHOUT_RULE = {
    "aten._adaptive_avg_pool2d_backward.default": BACKWARD,
    "aten.avg_pool2d_backward.default": BACKWARD,
    "aten.convolution_backward.default": BACKWARD,
    "aten.embedding_dense_backward.default": BACKWARD,
    "aten.max_pool2d_with_indices_backward.default": BACKWARD,
    "aten.native_group_norm_backward.default": BACKWARD,
    "aten.native_layer_norm_backward.default": BACKWARD,
    "aten._local_scalar_dense.default": NUMBER,
    "aten.sym_is_contiguous.default": NUMBER,
    "aten.sym_numel.default": NUMBER,
    "aten.sym_size.int": NUMBER,
    "aten.sym_storage_offset.default": NUMBER,
    "aten.sym_stride.int": NUMBER,
    "aten.nonzero.default": SHAPE,
    "aten._native_batch_norm_legit.no_stats": DECOMPOSED,
    "aten._native_batch_norm_legit.default": DECOMPOSED,
    "aten.resize_.default": "leaves elements undefined: refused",
    "aten._cdist_forward.default": DISCOVERED,
    "aten._fft_c2r.default": DISCOVERED,
    "aten._fft_r2c.default": DISCOVERED,
    # replicated, with a warning that names them:
    "aten._embedding_bag.default": "bags of any length lie one after another in one dimension",
    "aten._pdist_forward.default": "all pairs of rows in one dimension",
    "aten.masked_scatter.default": "which source element is taken depends on the whole mask before",
}


def core() -> Iterator[str]:
    for name in torch._C._dispatch_get_all_op_names():
        packet, _, overload = name.removeprefix("aten::").partition(".")
        operator = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
        if name.startswith("aten::") and operator is not None and torch.Tag.core in operator.tags:
            yield f"aten.{packet}.{overload or 'default'}"


def has_meaning(target: str) -> bool:
    if target in FOLDS or target in REWRITES or target in DROPPED:
        return True
    try:
        return family_rule(out_of_place(target) if writes(target) else target) is not None
    except CaptureError:  # it has no form that only computes
        return False


def test_core_operators_have_a_rule_or_a_reason() -> None:
    every = sorted(core())
    assert len(every) > 150
    missing = [target for target in every if not has_meaning(target)]
    assert set(missing) <= set(WITHOUT_RULE)
    if torch.__version__.startswith("2.13"):  # other versions may lack some
        assert set(missing) == set(WITHOUT_RULE)


@pytest.mark.parametrize(
    ("target", "args", "inputs", "outputs"),
    [
        ("aten._cdist_forward.default", (InputRef(0), InputRef(1), 2.0, None), [(4, 6, 5), (4, 7, 5)], [(4, 6, 7)]),
        ("aten._fft_r2c.default", (InputRef(0), (2,), 0, True), [(4, 6, 8)], [(4, 6, 5)]),
    ],
)
def test_rules_are_discovered(
    target: str, args: tuple[Argument, ...], inputs: list[tuple[int, ...]], outputs: list[tuple[int, ...]]
) -> None:
    complex_result = "fft" in target
    metas = tuple(TensorMeta(shape, "float64") for shape in inputs)
    results = tuple(TensorMeta(shape, "complex128" if complex_result else "float64") for shape in outputs)
    assert WITHOUT_RULE[target] == DISCOVERED
    rule = describe(Call(target, args, (), metas, results)).rule
    assert [use is not None for use in rule.outputs[0]] == [True, True, not complex_result]
