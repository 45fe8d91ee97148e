"""Delivery of gradients: no two parameters share memory, nothing is copied without need."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autoplan.runtime import gradients
from autoplan.runtime.in_process import InProcess
from autoplan.runtime.parameters import ParameterShard


def shard(
    shape: tuple[int, ...], rank: int = 0, primary: bool = True, dtype: torch.dtype = torch.float32
) -> ParameterShard:
    region = tuple((0, size) for size in shape)
    return ParameterShard("p", "p", (), shape, rank, region, primary, nn.Parameter(torch.zeros(shape, dtype=dtype)))


def test_the_buffer_becomes_the_gradient() -> None:
    one, value = shard((2, 3)), torch.ones(2, 3)
    gradients.deliver([(one, value)])
    assert one.parameter.grad is not None and one.parameter.grad.data_ptr() == value.data_ptr()
    gradients.deliver([(one, torch.ones(2, 3))])
    assert one.parameter.grad.eq(2).all()


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (lambda x: x, lambda x: x),
        (lambda x: x, lambda x: x.view(3, 2).view(2, 3)),
        (lambda x: x[:1].expand(2, 3), lambda x: x[1:].expand(2, 3)),
        (lambda x: x.flatten()[:1].expand(2, 3), lambda x: torch.ones(2, 3)),
    ],
)
def test_shared_memory_is_taken_apart(first, second) -> None:
    """Scaling one gradient in place must not change another, nor itself twice."""
    buffer = torch.ones(2, 3)
    a, b = shard((2, 3)), shard((2, 3))
    gradients.deliver([(a, first(buffer)), (b, second(buffer))])
    assert a.parameter.grad is not None and b.parameter.grad is not None
    a.parameter.grad.mul_(2)
    assert a.parameter.grad.eq(2).all() and b.parameter.grad.eq(1).all()


def test_dtype_of_the_parameter() -> None:
    one = shard((4,), dtype=torch.float32)
    gradients.deliver([(one, torch.ones(4, dtype=torch.bfloat16))])
    assert one.parameter.grad is not None and one.parameter.grad.dtype == torch.float32


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_norm_over_ranks_counts_primaries(norm_type: float) -> None:
    values = [torch.randn(5, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    shards = [shard((5,), 0), shard((5,), 0), shard((5,), 1), shard((5,), 1, primary=False)]
    for one, value in zip(shards, [*values, values[0]], strict=True):
        one.parameter.grad = value.clone()
    want = torch.linalg.vector_norm(torch.cat(values).double(), norm_type)
    found = gradients.total_norm(shards, InProcess(2), norm_type)
    torch.testing.assert_close(found, want, rtol=1e-6, atol=0)
    gradients.scale([s.parameter for s in shards], torch.tensor(0.5, dtype=torch.float64))
    torch.testing.assert_close(gradients.total_norm(shards, InProcess(2), norm_type), want / 2, rtol=1e-6, atol=0)


def test_norm_without_gradients_is_zero() -> None:
    assert gradients.total_norm([shard((3,))], InProcess(1), 2.0).item() == 0
    assert gradients.total_norm([], InProcess(2), float("inf")).item() == 0


def test_finite() -> None:
    def values(x: float) -> list[Tensor]:
        return [torch.ones(2), torch.tensor([1.0, x])]

    assert gradients.all_finite([]) and gradients.all_finite(values(3e38))
    assert not gradients.all_finite(values(float("nan"))) and not gradients.all_finite(values(float("-inf")))
