"""Rewritten operators compute what the originals compute, forward and backward, in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from autoplan.capture.call import symbolic
from autoplan.capture.rewrites import REWRITES
from autoplan.capture.rewrites.arrangement import Arrangement
from autoplan.operators import resolve
from autoplan.operators.randomness import set_step
from searchspace.graph import Symbol
from tests.capture.operator_cases import B, I, T, f64


@dataclass(eq=False)
class Origin:
    target: str
    given: tuple[Any, ...]
    outputs: tuple[Any, ...] = (None,)


class Eager:
    """A handle that holds its value."""

    def __init__(self, value: torch.Tensor, origin: Origin | None = None) -> None:
        self.value, self.origin = value, origin
        self.shape, self.requires_grad = tuple(value.shape), value.requires_grad
        self.dtype = str(value.dtype).removeprefix("torch.")


class EagerEmit:
    """Runs what a rewrite emits, rewriting it again like the capture does."""

    def __init__(self) -> None:
        self.targets: list[str] = []
        self._active: list[str] = []

    def __call__(self, target: str, *args: Any, **kwargs: Any) -> Any:
        if target in REWRITES and target not in self._active:
            self._active.append(target)
            result = REWRITES[target](self, *args, **kwargs)
            self._active.pop()
            if result is not NotImplemented:
                return result
        self.targets.append(target)
        returned = resolve(target)(*map(_concrete, args), **{name: _concrete(value) for name, value in kwargs.items()})
        origin = Origin(target, args)
        if isinstance(returned, list | tuple):
            return tuple(Eager(value, origin) for value in returned)
        return Eager(returned, origin)

    def again(self, made: Any, *args: Any) -> Any:
        return self(made.target, *args)


def _concrete(value: Any) -> Any:
    if isinstance(value, Eager):
        return value.value
    if isinstance(value, list | tuple):
        return [_concrete(item) for item in value]
    if value == Symbol("operator"):
        return 5
    if isinstance(value, Symbol):
        return torch.device("cpu") if value.name == "device" else getattr(torch, value.name.removeprefix("torch."))
    return value


def _wrapped(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return Eager(value)
    return tuple(map(_wrapped, value)) if isinstance(value, list | tuple) else symbolic(value)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for item in value for t in _tensors(item)] if isinstance(value, list | tuple) else []


def results(returned: Any) -> list[torch.Tensor]:
    found = list(returned) if isinstance(returned, list | tuple) else [returned]
    return [item.value if isinstance(item, Eager) else item for item in found]


def assert_rewritten(target: str, args: list[Any], kwargs: dict[str, Any] | None = None) -> list[str]:
    """Same results and gradients as the original; returns the targets that were emitted."""
    kwargs = kwargs or {}
    emit = EagerEmit()
    found = results(emit(target, *map(_wrapped, args), **{name: _wrapped(value) for name, value in kwargs.items()}))
    assert target not in emit.targets
    expected = results(resolve(target)(*args, **kwargs))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12, equal_nan=True)
    inputs = [t for t in _tensors(args) if t.requires_grad]
    pairs = [(a, b, torch.randn_like(b)) for a, b in zip(found, expected, strict=True) if b.requires_grad]
    if pairs:
        ours = torch.autograd.grad([a for a, _, _ in pairs], inputs, [g for _, _, g in pairs], allow_unused=True)
        theirs = torch.autograd.grad([b for _, b, _ in pairs], inputs, [g for _, _, g in pairs], allow_unused=True)
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    return emit.targets


NONE, MEAN, SUM = 0, 1, 2


@pytest.mark.parametrize("reduction", [NONE, MEAN, SUM])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", [(7,), (6, 7), (3, 7, 2), (3, 7, 2, 4)])
def test_cross_entropy(shape: tuple[int, ...], weighted: bool, smoothing: float, reduction: int) -> None:
    torch.manual_seed(0)
    target = I(7, *shape[:1], *shape[2:]) if len(shape) > 1 else I(7)
    if len(shape) > 1:
        target[0] = -100
    weight = torch.rand(7, dtype=f64) if weighted else None
    assert_rewritten("aten.cross_entropy_loss.default", [T(*shape), target, weight, reduction, -100, smoothing])


@pytest.mark.parametrize("reduction", [NONE, MEAN, SUM])
@pytest.mark.parametrize("ignored", [-100, 3])
def test_cross_entropy_ignores_a_class_too(ignored: int, reduction: int) -> None:
    torch.manual_seed(0)
    assert_rewritten("aten.cross_entropy_loss.default", [T(9, 7), I(7, 9), None, reduction, ignored])


def test_cross_entropy_of_nothing_is_not_a_number() -> None:
    logits = T(4, 7)
    (loss,) = results(EagerEmit()("aten.cross_entropy_loss.default", Eager(logits), Eager(torch.full((4,), -100))))
    assert loss.isnan()


@pytest.mark.parametrize("reduction", [NONE, MEAN, SUM])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weighted", [False, True])
def test_cross_entropy_of_probabilities(weighted: bool, smoothing: float, reduction: int) -> None:
    torch.manual_seed(0)
    weight = torch.rand(7, dtype=f64) if weighted else None
    target = T(3, 7, 2).softmax(1).detach().requires_grad_()
    assert_rewritten("aten.cross_entropy_loss.default", [T(3, 7, 2), target, weight, reduction, -100, smoothing])


def test_flattened_tokens_are_unflattened() -> None:
    """So that each token dimension can be split."""
    logits, target = T(3, 4, 7), I(7, 3, 4)
    emit = EagerEmit()
    flat = emit("aten.reshape.default", Eager(logits), (12, 7))
    labels = emit("aten.reshape.default", Eager(target), (12,))
    loss = emit("aten.cross_entropy_loss.default", flat, labels)
    torch.testing.assert_close(loss.value, F.cross_entropy(logits.view(12, 7), target.view(12)))
    (made,) = torch.autograd.grad(loss.value, logits)
    (wanted,) = torch.autograd.grad(F.cross_entropy(logits.view(12, 7), target.view(12)), logits)
    torch.testing.assert_close(made, wanted)
    assert emit.targets[2:4] == ["autoplan.class_maximum.default", "autoplan.exp_sum_and_pick.default"]
    assert emit.targets.count("aten.reshape.default") == 2  # the flat ones, which nothing needs


def test_half_precision_logits_are_accumulated_in_float32() -> None:
    torch.manual_seed(0)
    logits = torch.randn(64, 1000).bfloat16().requires_grad_()
    target = I(1000, 64)
    (loss,) = results(EagerEmit()("aten.cross_entropy_loss.default", Eager(logits), Eager(target)))
    exact = F.cross_entropy(logits.double(), target)
    assert loss.dtype == torch.bfloat16
    assert abs(loss.item() - exact.item()) <= 2**-7 * exact.item()
    (ours,) = torch.autograd.grad(loss, logits)
    (theirs,) = torch.autograd.grad(exact, logits)
    assert float((ours - theirs).abs().max()) <= 2**-7 * float(theirs.abs().max())


@pytest.mark.parametrize("reduction", [NONE, MEAN, SUM])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", ["nll_loss", "nll_loss_nd"])
def test_nll_loss(name: str, weighted: bool, reduction: int) -> None:
    torch.manual_seed(0)
    target = I(7, 6)
    target[2:4] = 2
    weight = torch.rand(7, dtype=f64) if weighted else None
    assert_rewritten(f"aten.{name}.default", [T(6, 7), target, weight, reduction, 2])


def probability(*shape: int) -> torch.Tensor:
    return torch.rand(shape, dtype=f64) * 0.9 + 0.05


@pytest.mark.parametrize("reduction", [MEAN, SUM])
@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("mse_loss", lambda r: [T(4, 5), T(4, 5), r]),
        ("mse_loss", lambda r: [T(), T(), r]),
        ("l1_loss", lambda r: [T(4, 5), T(4, 5), r]),
        ("smooth_l1_loss", lambda r: [T(4, 5), T(4, 5), r, 0.3]),
        ("huber_loss", lambda r: [T(4, 5), T(4, 5), r, 0.3]),
        ("binary_cross_entropy", lambda r: [probability(4, 5).requires_grad_(), probability(4, 5), None, r]),
        ("binary_cross_entropy_with_logits", lambda r: [T(4, 5), probability(4, 5), probability(5), probability(5), r]),
        ("kl_div", lambda r: [T(4, 5), probability(4, 5), r]),
        ("soft_margin_loss", lambda r: [T(4, 5), I(2, 4, 5) * 2.0 - 1, r]),
        ("margin_ranking_loss", lambda r: [T(4), T(4), I(2, 4) * 2 - 1, 0.1, r]),
        ("hinge_embedding_loss", lambda r: [T(4, 5), I(2, 4, 5) * 2 - 1, 1.0, r]),
    ],
)
def test_losses_are_reduced_outside(name: str, args: Callable[[int], list[Any]], reduction: int) -> None:
    torch.manual_seed(0)
    target = f"aten.{name}.default"
    emit = EagerEmit()
    given = args(reduction)
    (found,) = results(emit(target, *map(_wrapped, given)))
    expected = resolve(target)(*given)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    inputs = [t for t in _tensors(given) if t.requires_grad]
    torch.testing.assert_close(torch.autograd.grad(found, inputs), torch.autograd.grad(expected, inputs))
    if found.shape != given[0].shape:
        assert emit.targets[-1] == ("autoplan.mean.default" if reduction == MEAN else "aten.sum.default")


def test_means() -> None:
    assert assert_rewritten("aten.mean.default", [T(4, 5)]) == ["autoplan.mean.default"]
    assert assert_rewritten("aten.mean.dim", [T(4, 5, 6), [-1, 0], True]) == ["autoplan.mean.default"]
    assert assert_rewritten("aten.mean.dim", [T(4, 5, 6), []]) == ["autoplan.mean.default"]
    cast = assert_rewritten("aten.mean.dim", [T(4, 5).detach().float().requires_grad_(), [1]], {"dtype": f64})
    assert cast == ["aten.to.dtype", "autoplan.mean.default"]


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", [(6, 5), (4, 5, 6), (4, 5, 3, 2)])
def test_batch_norm(shape: tuple[int, ...], affine: bool) -> None:
    torch.manual_seed(0)
    x = (torch.randn(shape, dtype=f64) * 3 + 1).requires_grad_()
    weight, bias = (T(5), T(5)) if affine else (None, None)
    mean, variance = torch.randn(5, dtype=f64), torch.rand(5, dtype=f64)
    emit = EagerEmit()
    args = [_wrapped(value) for value in (x, weight, bias, mean, variance)]
    y, new_mean, new_variance = results(emit("aten.batch_norm.default", *args, True, 0.3, 1e-5, False))
    wanted_mean, wanted_variance = mean.clone(), variance.clone()
    expected = F.batch_norm(x, wanted_mean, wanted_variance, weight, bias, True, 0.3)
    torch.testing.assert_close([y, new_mean, new_variance], [expected, wanted_mean, wanted_variance])
    assert not new_mean.requires_grad
    assert not new_variance.requires_grad
    inputs = [x, *([weight, bias] if affine else [])]
    gradient = torch.randn_like(y)
    torch.testing.assert_close(
        torch.autograd.grad(y, inputs, gradient),
        torch.autograd.grad(expected, inputs, gradient),
        rtol=1e-10,
        atol=1e-12,
    )


def test_batch_norm_without_running_statistics_and_in_evaluation() -> None:
    assert (
        len(assert_rewritten("aten.batch_norm.default", [T(6, 5), None, None, None, None, True, 0.1, 1e-5, False])) == 3
    )
    given = [T(6, 5), None, None, torch.zeros(5, dtype=f64), torch.ones(5, dtype=f64), False, 0.1, 1e-5, False]
    emit = EagerEmit()
    emit("aten.batch_norm.default", *map(_wrapped, given))
    assert emit.targets == ["aten.batch_norm.default"]


def test_batch_norm_in_bfloat16() -> None:
    torch.manual_seed(0)
    x = torch.randn(16, 5, 4).bfloat16().requires_grad_()
    weight, bias = torch.rand(5).bfloat16().requires_grad_(), torch.rand(5).bfloat16().requires_grad_()
    y = results(
        EagerEmit()("aten.batch_norm.default", *map(_wrapped, (x, weight, bias, None, None)), True, 0.1, 1e-5, False)
    )[0]
    exact = F.batch_norm(x.double(), None, None, weight.double(), bias.double(), True)
    assert y.dtype == torch.bfloat16
    assert (y - exact).abs().max().item() < 0.03
    ours = torch.autograd.grad(y.float().pow(2).sum(), [x, weight, bias])
    theirs = torch.autograd.grad(exact.pow(2).sum(), [x, weight, bias])
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == torch.bfloat16
        assert (a - b).abs().max().item() < 0.03 * max(1.0, b.abs().max().item())


def test_groups_follow_the_shard() -> None:
    assert assert_rewritten("aten.group_norm.default", [T(4, 6, 5), 3, T(6), T(6)]) == ["autoplan.group_norm.default"]
    assert_rewritten("aten.conv1d.default", [T(4, 6, 7), T(9, 2, 3), T(9), [2], [1], [1], 3])
    assert_rewritten("aten.conv2d.default", [T(4, 6, 7, 7), T(6, 1, 3, 3), None, [1, 1], [1], [2, 1], 6])


@pytest.mark.parametrize(
    ("target", "args"),
    [
        ("aten.squeeze.default", [T(1, 4, 1, 5)]),
        ("aten.squeeze.dim", [T(4, 1, 5), 1]),
        ("aten.squeeze.dims", [T(1, 4, 1, 5), [0, 1]]),
        ("aten.repeat.default", [T(4, 5), [2, 1, 3]]),
        ("aten.tile.default", [T(4, 5, 2), [3, 2]]),
        ("aten.repeat_interleave.self_int", [T(4, 5, 2), 3, 1]),
        ("aten.repeat_interleave.self_int", [T(4, 5), 3]),
        ("aten.split.Tensor", [T(4, 7), 3, 1]),
        ("aten.split_with_sizes.default", [T(4, 7), [2, 5], -1]),
        ("aten.chunk.default", [T(4, 7), 3, 1]),
        ("aten.chunk.default", [T(5, 2), 4]),
        ("aten.tensor_split.sections", [T(4, 8), 3, 1]),
        ("aten.unbind.int", [T(4, 3), 1]),
        ("aten.tril.default", [T(4, 5), 1]),
        ("aten.triu.default", [T(3, 4, 5), -1]),
        ("aten.arange.default", [7]),
        ("aten.arange.default", [2.5]),
        ("aten.arange.start", [3, 9]),
        ("aten.arange.start_step", [9, 1, -3]),
        ("aten.arange.start_step", [0.0, 1.0, 0.3]),
        ("aten.embedding.default", [T(7, 3), I(7, 4, 5), 2]),
        ("aten.embedding.default", [T(7, 3), I(7, 4, 5)]),
        ("aten.cat.default", [[torch.zeros(0, dtype=f64), T(4, 3)], -1]),
    ],
)
def test_shapes_and_positions(target: str, args: list[Any]) -> None:
    assert_rewritten(target, args)


def test_parts_of_a_linear_layer() -> None:
    """Fused query, key and value: one linear layer, whose parts can be split."""
    x, weight, bias = T(4, 3, 6), T(16, 6), T(16)
    emit = EagerEmit()
    fused = emit("aten.linear.default", Eager(x), Eager(weight), Eager(bias))
    parts = emit("aten.split_with_sizes.default", fused, (8, 4, 4), -1)
    assert emit.targets == ["aten.linear.default", "autoplan.fused_linear.default"]
    torch.testing.assert_close([p.value for p in parts], list(F.linear(x, weight, bias).split([8, 4, 4], -1)))
    rows = emit("aten.split.Tensor", fused, 2, 0)
    assert emit.targets[-2:] == ["aten.slice.Tensor"] * 2
    assert [p.shape for p in rows] == [(2, 3, 16)] * 2


def test_linear_layer_of_flattened_rows() -> None:
    """The dims that were flattened can be split one by one."""
    x, weight, bias = T(4, 3, 6), T(8, 6), T(8)
    emit = EagerEmit()
    flat = emit("aten.reshape.default", Eager(x), (12, 6))
    y = emit("aten.linear.default", flat, Eager(weight), Eager(bias))
    z = emit("aten.reshape.default", y, (4, 3, 8))
    assert z.origin.target == "aten.linear.default"
    assert z.origin.given[0].value is x
    torch.testing.assert_close(z.value, F.linear(x, weight, bias))
    other = emit("aten.reshape.default", y, (3, 4, 8))
    assert other.origin.target == "aten.reshape.default"


def test_operators_on_flattened_rows() -> None:
    """The MLP of rows [l, b] is one of [l, b]; as attention with weights gives them, (b h) is taken apart too."""
    x, first, second = T(2, 3, 6), T(8, 6), T(6, 8)
    emit = EagerEmit()
    flat = emit("aten.reshape.default", Eager(x), (6, 6))
    hidden = emit("aten.gelu.default", emit("aten.linear.default", flat, Eager(first)))
    y = emit("aten.add.Tensor", emit("aten.linear.default", hidden, Eager(second)), flat)
    found = emit("aten.reshape.default", y, (2, 3, 6))
    assert found.origin.target == "aten.add.Tensor"
    assert found.origin.given[1].value is x
    torch.testing.assert_close(found.value, F.linear(F.gelu(F.linear(x, first)), second) + x)

    length, batch, heads, d = 5, 3, 2, 4
    merged, weight = T(batch * heads, length, d), T(7, heads * d)
    rows = emit("aten.reshape.default", emit("aten.transpose.int", Eager(merged), 0, 1), (length * batch, heads * d))
    attended = emit("aten.reshape.default", emit("aten.linear.default", rows, Eager(weight)), (length, batch, 7))
    assert attended.origin.target == "aten.linear.default"
    apart = merged.reshape(batch, heads, length, d).permute(2, 0, 1, 3).reshape(length, batch, heads * d)
    torch.testing.assert_close(attended.value, F.linear(apart, weight))


def test_random_numbers_on_flattened_rows_are_drawn_once() -> None:
    emit = EagerEmit()
    flat = emit("aten.reshape.default", Eager(T(2, 3, 6)), (6, 6))
    noisy = emit("aten.add.Tensor", flat, emit("aten.rand_like.default", flat))
    assert emit("aten.reshape.default", noisy, (2, 3, 6)).origin.target == "aten.reshape.default"


def test_heads_of_multi_head_attention_are_not_merged_with_the_batch() -> None:
    """As nn.MultiheadAttention does: packed projections, [t, (b h), d] on the way to [b, h, t, d] and back."""
    t, b, h, d = 5, 3, 2, 4
    x, weight, bias = T(t, b, h * d), T(3 * h * d, h * d), T(3 * h * d)
    emit = EagerEmit()
    packed = emit("aten.linear.default", Eager(x), Eager(weight), Eager(bias))
    packed = emit("aten.unsqueeze.default", emit("aten.reshape.default", packed, (t, b, 3, h * d)), 0)
    packed = emit("aten.squeeze.dim", emit("aten.transpose.int", packed, 0, -2), -2)
    packed = emit("aten.contiguous.default", packed)
    emit.targets.clear()
    key = emit("aten.select.int", packed, 0, 1)
    assert emit.targets == ["autoplan.fused_linear.default"]
    expected = F.linear(x, weight, bias).unflatten(-1, (3, h * d)).select(-2, 1)
    torch.testing.assert_close(key.value, expected)
    rows = emit("aten.transpose.int", emit("aten.reshape.default", key, (t, b * h, d)), 0, 1)
    emit.targets.clear()
    heads = emit("aten.reshape.default", rows, (b, h, t, d))
    assert emit.targets == ["aten.reshape.default", "aten.permute.default"]
    assert heads.origin.given[0].shape == (t, b, h, d)
    torch.testing.assert_close(heads.value, expected.reshape(t, b * h, d).transpose(0, 1).reshape(b, h, t, d))
    back = emit("aten.reshape.default", emit("aten.permute.default", heads, (2, 0, 1, 3)), (t * b, h * d))
    emit.targets.clear()
    out = emit("aten.reshape.default", emit("aten.linear.default", back, Eager(T(6, h * d))), (t, b, 6))
    assert emit.targets == ["aten.linear.default", "aten.reshape.default", "aten.linear.default"]
    assert out.origin.given[0].shape == (t, b, h * d)


@pytest.mark.parametrize("seed", range(40))
def test_arrangements_of_random_chains(seed: int) -> None:
    """A chain of reshapes and permutations, taken apart and emitted anew, gives the same tensor."""
    random = Random(seed)
    primes = [random.choice([1, 2, 2, 3, 5]) for _ in range(random.randint(2, 5))]

    def some_shape() -> tuple[int, ...]:
        shape: list[int] = [1]
        for prime in random.sample(primes, len(primes)):
            if random.random() < 0.5:
                shape.append(prime)
            else:
                shape[-1] *= prime
        return tuple(shape)

    emit = EagerEmit()
    x = T(*some_shape())
    value, expected = Eager(x), x
    for _ in range(4):
        if random.random() < 0.5:
            shape = some_shape()
            value, expected = emit("aten.reshape.default", value, shape), expected.reshape(shape)
        else:
            order = tuple(random.sample(range(expected.dim()), expected.dim()))
            value, expected = emit("aten.permute.default", value, order), expected.permute(order)
    assert torch.equal(value.value, expected)
    arrangement = Arrangement.of(value)
    assert torch.equal(arrangement.emit(emit).value, expected)


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("keys", [5, 7])
def test_causal_attention(keys: int, scale: float | None) -> None:
    given = [T(2, 6, 5, 8), T(2, 3, keys, 8), T(2, 3, keys, 4), None, 0.0, True]
    emitted = assert_rewritten("aten.scaled_dot_product_attention.default", given, {"scale": scale, "enable_gqa": True})
    assert emitted == ["autoplan.causal_attention.default"]


@pytest.mark.parametrize("mask", ["none", "causal", "bool", "float"])
def test_attention_with_dropout_is_decomposed(mask: str) -> None:
    """Where nothing is dropped by chance, it is the kernel's result; else rows that are kept are scaled."""
    q, k, v = T(2, 6, 5, 8), T(2, 3, 5, 8), T(2, 3, 5, 4)
    given = {
        "none": None,
        "causal": None,
        "bool": B(2, 1, 5, 5) | torch.eye(5, dtype=torch.bool),
        "float": T(1, 6, 5, 5),
    }[mask]
    args = [q, k, v, given, 1e-14, mask == "causal"]  # rounds to no drop at all
    emitted = assert_rewritten("aten.scaled_dot_product_attention.default", args, {"enable_gqa": True})
    assert "autoplan.dropout.default" in emitted


