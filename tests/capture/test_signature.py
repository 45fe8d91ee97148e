"""Calls become input tensors by name; what differs from the capture is refused."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from autoplan.capture import capture
from autoplan.capture.signature import sign
from searchspace.errors import CaptureError

A, B = torch.zeros(4, 3), torch.zeros(4, 5, dtype=torch.long)


def dims(*args: Any, batch_dims: dict[str, int | None] | None = None, **kwargs: Any) -> dict[str, int | None]:
    return {leaf.path: leaf.batch_dim for leaf in sign(args, kwargs, (), batch_dims=batch_dims).tensors}


def test_names_and_paths() -> None:
    signature = sign((A, [B, 3]), {"labels": B, "flag": True}, (A,))
    assert [(leaf.path, leaf.name) for leaf in signature.tensors] == [
        ("args.0", "x_args_0"), ("args.1.0", "x_args_1_0"), ("kwargs.labels", "x_labels"),
        ("loss_args.0", "x_loss_args_0"),
    ]  # fmt: skip
    assert signature.baked == (("args.1.1", 3), ("kwargs.flag", True))
    args, kwargs, loss_args = signature.rebuild(["a", "b", "c", "d"])
    assert (args, kwargs, loss_args) == (("a", ["b", 3]), {"labels": "c", "flag": True}, ("d",))


def test_batch_is_the_leading_extent_that_most_inputs_share() -> None:
    assert dims(A, B, torch.zeros(1, 5), torch.zeros(())) == {"args.0": 0, "args.1": 0, "args.2": None, "args.3": None}
    assert dims(torch.zeros(1, 5), ids=B, labels=B) == {"args.0": None, "kwargs.ids": 0, "kwargs.labels": 0}
    assert dims(torch.zeros(7, 2), A) == {"args.0": 0, "args.1": None}
    assert sign((A,), {}, ()).batch == 4
    assert sign((torch.zeros(()),), {}, ()).batch is None


def test_batch_dims_override() -> None:
    time_first = torch.zeros(5, 4, 3)
    assert dims(time_first, B, batch_dims={"args.0": 1}) == {"args.0": 1, "args.1": 0}
    assert dims(time_first, B, batch_dims={"args.0": -2}) == {"args.0": 1, "args.1": 0}
    assert dims([A, A], x=A, batch_dims={"args": None}) == {"args.0.0": None, "args.0.1": None, "kwargs.x": 0}
    assert dims([A, A], batch_dims={"args": None, "args.0.1": 1}) == {"args.0.0": None, "args.0.1": 1}


@pytest.mark.parametrize(
    ("batch_dims", "message"),
    [
        ({"kwargs.ids": 0}, "no input tensor at 'kwargs.ids'; the inputs are ['args.0', 'args.1']"),
        ({"args.0": 2}, "batch_dims['args.0'] = 2: args.0 has shape (4, 3)"),
        ({"args.0": 0, "args.1": 1}, "the batch has different extents: {'args.0': 4, 'args.1': 5}"),
    ],
)
def test_batch_dims_are_checked(batch_dims: dict[str, int | None], message: str) -> None:
    with pytest.raises(CaptureError, match=re.escape(message)):
        sign((A, B), {}, (), batch_dims=batch_dims)


def test_what_cannot_be_an_input() -> None:
    class Box:
        def __init__(self) -> None:
            self.content = A

    for value, message in (
        (A.to_sparse(), "expected a dense tensor, got layout torch.sparse_coo"),
        (Box(), "Box holds tensors but is no container"),
        (DynamicCache(), "DynamicCache is a cache of past keys and values; leave it out"),
    ):
        with pytest.raises(CaptureError, match=message):
            sign((value,), {}, ())
    with pytest.raises(CaptureError, match=r"for one tensor x write \(x,\)"):
        sign(A, {}, ())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, *, pair: Any = None, scale: float = 1.0) -> torch.Tensor:
        y = self.lin(x) * scale
        return y if pair is None else y + pair["a"]


def test_flatten_call_checks_structure_shape_dtype_and_values() -> None:
    captured = capture(Model(), (A,), {"pair": {"a": A}, "scale": 2.0}, mode="inference")
    good: dict[str, Any] = {"pair": {"a": A}, "scale": 2.0}
    assert list(captured.flatten_call((A,), good)) == ["x_args_0", "x_pair_a"]
    assert captured.batch_of((A,), good) == 4
    larger = torch.zeros(6, 3)
    assert captured.flatten_call((larger,), {**good, "pair": {"a": larger}}, batch=6)["x_args_0"].shape == (6, 3)
    for args, kwargs, message in (
        ((larger,), good, "args.0: expected shape (4, 3), got (6, 3): a batch of 6 (dimension 0) where 4 was captured"),
        ((B,), good, "args.0: expected shape (4, 3), got (4, 5); a model is captured for one shape"),
        ((A.double(),), good, "args.0: expected torch.float32, got torch.float64"),
        ((None,), good, "args.0: captured as a tensor of shape (4, 3), got None"),
        ((A,), {**good, "scale": 3.0}, "kwargs.scale: 2.0 was baked in at capture, got 3.0"),
        ((A,), {**good, "scale": 2}, "kwargs.scale: 2.0 was baked in at capture, got 2"),
        (
            (A,),
            {"pair": [A], "scale": 2.0},
            "missing kwargs.pair.a; not expected kwargs.pair.0 (a tensor of shape (4, 3))",
        ),
        (
            (A, B),
            good,
            "not expected args.1 (a tensor of shape (4, 5)). Expected are args.0 (a tensor of shape (4, 3)), ",
        ),
        ((), {**good, "x": A}, "differs from the captured one: missing args.0; not expected kwargs.x"),
        ((A,), {"pair": {"a": A}}, "missing kwargs.scale. Expected are"),
        ((A,), {**good, "pear": 1}, "not expected kwargs.pear (1)"),
    ):
        with pytest.raises(CaptureError, match=re.escape(message)):
            captured.flatten_call(args, kwargs)
    with pytest.raises(CaptureError, match="disagree about the extent of the batch"):
        captured.batch_of((larger,), good)


@dataclass
class Result:
    logits: torch.Tensor
    extra: dict[str, Any]


def test_outputs_keep_structure_order_none_and_constants() -> None:
    class Outputs(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            cache = DynamicCache()
            cache.update(x[None, None], x[None, None], 0)
            extra = {"z": [x + 1, (None, 7)], "a": x, "cache": cache, "name": "n"}
            return Result(logits=x * 2, extra=extra), x.sum()

    captured = capture(Outputs(), (A,), mode="inference")
    assert len(captured.graph.outputs) == 4
    result, total = captured.unflatten_outputs(["l", "z", "a", "s"])
    assert result == Result("l", {"z": ["z", (None, 7)], "a": "a", "cache": None, "name": "n"})
    assert list(result.extra) == ["z", "a", "cache", "name"]
    assert total == "s"
    with pytest.raises(CaptureError, match="expected 4 output tensors, got 2"):
        captured.unflatten_outputs([A, A])


def test_output_object_with_tensors_is_refused() -> None:
    class Box:
        def __init__(self, content: torch.Tensor) -> None:
            self.content = content

    class Boxes(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return {"box": Box(x)}

    with pytest.raises(CaptureError, match=r"output 'box': Box holds tensors but is no container"):
        capture(Boxes(), (A,), mode="inference")


def test_unknown_names_are_refused() -> None:
    captured = capture(Model(), (A,), mode="inference")
    with pytest.raises(CaptureError, match="Model has no parameter 'nope'"):
        captured.parameter("nope")
    with pytest.raises(CaptureError, match=r"Model has no buffer 'lin\.weight'"):
        captured.buffer("lin.weight")
