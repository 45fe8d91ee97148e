"""Losses as exact parts: per token, then a sum, then a division by what is counted over the whole batch."""

from __future__ import annotations

from typing import Any

from autoplan.capture.call import Emit, Handle, Rewrite, schema_arguments
from searchspace.graph import Symbol

_NONE, _MEAN, _SUM = 0, 1, 2  # torch.nn._reduction


def cross_entropy(
    emit: Emit,
    logits: Handle,
    target: Handle,
    weight: Handle | None = None,
    reduction: int = _MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Any:
    """Class numbers or class probabilities, class weights, label smoothing, ignored tokens."""
    if "float" in target.dtype:
        return _soft_cross_entropy(emit, logits, target, weight, reduction, label_smoothing)
    dtype = logits.dtype
    dim = _class_dim(logits)
    if reduction != _NONE and len(logits.shape) == 2:
        logits, target = _unflattened(emit, logits, target)
        dim = len(logits.shape) - 1
    maximum = emit("autoplan.class_maximum.default", logits, dim)
    exp_sum, picked = emit("autoplan.exp_sum_and_pick.default", logits, maximum, target, 0, dim)
    weights = None if weight is None else _weights(emit, weight, target, ignore_index)
    if weights is None and not label_smoothing:
        losses = emit("autoplan.token_loss.default", exp_sum, maximum, picked, target, ignore_index)
    else:
        log_sum = emit("autoplan.log_sum.default", exp_sum, maximum)
        losses = _times(emit, emit("aten.sub.Tensor", log_sum, picked), weights)
        if label_smoothing:
            smooth = _smooth(emit, logits, weight, log_sum, dim)
            losses = emit("aten.mul.Tensor", losses, 1 - label_smoothing)
            losses = emit("aten.add.Tensor", losses, emit("aten.mul.Tensor", smooth, label_smoothing))
        losses = emit("autoplan.mask_ignored.default", losses, target, ignore_index)
    return _cast(emit, _reduced(emit, losses, target, weights, reduction, ignore_index), dtype)


def nll_loss(
    emit: Emit,
    values: Handle,
    target: Handle,
    weight: Handle | None = None,
    reduction: int = _MEAN,
    ignore_index: int = -100,
) -> Any:
    """The negative of what the target picks."""
    dim = _class_dim(values)
    losses = emit("aten.neg.default", emit("autoplan.pick.default", values, target, 0, dim))
    weights = None if weight is None else _weights(emit, weight, target, ignore_index)
    losses = emit("autoplan.mask_ignored.default", _times(emit, losses, weights), target, ignore_index)
    return _reduced(emit, losses, target, weights, reduction, ignore_index)


def reduced_outside(target: str) -> Rewrite:
    """A loss with ``reduction``: the same without, then the sum or mean."""
    names = [name for name, _ in schema_arguments(target)]
    place = names.index("reduction")

    def rewrite(emit: Emit, *args: Any, **kwargs: Any) -> Any:
        given = list(args) + [default for _, default in schema_arguments(target)[len(args) : place + 1]]
        reduction = given[place]
        if reduction == _NONE:
            return NotImplemented
        given[place] = _NONE
        return _total(emit, emit(target, *given, **kwargs), mean=reduction == _MEAN)

    return rewrite


def _soft_cross_entropy(
    emit: Emit, logits: Handle, target: Handle, weight: Handle | None, reduction: int, label_smoothing: float
) -> Any:
    """``lse * sum(p) - sum(p * l)`` for class probabilities p, weighted by class."""
    dtype = logits.dtype
    dim = _class_dim(logits)
    classes = logits.shape[dim]
    if label_smoothing:
        target = emit("aten.mul.Tensor", target, 1 - label_smoothing)
        target = emit("aten.add.Tensor", target, label_smoothing / classes)
    if weight is not None:
        target = emit("aten.mul.Tensor", target, _along(emit, weight, logits, dim))
    maximum = emit("autoplan.class_maximum.default", logits, dim)
    exp_sum = emit("autoplan.exp_sum.default", logits, maximum, dim)
    mass = _sum(emit, target, dim)
    expected = _sum(emit, emit("aten.mul.Tensor", logits, target), dim)
    log_sum = emit("autoplan.log_sum.default", exp_sum, maximum)
    losses = emit("aten.sub.Tensor", emit("aten.mul.Tensor", log_sum, mass), expected)
    return _cast(emit, losses if reduction == _NONE else _total(emit, losses, mean=reduction == _MEAN), dtype)


def _class_dim(logits: Handle) -> int:
    return 1 if len(logits.shape) > 1 else 0


def _unflattened(emit: Emit, logits: Handle, target: Handle) -> tuple[Handle, Handle]:
    """Logits and targets before they were flattened to [N, C] and [N], so that each token dim can be split."""
    before = _reshaped(logits)
    if before is None or len(before.shape) < 3 or before.shape[-1] != logits.shape[-1]:
        return logits, target
    lead = before.shape[:-1]
    flat = _reshaped(target)
    if flat is not None and flat.shape == lead:
        return before, flat
    return before, emit("aten.reshape.default", target, lead)


def _reshaped(value: Any) -> Any:
    """What ``value`` is a reshape of, or None."""
    made = getattr(value, "origin", None)
    return made.given[0] if made is not None and made.target == "aten.reshape.default" else None


def _weights(emit: Emit, weight: Handle, target: Handle, ignore_index: int) -> Any:
    """The class weight of each token, zero where it is ignored."""
    classes = weight.shape[0]
    rows = emit("aten.reshape.default", weight, (classes, 1))
    known = emit("aten.clamp.default", target, 0, classes - 1)
    found = emit("autoplan.embedding.default", rows, known, 0, classes)
    return emit("autoplan.mask_ignored.default", emit("aten.select.int", found, -1, 0), target, ignore_index)


def _smooth(emit: Emit, logits: Handle, weight: Handle | None, log_sum: Handle, dim: int) -> Any:
    """``sum_c w_c (lse - l_c) / C`` of each token, with weights 1 where there are none."""
    if weight is None:
        average = emit("autoplan.mean.default", logits, (dim,), (logits.shape[dim],))
        return emit("aten.sub.Tensor", log_sum, average)
    weighted = emit("aten.mul.Tensor", logits, _along(emit, weight, logits, dim))
    average = emit("autoplan.mean.default", weighted, (dim,), (logits.shape[dim],))
    share = emit("autoplan.mean.default", weight, (0,), (weight.shape[0],))
    return emit("aten.sub.Tensor", emit("aten.mul.Tensor", log_sum, share), average)


def _along(emit: Emit, vector: Handle, like: Handle, dim: int) -> Any:
    """A vector over ``dim`` in a shape that broadcasts to ``like``."""
    return emit("aten.reshape.default", vector, (-1, *[1] * (len(like.shape) - dim - 1)))


def _times(emit: Emit, losses: Handle, weights: Handle | None) -> Any:
    return losses if weights is None else emit("aten.mul.Tensor", losses, weights)


def _sum(emit: Emit, x: Handle, dim: int) -> Any:
    return emit("aten.sum.dim_IntList", x, (dim,))


def _reduced(
    emit: Emit, losses: Handle, target: Handle, weights: Handle | None, reduction: int, ignore_index: int
) -> Any:
    """Ignored tokens have a loss of zero already; a mean divides by the tokens (or weights) that count."""
    if reduction == _NONE:
        return losses
    total = emit("aten.sum.default", losses)
    if reduction == _SUM:
        return total
    if weights is not None:
        return emit("aten.div.Tensor", total, emit("aten.sum.default", weights))
    return emit("aten.div.Tensor", total, emit("autoplan.count_valid.default", target, ignore_index))


def _total(emit: Emit, x: Handle, mean: bool) -> Any:
    if not x.shape:
        return x
    if not mean:
        return emit("aten.sum.default", x)
    return emit("autoplan.mean.default", x, tuple(range(len(x.shape))), x.shape)


def _cast(emit: Emit, x: Handle, dtype: str) -> Any:
    return x if x.dtype == dtype else emit("aten.to.dtype", x, Symbol(f"torch.{dtype}"))


_ELEMENTWISE = (
    "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits",
    "kl_div", "poisson_nll_loss", "soft_margin_loss", "hinge_embedding_loss", "margin_ranking_loss",
    "cosine_embedding_loss", "triplet_margin_loss", "multi_margin_loss", "multilabel_margin_loss",
)  # fmt: skip

REWRITES: dict[str, Rewrite] = {
    "aten.cross_entropy_loss.default": cross_entropy,
    "aten.nll_loss.default": nll_loss,
    "aten.nll_loss_nd.default": nll_loss,
    "aten.nll_loss2d.default": nll_loss,
    **{f"aten.{name}.default": reduced_outside(f"aten.{name}.default") for name in _ELEMENTWISE},
}
