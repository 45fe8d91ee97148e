"""Which buffers matter to whom: read off a rank's instructions."""

from __future__ import annotations

from searchspace.liveness import changing
from searchspace.program import ONCE, Accumulate, Alias, Backward, Exchange, Key


def key(name: str, micro_batch: int = ONCE) -> Key:
    return (name, micro_batch)


def backward(micro_batch: int, *gradients: Key | None) -> Backward:
    return Backward("s", micro_batch, (key("d_y", micro_batch),), gradients)


def test_what_is_added_to_again_or_sent_changes() -> None:
    found = changing(
        (
            backward(0, key("d_w"), key("d_x", 0), None),
            Exchange("send_receive", (0, 1), key("d_x", 0), None),
            backward(1, key("d_w"), key("d_x", 1), None),
            Accumulate(key("loss", 0), key("loss")),
            Alias(key("loss"), key("result")),
            Accumulate(key("d_x", 1), key("d_v")),
            backward(1, key("d_v")),
        )
    )
    assert found == {key("d_w"), key("d_x", 0), key("d_v")}


def test_one_backward_changes_nothing() -> None:
    assert changing((backward(0, key("d_w"), key("d_x", 0)),)) == frozenset()
