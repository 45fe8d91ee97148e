"""Batch norm with a cumulative average of its statistics."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import autoplan
from autoplan.capture import capture
from tests.capture.test_front import assert_same_as_eager


def cube(y: torch.Tensor) -> torch.Tensor:
    return y.pow(3).mean()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 1, bias=False), nn.BatchNorm2d(4, momentum=None)).double()


@pytest.mark.parametrize("batches", [0, 2])
def test_cumulative_average_is_exact(batches: int) -> None:
    made, x = model(), (torch.randn(4, 3, 2, 2).double(),)
    for _ in range(batches):  # the factor is 1 / (number of batches so far), not that of the capture
        made(torch.randn(4, 3, 2, 2).double())
    state = copy.deepcopy(made.state_dict())
    assert_same_as_eager(capture(made, x, loss_fn=cube), made, x, {}, cube)
    made.load_state_dict(state)
    comparison = autoplan.verify(made, x, loss_fn=cube, ranks=2, steps=3)
    assert comparison.agrees, comparison


def test_torch_is_left_as_it_was() -> None:
    forward = nn.BatchNorm2d.forward
    capture(model(), (torch.randn(4, 3, 2, 2).double(),), loss_fn=cube)
    assert nn.BatchNorm2d.forward is forward
