"""Comparison of runs: scales, NaN, names and shapes."""

import math

import pytest
import torch

from autoplan.report.comparison import Outcome, compare
from searchspace.errors import VerificationError


def outcome(loss: float = 2.0, gradient: float = 1.0, bias: float = 0.0, parameter: float = 10.0) -> Outcome:
    return Outcome(
        losses=[loss],
        gradients={"w": torch.tensor([gradient, -0.5]), "bias": torch.tensor([bias])},
        parameters={"w": torch.tensor([parameter])},
        buffers={"count": torch.tensor(3), "mask": torch.tensor([True, False])},
    )


def test_equal_runs_agree() -> None:
    comparison = compare(outcome(), outcome(), 1e-9)
    assert comparison.agrees and len(comparison.differences) == 1 + 2 + 1 + 2
    comparison.raise_if_different()


def test_a_gradient_is_measured_by_the_largest_of_the_model() -> None:
    """A key bias' gradient is rounding noise: 1e-5 of nothing is nothing, 1e-5 of the model's is allowed by 1e-4."""
    noisy = compare(outcome(), outcome(bias=1e-5), 1e-4)
    (worst,) = noisy.worst("gradient")
    assert noisy.agrees and worst.name == "bias"
    assert worst.scale == 1.0 and worst.relative == pytest.approx(1e-5)
    assert not compare(outcome(), outcome(bias=1e-3), 1e-4).agrees


def test_a_parameter_is_measured_by_its_own_magnitude_but_at_least_one() -> None:
    assert compare(outcome(), outcome(parameter=10.0 + 5e-4), 1e-4).agrees
    assert not compare(outcome(parameter=0.1), outcome(parameter=0.1 + 5e-4), 1e-4).agrees
    assert compare(outcome(loss=0.1), outcome(loss=0.1 + 5e-5), 1e-4).agrees


@pytest.mark.parametrize("wrong", [{"loss": math.nan}, {"gradient": math.nan}, {"parameter": math.nan}])
def test_nan_never_agrees(wrong: dict) -> None:
    assert not compare(outcome(), outcome(**wrong), 1e9).agrees
    assert not compare(outcome(**wrong), outcome(), 1e9).agrees
    with pytest.raises(VerificationError, match="nan"):
        compare(outcome(), outcome(**wrong), 1e9).raise_if_different()


def test_the_message_names_the_worst_tensor_with_its_numbers() -> None:
    with pytest.raises(VerificationError, match=r"gradient w: 1 > 0.0001 x 1; parameter w: 2 > 0.0001 x 10"):
        compare(outcome(), outcome(gradient=2.0, parameter=12.0), 1e-4).raise_if_different()


def test_the_table_shows_the_largest_differences_first() -> None:
    table = compare(outcome(), outcome(gradient=1.5, bias=0.25), 1e-4).table(2)
    gradients = table.rows[1:3]
    assert [row[2] for row in gradients] == ["w", "bias"]
    assert gradients[0][:2] == ("gradient", "2") and gradients[1][:2] == ("", "")
    assert gradients[0][-1] == "DIFFERENT" and table.rows[0][-1] == "equal"


def test_missing_tensors_shapes_and_steps_are_refused() -> None:
    less = Outcome([2.0], {"w": torch.ones(2), "extra": torch.ones(1)}, outcome().parameters, outcome().buffers)
    with pytest.raises(VerificationError, match=r"gradients differ in names: missing \['bias'\], extra \['extra'\]"):
        compare(outcome(), less, 1e-9)
    flat = Outcome([2.0], {"w": torch.ones(3), "bias": torch.ones(1)}, outcome().parameters, outcome().buffers)
    with pytest.raises(VerificationError, match=r"gradient w has shape \[3\], on a single device \[2\]"):
        compare(outcome(), flat, 1e-9)
    with pytest.raises(VerificationError, match="expected 1 losses, got 2"):
        compare(outcome(), Outcome([1.0, 1.0], {}, {}, {}), 1e-9)


def test_outputs_with_equal_infinities_and_complex_numbers() -> None:
    def of(value: complex) -> Outcome:
        logits = torch.tensor([1.0, -math.inf])
        return Outcome([], {}, {}, {}, {"logits": logits, "phase": torch.tensor([value])})

    assert compare(of(1 + 1j), of(1 + 1j), 1e-9).agrees
    different = compare(of(1 + 1j), of(1 + 2j), 1e-9)
    assert not different.agrees and different.worst("output")[0].name == "phase"
    shifted = Outcome([], {}, {}, {}, {"logits": torch.tensor([1.5, -math.inf]), "phase": torch.tensor([1 + 1j])})
    assert not compare(of(1 + 1j), shifted, 1e-9).agrees  # an infinite scale would allow anything
