import pytest

from costmodel.device import preset
from costmodel.optimizer import OPTIMIZERS, optimizer_cost, state_bytes, step_bytes, step_seconds
from searchspace.errors import IllegalPlanError

DEVICE = preset("a100-80gb")


@pytest.mark.parametrize(("name", "words"), [("sgd", 0), ("momentum", 1), ("adam", 2), ("adamw", 2), ("AdamW", 2)])
def test_state_by_optimizer(name, words):
    assert state_bytes(1000, name) == words * 4 * 1000
    assert state_bytes(1000, name, "float64") == words * 8 * 1000


def test_a_step_is_bound_by_memory_and_linear():
    seconds = step_seconds(10**9, "adamw", DEVICE)
    assert seconds == pytest.approx(21 * 4e9 / (2039e9 * 0.85))
    assert step_seconds(2 * 10**9, "adamw", DEVICE) == pytest.approx(2 * seconds)
    assert step_seconds(10**9, "sgd", DEVICE) < step_seconds(10**9, "momentum", DEVICE) < seconds
    assert step_seconds(0, "adamw", DEVICE) == 0


def test_every_optimizer_moves_at_least_parameter_gradient_and_state():
    for name, cost in OPTIMIZERS.items():
        if name != "none":
            assert cost.traffic >= 3 + 2 * cost.states, name


def test_temporaries_of_a_step():
    assert step_bytes(1000, "adamw") == 4000
    assert step_bytes(1000, "sgd") == 0


def test_an_unknown_optimizer_names_the_known_ones():
    with pytest.raises(IllegalPlanError, match="unknown optimizer 'muon'; known optimizers are none, sgd, momentum"):
        optimizer_cost("muon")
