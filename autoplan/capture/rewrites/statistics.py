"""Means and normalisations whose extents, counts or groups follow the shard."""

from __future__ import annotations

from typing import Any

from autoplan.capture.call import Emit, Handle, Rewrite
from searchspace.graph import Symbol


def mean(emit: Emit, x: Handle, dim: Any = None, keepdim: bool = False, *, dtype: Symbol | None = None) -> Any:
    """A sum over parts, divided by the whole extents."""
    rank = len(x.shape)
    if not rank or "float" not in x.dtype:
        return NotImplemented
    if dtype is not None and dtype.name != f"torch.{x.dtype}":
        x = emit("aten.to.dtype", x, dtype)
    given = (dim,) if isinstance(dim, int) else tuple(dim or ())
    dims = tuple(d % rank for d in given) or tuple(range(rank))
    return emit("autoplan.mean.default", x, dims, tuple(x.shape[d] for d in dims), keepdim)


def mean_of_all(emit: Emit, x: Handle, *, dtype: Symbol | None = None) -> Any:
    return mean(emit, x, dtype=dtype)


def batch_norm(
    emit: Emit,
    x: Handle,
    weight: Handle | None,
    bias: Handle | None,
    running_mean: Handle | None,
    running_variance: Handle | None,
    training: bool,
    momentum: float,
    eps: float,
    *rest: Any,
) -> Any:
    """Batch statistics as sums over parts; returns the result, and new running statistics where there are any."""
    if not training:
        return NotImplemented
    sizes = tuple(extent for d, extent in enumerate(x.shape) if d != 1)
    average = emit("autoplan.channel_mean.default", x, sizes)
    variance = emit("autoplan.channel_variance.default", x, average, sizes)
    y = emit("autoplan.channel_normalise.default", x, average, variance, weight, bias, eps, sizes)
    if running_mean is None or running_variance is None:
        return y
    return (
        y,
        emit("autoplan.running_average.default", running_mean, average, momentum),
        emit("autoplan.running_average.default", running_variance, variance, momentum),
    )


def group_norm(
    emit: Emit,
    x: Handle,
    groups: int,
    weight: Handle | None = None,
    bias: Handle | None = None,
    eps: float = 1e-5,
    *rest: Any,
) -> Any:
    """By the size of a group, so that channels can be split between groups."""
    return emit("autoplan.group_norm.default", x, x.shape[1] // groups, weight, bias, eps)


def convolution(
    emit: Emit,
    x: Handle,
    weight: Handle,
    bias: Handle | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    """Grouped convolutions take the number of groups from the shard."""
    spatial = len(weight.shape) - 2
    if groups == 1 or len(x.shape) != spatial + 2:
        return NotImplemented

    def each(value: Any) -> tuple[int, ...]:
        numbers = (value,) if isinstance(value, int) else tuple(value)
        return numbers * spatial if len(numbers) == 1 else numbers

    return emit("autoplan.grouped_convolution.default", x, weight, bias, each(stride), each(padding), each(dilation))


REWRITES: dict[str, Rewrite] = {
    "aten.mean.default": mean_of_all,
    "aten.mean.dim": mean,
    "aten.batch_norm.default": batch_norm,
    "aten.group_norm.default": group_norm,
    "aten.conv1d.default": convolution,
    "aten.conv2d.default": convolution,
    "aten.conv3d.default": convolution,
}
