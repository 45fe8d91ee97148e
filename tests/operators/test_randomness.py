"""Random numbers depend on the place in the whole tensor, the operator, the step and the seed, and on nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from autoplan.operators.randomness import bernoulli, current_step, dropout, keep_mask, normal, set_step, uniform

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def first_step() -> Iterator[None]:
    before = current_step()
    set_step(0, 0)
    yield
    set_step(*before)


@pytest.mark.parametrize("shape", [(13,), (7, 13), (3, 5, 6)])
def test_a_shard_draws_its_block_of_the_whole_mask(shape: tuple[int, ...]) -> None:
    whole = keep_mask(0.4, 7, (0,) * len(shape), shape, CPU)
    assert 0 < whole.sum() < whole.numel()
    for dim, extent in enumerate(shape):
        for start in range(extent):
            for stop in range(start + 1, extent + 1):
                starts = tuple(start if d == dim else 0 for d in range(len(shape)))
                block = tuple(stop - start if d == dim else e for d, e in enumerate(shape))
                assert torch.equal(keep_mask(0.4, 7, starts, block, CPU), whole.narrow(dim, start, stop - start))


def test_operators_steps_and_seeds_draw_apart() -> None:
    def draw(operator: int, seed: int, step: int) -> torch.Tensor:
        set_step(seed, step)
        return keep_mask(0.5, operator, (0, 0), (64, 64), CPU)

    first = draw(1, 0, 0)
    assert torch.equal(first, draw(1, 0, 0))
    for other in (draw(2, 0, 0), draw(1, 1, 0), draw(1, 0, 1)):
        assert 0.45 < (first == other).double().mean() < 0.55


@pytest.mark.parametrize("p", [0.1, 0.25, 0.5, 0.9])
def test_keep_rate_is_within_five_sigma(p: float) -> None:
    count = 1 << 20
    kept = keep_mask(p, 3, (0, 0), (1024, 1024), CPU).sum().item()
    assert abs(kept - (1 - p) * count) < 5 * (p * (1 - p) * count) ** 0.5 + count / 65536


def test_rows_and_columns_are_uncorrelated() -> None:
    mask = keep_mask(0.5, 3, (0, 0), (1024, 1024), CPU).double() * 2 - 1
    for matrix in (mask @ mask.T, mask.T @ mask):
        off = (matrix - torch.diag(matrix.diagonal())) / 1024
        assert off.abs().max() < 6 / 32
        assert 0.98 / 32 < off.std() < 1.02 / 32


def test_dropout_keeps_the_mean_and_its_gradient_is_its_mask() -> None:
    x = torch.ones(512, 512, dtype=torch.float64, requires_grad=True)
    y = dropout(x, 0.25, 3, (0, 0))
    assert abs(y.mean().item() - 1) < 0.01
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(gradient, y)


def test_dropout_of_everything_and_of_scalars() -> None:
    assert dropout(torch.ones(5), 1.0, 3, (0,)).tolist() == [0.0] * 5
    assert dropout(torch.tensor(1.0), 0.5, 3, ()).item() in (0.0, 2.0)
    assert dropout(torch.ones(2, 3, device="meta"), 0.5, 3, (0, 0)).shape == (2, 3)


def test_uniform_numbers() -> None:
    drawn = uniform((512, 512), 3, (0, 0), torch.float32, CPU)
    assert drawn.min() >= 0
    assert drawn.max() < 1
    histogram = torch.histc(drawn, 64, 0, 1)
    assert (histogram - 4096).abs().max() < 6 * 4096**0.5
    assert torch.equal(uniform((3, 5), 3, (17, 40), torch.float32, CPU), drawn[17:20, 40:45])


def test_normal_numbers() -> None:
    drawn = normal((512, 512), 3, (0, 0), torch.float64, CPU)
    assert abs(drawn.mean()) < 0.01
    assert abs(drawn.std() - 1) < 0.01
    assert abs((drawn**4).mean() - 3) < 0.1
    assert torch.equal(normal((5,), 3, (2,), torch.float64, CPU), normal((9,), 3, (0,), torch.float64, CPU)[2:7])


def test_bernoulli_numbers() -> None:
    drawn = bernoulli(torch.full((400, 400), 0.3), 3, (0, 0))
    assert set(drawn.unique().tolist()) == {0.0, 1.0}
    assert abs(drawn.mean() - 0.3) < 0.01


def test_recomputation_draws_again() -> None:
    x = torch.randn(8, 9, requires_grad=True)
    once = dropout(x, 0.5, 11, (4, 0))
    again = torch.utils.checkpoint.checkpoint(dropout, x, 0.5, 11, (4, 0), use_reentrant=False)
    assert torch.equal(once, again)
