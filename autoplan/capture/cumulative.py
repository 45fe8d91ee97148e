"""Batch norm with ``momentum=None``: its average over all batches so far, without reading a number from a tensor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch.nn.modules.batchnorm import _BatchNorm


@contextmanager
def cumulative_averages() -> Iterator[None]:
    """While active, the running statistics of such a batch norm are computed by tensor operators.

    Torch's forward has the factor ``1 / float(num_batches_tracked)``, which cannot be traced.
    """
    original = _BatchNorm.forward

    def forward(self: _BatchNorm, x: torch.Tensor) -> torch.Tensor:
        mean, variance, count = self.running_mean, self.running_var, self.num_batches_tracked
        if self.momentum is not None or not self.training or mean is None or variance is None or count is None:
            return original(self, x)
        self._check_input_dim(x)
        count.add_(1)
        now = torch.zeros_like(mean), torch.zeros_like(variance)
        y = F.batch_norm(x, *now, self.weight, self.bias, True, 1.0, self.eps)  # momentum 1: those of this batch
        with torch.no_grad():
            for running, statistic in zip((mean, variance), now, strict=True):
                running.add_((statistic - running) / count)
        return y

    _BatchNorm.forward = forward  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        _BatchNorm.forward = original  # type: ignore[method-assign]
