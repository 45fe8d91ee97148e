"""Random operators draw by position (see autoplan.operators.randomness)."""

from __future__ import annotations

from typing import Any

import torch

from autoplan.capture.call import Emit, Handle, Rewrite
from searchspace.graph import Symbol

SITE = Symbol("operator")
"""The operator's own number, which keeps its draws apart from other operators'."""


def dropout(emit: Emit, x: Handle, p: float, train: bool) -> Any:
    if not train or p == 0:
        return x
    return emit("autoplan.dropout.default", x, p, SITE, (0,) * len(x.shape))


def feature_dropout(emit: Emit, x: Handle, p: float, train: bool) -> Any:
    """Drops whole channels: the mask is drawn for [N, C, 1, ...]."""
    if not train or p == 0:
        return x
    ones = _filled(emit, (*x.shape[:2], *[1] * (len(x.shape) - 2)), 1, x.dtype)
    return emit("aten.mul.Tensor", x, dropout(emit, ones, p, True))


def _filled(emit: Emit, size: Any, value: Any, dtype: str) -> Any:
    return emit("aten.full.default", tuple(size), value, dtype=Symbol(f"torch.{dtype}"), device=Symbol("device"))


def _draw(emit: Emit, name: str, size: Any, dtype: Symbol | None) -> Any:
    kind = dtype or Symbol(str(torch.get_default_dtype()))
    return emit(f"autoplan.{name}.default", tuple(size), SITE, (0,) * len(size), kind, Symbol("device"))


def created(name: str) -> Rewrite:
    """rand and randn."""

    def rewrite(emit: Emit, size: Any, *, dtype: Symbol | None = None, **kwargs: Any) -> Any:
        return _draw(emit, name, size, dtype)

    return rewrite


def created_like(name: str) -> Rewrite:
    """rand_like and randn_like."""

    def rewrite(emit: Emit, x: Handle, *, dtype: Symbol | None = None, **kwargs: Any) -> Any:
        return _draw(emit, name, x.shape, dtype or Symbol(f"torch.{x.dtype}"))

    return rewrite


def uniform(emit: Emit, x: Handle, low: float = 0.0, high: float = 1.0, **kwargs: Any) -> Any:
    """What ``uniform_`` fills in."""
    drawn = _draw(emit, "uniform", x.shape, Symbol(f"torch.{x.dtype}"))
    return drawn if (low, high) == (0.0, 1.0) else _scaled(emit, drawn, high - low, low)


def normal(emit: Emit, x: Handle, mean: float = 0.0, std: float = 1.0, **kwargs: Any) -> Any:
    """What ``normal_`` fills in."""
    drawn = _draw(emit, "normal", x.shape, Symbol(f"torch.{x.dtype}"))
    return drawn if (mean, std) == (0.0, 1.0) else _scaled(emit, drawn, std, mean)


def exponential(emit: Emit, x: Handle, rate: float = 1.0, **kwargs: Any) -> Any:
    """What ``exponential_`` fills in: ``-log(u) / rate``, never zero."""
    drawn = emit("aten.log.default", _draw(emit, "uniform", x.shape, Symbol(f"torch.{x.dtype}")))
    return emit("aten.mul.Tensor", drawn, -1 / rate)


def _scaled(emit: Emit, x: Handle, factor: float, offset: float) -> Any:
    return emit("aten.add.Tensor", emit("aten.mul.Tensor", x, factor), offset)


def _integers(emit: Emit, low: int, high: int, size: Any, dtype: Symbol | None) -> Any:
    drawn = emit(
        "aten.floor.default", _scaled(emit, _draw(emit, "uniform", size, Symbol("torch.float64")), high - low, low)
    )
    return emit("aten.to.dtype", drawn, dtype or Symbol("torch.int64"))


def randint(emit: Emit, high: int, size: Any, *, dtype: Symbol | None = None, **kwargs: Any) -> Any:
    return _integers(emit, 0, high, size, dtype)


def randint_between(emit: Emit, low: int, high: int, size: Any, *, dtype: Symbol | None = None, **kwargs: Any) -> Any:
    return _integers(emit, low, high, size, dtype)


def bernoulli(emit: Emit, probability: Handle, **kwargs: Any) -> Any:
    return emit("autoplan.bernoulli.default", probability, SITE, (0,) * len(probability.shape))


def bernoulli_of(emit: Emit, x: Handle, p: float = 0.5, **kwargs: Any) -> Any:
    return bernoulli(emit, _filled(emit, x.shape, p, x.dtype))


REWRITES: dict[str, Rewrite] = {
    "aten.dropout.default": dropout,
    "aten.feature_dropout.default": feature_dropout,
    "aten.rand.default": created("uniform"),
    "aten.randn.default": created("normal"),
    "aten.rand_like.default": created_like("uniform"),
    "aten.randn_like.default": created_like("normal"),
    "aten.uniform.default": uniform,
    "aten.normal_functional.default": normal,
    "aten.exponential.default": exponential,
    "aten.randint.default": randint,
    "aten.randint.low": randint_between,
    "aten.bernoulli.default": bernoulli,
    "aten.bernoulli.p": bernoulli_of,
}
