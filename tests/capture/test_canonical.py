"""Folds: each result equals the call it replaces, and equal things are written in one way."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autoplan.capture import capture
from autoplan.capture.canonical import out_of_place
from searchspace.errors import CaptureError
from tests.capture.interpreter import run_captured

T = torch.Tensor

FOLDED: list[tuple[Callable[[T], T], list[str]]] = [
    (lambda x: x.clone().contiguous().to(torch.float32).detach().to("cpu"), []),
    (lambda x: x.view(4, 6).reshape(4, 6).expand(-1, 6).view_as(x), []),
    (lambda x: F.dropout(x, 0.0) + F.dropout(x, 0.5, training=False), ["add"]),
    (lambda x: x.t().contiguous(), ["t", "contiguous"]),
    (lambda x: x.flatten(), ["reshape"]),
    (lambda x: x.view(-1, 3), ["reshape"]),
    (lambda x: x.unflatten(1, (2, -1)), ["reshape"]),
    (lambda x: x.type_as(x.sum().double()), ["to"]),
    (lambda x: x.double(), ["to"]),
    (lambda x: x.new_zeros(3), ["full"]),
    (lambda x: torch.ones_like(x, dtype=torch.long), ["full"]),
    (lambda x: torch.full_like(x, 2.5) + x.new_full((6,), 2), ["full", "full", "add"]),
    (lambda x: torch.tensor(3.0) * x, ["full", "mul"]),
    (lambda x: torch.zeros(2, 2).fill_(4), ["full"]),
    (lambda x: x[:1].expand_as(x), ["slice", "expand"]),
]


@pytest.mark.parametrize(("function", "kinds"), FOLDED)
def test_folded_calls(function: Callable[[T], T], kinds: list[str]) -> None:
    class Model(nn.Module):
        def forward(self, x: T) -> T:
            return function(x)

    x = torch.randn(4, 6)
    captured = capture(Model(), (x,), mode="inference")
    assert [op.target.split(".")[1] for op in captured.graph.operators] == kinds
    output = captured.unflatten_outputs(run_captured(captured, (x,)))
    assert torch.equal(output, function(x)) and output.dtype == function(x).dtype


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("aten.add_.Tensor", "aten.add.Tensor"),
        ("aten.pow_.Scalar", "aten.pow.Tensor_Scalar"),
        ("aten.__iand__.Tensor", "aten.__and__.Tensor"),
        ("aten.index_put_.default", "aten.index_put.default"),
        ("aten.bernoulli_.float", "aten.bernoulli.p"),
        ("aten.normal_.default", "aten.normal_functional.default"),
        ("aten.masked_fill_.Scalar", "aten.masked_fill.Scalar"),
        ("aten.div.out", "aten.div.Tensor"),
    ],
)
def test_in_place_operators_have_out_of_place_forms(target: str, expected: str) -> None:
    assert out_of_place(target) == expected


@pytest.mark.parametrize("target", ["aten.topk.values", "aten.set_.source_Tensor", "aten._foreach_add_.Scalar"])
def test_other_writes_are_refused_by_name(target: str) -> None:
    with pytest.raises(CaptureError, match=f"in-place operator {target} has no out-of-place form"):
        out_of_place(target)
