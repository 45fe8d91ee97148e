"""Comparison of a parallel run with the single device's, tensor by tensor.

A tensor agrees when ``max|a - b| <= tolerance * s`` where, for a gradient, ``s`` is the larger of that
tensor's ``max|ref|`` and the largest ``max|ref|`` of any gradient of the model (a key bias has a gradient
that is zero but for rounding); for a parameter, buffer, output or loss ``s = max(1, max|ref|)``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from searchspace.errors import VerificationError
from searchspace.summary import Table

Quantity = Literal["loss", "gradient", "parameter", "buffer", "output"]

TOLERANCES: Mapping[torch.dtype, float] = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""By the dtype of the computation; models that compute in float32 inside need 1e-6 in float64."""


@dataclass(frozen=True)
class Outcome:
    """What a run left: the loss of each step, the first step's gradients, the last step's parameters and buffers;
    of inference the outputs.

    Tensors are whole, by the single-device model's qualified names.
    """

    losses: Sequence[float]
    gradients: Mapping[str, torch.Tensor]
    parameters: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]
    outputs: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Difference:
    """The largest difference of one tensor, the scale ``s`` it is measured by, and whether it is allowed."""

    quantity: Quantity
    name: str
    difference: float
    scale: float
    tolerance: float

    @property
    def agrees(self) -> bool:
        """False also where either side is NaN."""
        return self.difference <= self.tolerance * self.scale

    @property
    def relative(self) -> float:
        return self.difference / self.scale if self.scale > 0 else (math.inf if self.difference else 0.0)


@dataclass(frozen=True)
class Comparison:
    """All differences of a run, and a note on what was compared; in training the first is the loss of step 0."""

    differences: tuple[Difference, ...]
    note: str = ""

    @property
    def agrees(self) -> bool:
        return all(difference.agrees for difference in self.differences)

    def worst(self, quantity: Quantity, count: int = 1) -> tuple[Difference, ...]:
        """The ``count`` largest relative differences of a kind, NaN first."""
        of_kind = [d for d in self.differences if d.quantity == quantity]
        ranked = sorted(of_kind, key=lambda d: math.inf if math.isnan(d.relative) else d.relative, reverse=True)
        return tuple(ranked[:count])

    def raise_if_different(self) -> None:
        """VerificationError that names each kind's worst tensor, unless all agree."""
        wrong = [d for kind in _KINDS for d in self.worst(kind) if not d.agrees]
        if wrong:
            raise VerificationError(
                "plan and single device disagree: "
                + "; ".join(
                    f"{d.quantity} {d.name}: {d.difference:.3g} > {d.tolerance:g} x {d.scale:.3g}" for d in wrong
                )
            )

    def table(self, count: int = 3) -> Table:
        """For each kind: how many tensors, and the ``count`` that differ most."""
        rows: list[tuple[str, ...]] = []
        for kind in _KINDS:
            number = sum(d.quantity == kind for d in self.differences)
            for index, d in enumerate(self.worst(kind, count)):
                head = (kind, str(number)) if index == 0 else ("", "")
                rows.append(
                    (
                        *head,
                        d.name,
                        f"{d.difference:.3e}",
                        f"{d.scale:.3e}",
                        f"{d.relative:.3e}",
                        f"{d.tolerance:g}",
                        "equal" if d.agrees else "DIFFERENT",
                    )
                )
        columns = ("quantity", "tensors", "largest differences", "max|a-b|", "scale", "relative", "allowed", "")
        title = "Plan against single device" + (f" ({self.note})" if self.note else "")
        return Table(title, columns, tuple(rows))


_KINDS: tuple[Quantity, ...] = ("loss", "gradient", "parameter", "buffer", "output")


def compare(reference: Outcome, actual: Outcome, tolerance: float, note: str = "") -> Comparison:
    """Compare two runs.

    Raises VerificationError when one of them lacks a tensor, a step, or a tensor has another shape.
    """
    if len(reference.losses) != len(actual.losses):
        raise VerificationError(f"expected {len(reference.losses)} losses, got {len(actual.losses)}")
    found = [
        Difference("loss", f"step {step}", abs(a - b), max(1.0, abs(b)), tolerance)
        for step, (a, b) in enumerate(zip(actual.losses, reference.losses, strict=True))
    ]
    pairs: tuple[tuple[Quantity, Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]], ...] = (
        ("gradient", reference.gradients, actual.gradients),
        ("parameter", reference.parameters, actual.parameters),
        ("buffer", reference.buffers, actual.buffers),
        ("output", reference.outputs, actual.outputs),
    )
    for quantity, wanted, got in pairs:
        _same_names(quantity, wanted, got)
        least = max((_magnitude(t) for t in wanted.values()), default=0.0) if quantity == "gradient" else 1.0
        for name, tensor in wanted.items():
            found.append(_difference(quantity, name, tensor, got[name], least, tolerance))
    return Comparison(tuple(found), note)


def _same_names(quantity: Quantity, wanted: Mapping[str, object], got: Mapping[str, object]) -> None:
    missing = [name for name in wanted if name not in got]
    extra = [name for name in got if name not in wanted]
    if missing or extra:
        raise VerificationError(
            f"{quantity}s differ in names: missing {missing[:3]}, extra {extra[:3]} "
            f"({len(missing)} and {len(extra)} in all)"
        )


def _difference(
    quantity: Quantity, name: str, wanted: torch.Tensor, got: torch.Tensor, least: float, tolerance: float
) -> Difference:
    if wanted.shape != got.shape:
        raise VerificationError(
            f"{quantity} {name} has shape {list(got.shape)}, on a single device {list(wanted.shape)}"
        )
    a, b = _wide(got), _wide(wanted)
    difference = _magnitude(torch.where(a == b, 0, a - b))  # equal infinities do not differ
    return Difference(quantity, name, difference, max(_magnitude(b[b.isfinite()]), least), tolerance)


def _magnitude(tensor: torch.Tensor) -> float:
    return _wide(tensor).abs().max().item() if tensor.numel() else 0.0


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", torch.complex128 if tensor.is_complex() else torch.float64)
