"""In-place operators and writes through views give what eager gives, gradients included."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autoplan.capture import capture
from autoplan.capture.canonical import writes
from tests.capture.interpreter import run_captured
from tests.capture.test_front import assert_same_as_eager

T = torch.Tensor
pytestmark = pytest.mark.filterwarnings("ignore::searchspace.errors.AutoplanWarning")


def slices(x: T) -> T:
    y = x.clone()
    y[1:3, ::2] = x[0:2, 1::2] * 2
    y[:, 0] += 1
    y[-1] = 0
    return y


def views_see_each_other(x: T) -> T:
    y = x * 1
    flat = y.view(-1)
    last = y.transpose(0, 1)[2]
    flat[3:9].mul_(3)
    y.add_(1)
    last.neg_()
    return y.sum() * flat[::2].sum() + (last * y.t()[2]).sum() + flat


def pieces(x: T) -> T:
    y = x.detach().exp()  # autograd refuses to write to one of several views
    a, b, c = y.split([1, 2, 1])
    b.mul_(a)
    c.copy_(b[:1])
    first, *_ = y.unbind(1)
    first.add_(x.detach()[0, 0])
    left, right = y.chunk(2, -1)
    right.sub_(left)
    return y * x


def masks(x: T) -> T:
    y = x.sin()
    y[y > 0.5] = 0.25
    y.masked_fill_(x < -0.5, 2.0)
    y.index_add_(0, torch.tensor([0, 0, 3]), x[:3])
    y.scatter_(1, torch.tensor([[1], [0], [2], [3]]), 7.0)
    y.index_put_((torch.tensor([1, 1]),), x[:2], accumulate=True)
    return y


def fills(x: T) -> T:
    y = torch.empty(4, 6, dtype=x.dtype)
    y[:, :3].fill_(2.0)
    y[:, 3:] = x[:, :3]
    y.narrow(0, 1, 2).zero_()
    y.diagonal().add_(x.diagonal())
    z = torch.zeros(6, 4, dtype=x.dtype)
    z.permute(1, 0).copy_(y)
    z.unsqueeze(0).squeeze(0).mul_(2)
    return z


def conversions(x: T) -> T:
    y = x.to(torch.float64).contiguous().reshape(6, 4)
    y[0] = 5
    mask = torch.ones(4, 6, dtype=torch.bool)
    mask[0] &= x[0] > 0
    mask.logical_not_()
    count = torch.zeros(4, dtype=torch.long)
    count += mask.sum(1)
    return x.flatten() + y.flatten() * count.repeat_interleave(6)


def activations(x: T) -> T:
    y = F.relu_(x * 2)
    y = y.add(0).sin_().mul_(x).pow(2)
    with torch.no_grad():
        scale = y.abs().amax()
        scale.add_(1).sqrt_().pow_(2.0)
    return y / scale


FUNCTIONS = [slices, views_see_each_other, pieces, masks, fills, conversions, activations]


class Wrapped(nn.Module):
    def __init__(self, function: Callable[[T], T]) -> None:
        super().__init__()
        self.lin, self.function = nn.Linear(6, 6), function

    def forward(self, x: T) -> T:
        return self.function(self.lin(x))


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_writes_equal_eager(function: Callable[[T], T]) -> None:
    torch.manual_seed(0)
    model, args = Wrapped(function).double(), (torch.randn(4, 6).double(),)

    def loss(y: T) -> T:
        return (y * torch.arange(y.numel()).view_as(y)).sum()

    captured = capture(model, args, loss_fn=loss)
    assert_same_as_eager(captured, model, args, {}, loss)
    assert not any(writes(op.target) for op in captured.graph.operators)


def test_buffers_are_written_through_views_and_aliases() -> None:
    class State(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(3, 3)
            self.register_buffer("ring", torch.zeros(4, 3))
            self.register_buffer("flat", torch.arange(6.0))

        def forward(self, x: T) -> T:
            y = self.lin(x)
            with torch.no_grad():
                self.ring[1:] = self.ring[:-1].clone() + 1
                self.ring[0] = y.mean(0)
                self.flat.view(2, 3)[1].mul_(2)
            return (y @ self.ring.t()).sum() * self.flat.sum()

    torch.manual_seed(0)
    model, args = State().double(), (torch.randn(5, 3).double(),)
    captured = capture(model, args)
    assert_same_as_eager(captured, model, args, {})
    assert [name for name, _ in captured.graph.buffer_updates] == ["b_ring", "b_flat"]


def test_a_written_input_is_not_the_callers_affair() -> None:
    class Inplace(nn.Module):
        def forward(self, x: T) -> T:
            return x.mul_(2) + 1

    x = torch.ones(3)
    captured = capture(Inplace(), (x,), mode="inference")
    output = captured.unflatten_outputs(run_captured(captured, (x,)))
    assert torch.equal(output, torch.full((3,), 3.0))
    assert torch.equal(x, torch.ones(3))
