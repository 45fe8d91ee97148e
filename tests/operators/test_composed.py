"""Losses and batch normalisation, composed by hand from uneven parts, equal torch's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autoplan.operators.embedding import embedding
from autoplan.operators.loss import class_maximum, count_valid, exp_sum_and_pick, token_loss
from autoplan.operators.normalisation import channel_mean, channel_normalise, channel_variance, running_average
from autoplan.operators.reduction import mean

f64 = torch.float64


@pytest.mark.parametrize("classes", [[23], [9, 7, 7], [6, 6, 6, 5], [22, 1]])
@pytest.mark.parametrize("tokens", [[7], [4, 3], [1, 5, 1]])
def test_cross_entropy_over_tokens_and_classes(tokens: list[int], classes: list[int]) -> None:
    """Parts with different numbers of ignored tokens, one with ignored tokens only."""
    torch.manual_seed(0)
    logits = (torch.randn(7, 23, dtype=f64) * 5).requires_grad_()
    target = torch.randint(0, 23, (7,))
    target[0] = target[5] = -100
    summands: list[Tensor] = []
    valid: list[Tensor] = []
    for rows, labels in zip(logits.split(tokens), target.split(tokens), strict=True):
        parts = rows.split(classes, 1)
        maximum = torch.stack([class_maximum(part, 1) for part in parts]).amax(0)
        starts = [sum(classes[:i]) for i in range(len(classes))]
        found = [exp_sum_and_pick(p, maximum, labels, s, 1) for p, s in zip(parts, starts, strict=True)]
        exp_sum, picked = (torch.stack(values).sum(0) for values in zip(*found, strict=True))
        summands.append(token_loss(exp_sum, maximum, picked, labels, -100).sum())
        valid.append(count_valid(labels, -100))
    loss = torch.stack(summands).sum() / torch.stack(valid).sum()
    expected = F.cross_entropy(logits, target)
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0)
    (ours,), (theirs,) = torch.autograd.grad(loss, logits), torch.autograd.grad(expected, logits)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-15)


def test_cross_entropy_of_large_logits_does_not_overflow() -> None:
    logits = torch.tensor([[1000.0, 0.0, -1000.0]], dtype=f64)
    target = torch.tensor([1])
    exp_sum, picked = exp_sum_and_pick(logits, class_maximum(logits, 1), target, 0, 1)
    assert token_loss(exp_sum, class_maximum(logits, 1), picked, target, -100).item() == 1000.0


def test_cross_entropy_with_forbidden_classes() -> None:
    """Logits of minus infinity, also where an ignored token or another part's target happens to look."""
    logits = torch.randn(4, 6, dtype=f64)
    logits[:, 0] = logits[:, 3] = -torch.inf
    logits.requires_grad_()
    target = torch.tensor([-100, 1, 2, 5])
    parts = logits.split([3, 3], 1)
    maximum = class_maximum(logits, 1)
    found = [exp_sum_and_pick(part, maximum, target, start, 1) for part, start in zip(parts, (0, 3), strict=True)]
    exp_sum, picked = (torch.stack(values).sum(0) for values in zip(*found, strict=True))
    loss = token_loss(exp_sum, maximum, picked, target, -100).sum() / count_valid(target, -100)
    expected = F.cross_entropy(logits, target)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, logits), torch.autograd.grad(expected, logits))


@pytest.mark.parametrize("batch", [[7], [4, 3], [1, 6]])
def test_batch_norm_over_parts_of_the_batch(batch: list[int]) -> None:
    torch.manual_seed(0)
    x = (torch.randn(7, 5, 3, dtype=f64) * 3 + 100).requires_grad_()
    weight, bias = torch.rand(5, dtype=f64, requires_grad=True), torch.rand(5, dtype=f64, requires_grad=True)
    parts = x.split(batch)
    average = torch.stack([channel_mean(part, [7, 3]) for part in parts]).sum(0)
    variance = torch.stack([channel_variance(part, average, [7, 3]) for part in parts]).sum(0)
    y = torch.cat([channel_normalise(part, average, variance, weight, bias, 1e-5, [7, 3]) for part in parts])
    means, variances = torch.zeros(5, dtype=f64), torch.ones(5, dtype=f64)
    expected = F.batch_norm(x, means, variances, weight, bias, True, 0.1)
    torch.testing.assert_close(y, expected, rtol=1e-11, atol=1e-11)
    gradient = torch.randn_like(y)
    ours = torch.autograd.grad(y, [x, weight, bias], gradient)
    torch.testing.assert_close(ours, torch.autograd.grad(expected, [x, weight, bias], gradient), rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(running_average(torch.zeros(5, dtype=f64), average, 0.1), means)
    torch.testing.assert_close(running_average(torch.ones(5, dtype=f64), variance, 0.1), variances)


@pytest.mark.parametrize("padding", [-1, 6])
@pytest.mark.parametrize("rows", [[9], [3, 3, 3], [6, 1, 2]])
def test_embedding_over_parts_of_the_table(rows: list[int], padding: int) -> None:
    torch.manual_seed(0)
    table = torch.randn(9, 4, dtype=f64, requires_grad=True)
    indices = torch.tensor([[0, 6, 8], [3, 6, 6]])
    starts = [sum(rows[:i]) for i in range(len(rows))]
    found = sum(embedding(part, indices, s, 9, padding) for part, s in zip(table.split(rows), starts, strict=True))
    expected = F.embedding(indices, table, None if padding < 0 else padding)
    assert torch.equal(found, expected)
    gradient = torch.randn_like(expected)
    ours, theirs = (torch.autograd.grad(value, table, gradient)[0] for value in (found, expected))
    torch.testing.assert_close(ours, theirs)


def test_mean_over_parts() -> None:
    x = torch.randn(7, 5, dtype=f64, requires_grad=True)
    parts = [mean(part, [0, 1], [7, 5]) for part in x.split([4, 3])]
    torch.testing.assert_close(sum(parts), x.mean())
    assert mean(x, [0], [7], True).shape == (1, 5)


def test_mean_of_half_precision_is_summed_in_float32() -> None:
    x = torch.full((4096,), 1.0).bfloat16()
    assert sum(mean(part, [0], [4096]) for part in x.split([2048, 2048])).item() == 1.0