@pytest.mark.parametrize("target", ["aten.dropout.default", "aten.feature_dropout.default"])
def test_no_dropout_is_nothing(target: str) -> None:
    x = Eager(T(4, 5, 6))
    emit = EagerEmit()
    assert emit(target, x, 0.5, False) is x
    assert emit(target, x, 0.0, True) is x
    assert emit.targets == []


def test_feature_dropout_drops_channels() -> None:
    set_step(0, 0)
    (y,) = results(EagerEmit()("aten.feature_dropout.default", Eager(torch.ones(50, 20, 3)), 0.25, True))
    assert set(y.unique().tolist()) == {0.0, y.max().item()}
    assert torch.equal(y[..., 0], y[..., 2])
    assert 0.68 < float((y > 0).float().mean()) < 0.82


@pytest.mark.parametrize(
    ("target", "args", "low", "high", "mean"),
    [
        ("aten.rand.default", [(100, 100)], 0, 1, 0.5),
        ("aten.randn.default", [(100, 100)], -9, 9, 0.0),
        ("aten.rand_like.default", [torch.zeros(100, 100)], 0, 1, 0.5),
        ("aten.randint.low", [2, 7, (100, 100)], 2, 6, 4.0),
        ("aten.bernoulli.p", [torch.zeros(100, 100), 0.3], 0, 1, 0.3),
        ("aten.uniform.default", [torch.zeros(100, 100), -1.0, 3.0], -1, 3, 1.0),
        ("aten.exponential.default", [torch.zeros(100, 100), 2.0], 1e-9, 30, 0.5),
    ],
)
def test_random_numbers(target: str, args: list[Any], low: float, high: float, mean: float) -> None:
    set_step(0, 0)
    (first,) = results(EagerEmit()(target, *map(_wrapped, args)))
    (again,) = results(EagerEmit()(target, *map(_wrapped, args)))
    assert torch.equal(first, again)
    set_step(0, 1)
    (later,) = results(EagerEmit()(target, *map(_wrapped, args)))
    assert not torch.equal(first, later)
    set_step(0, 0)
    assert low <= float(first.min())
    assert float(first.max()) <= high
    assert abs(float(first.double().mean()) - mean) < 0.06
    assert first.dtype == resolve(target)(*args).dtype


def test_every_rewrite_has_an_operator() -> None:
    for target in REWRITES:
        assert resolve(target)._schema is not None
