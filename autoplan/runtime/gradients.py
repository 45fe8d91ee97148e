"""Gradients on the shards: setting them, their norm over all ranks, and whether they are finite."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from autoplan.runtime.parameters import ParameterShard
from autoplan.runtime.transport import Transport


def deliver(found: Iterable[tuple[ParameterShard, Tensor]]) -> None:
    """Add each gradient to ``parameter.grad``.

    Where nothing is there yet the buffer itself becomes the gradient, unless it is a view of something
    larger or smaller, or another parameter's gradient lies in the same memory: optimizers and clipping
    change gradients in place.
    """
    taken: set[int] = set()
    for shard, gradient in found:
        parameter = shard.parameter
        if parameter.grad is not None:
            parameter.grad.add_(gradient)
            continue
        if gradient.dtype != parameter.dtype:
            gradient = gradient.to(parameter.dtype)
        storage = gradient.untyped_storage()
        where = storage.data_ptr()
        if where in taken or storage.nbytes() != gradient.nbytes or 0 in gradient.stride():  # 0: expanded
            gradient = gradient.clone(memory_format=torch.contiguous_format)
        taken.add(where)
        parameter.grad = gradient


def total_norm(shards: Iterable[ParameterShard], transport: Transport, norm_type: float) -> Tensor:
    """The norm of all gradients as one vector, every logical element counted once; equal on all ranks.

    Sums of powers are taken in float64.
    """
    locals_: list[Tensor] = []
    by_rank: dict[int, list[Tensor]] = {rank: [] for rank in transport.ranks}
    for shard in shards:
        if shard.primary and shard.parameter.grad is not None and shard.parameter.grad.numel():
            by_rank[shard.rank].append(shard.parameter.grad)
    for gradients in by_rank.values():
        locals_.append(_power_sum(gradients, norm_type, transport.device))
    total = transport.reduce(locals_, "max" if math.isinf(norm_type) else "sum")
    return total if math.isinf(norm_type) else total ** (1.0 / norm_type)


def _power_sum(gradients: Sequence[Tensor], norm_type: float, device: torch.device) -> Tensor:
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = torch.stack([norm.double() for norm in torch._foreach_norm(list(gradients), norm_type)])
    return norms.max() if math.isinf(norm_type) else (norms**norm_type).sum()


def scale(parameters: Iterable[torch.nn.Parameter], factor: Tensor) -> None:
    """Multiply all gradients by ``factor`` in place."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            by_dtype.setdefault(parameter.grad.dtype, []).append(parameter.grad)
    for dtype, gradients in by_dtype.items():
        torch._foreach_mul_(gradients, factor.to(dtype))


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether none of ``tensors`` has a NaN or an infinity."""
    flags = [torch.isfinite(tensor).all() for tensor in tensors]
    return not flags or bool(torch.stack(flags).all())
