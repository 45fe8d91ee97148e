"""The engine against plain autograd: gradients, accumulation, aliases, released inputs, missing gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from autoplan.runtime.codegen import SegmentCompiler
from autoplan.runtime.engine import Engine, run_calls
from autoplan.runtime.store import Store
from searchspace.layout import R
from searchspace.mesh import Mesh
from searchspace.program import ONCE, Accumulate, Alias, Backward, Forward, Free, Instruction, Key, Ones, Slot
from tests.runtime.handmade import Code, once

CPU = torch.device("cpu")
X, W1, W2 = torch.randn(6, 4).double(), torch.randn(5, 4).double(), torch.randn(3, 5).double()


class Rank:
    """One rank with a store; slots are float64 unless named in ``dtypes``."""

    def __init__(self, **dtypes: str) -> None:
        self.dtypes = dtypes
        self.store = Store()

    def run(self, *instructions: Instruction) -> None:
        from searchspace.liveness import uses

        mesh = Mesh.line(1)
        names = [key[0] for i in instructions for keys in uses(i) for key in keys]
        slots = {n: Slot(n, n, mesh, (R,), self.dtypes.get(n, "float64"), R) for n in names}
        engine = Engine(self.store, slots, SegmentCompiler(CPU))
        with torch.no_grad():
            run_calls([engine.bind(i) for i in instructions], instructions)

    def put(self, **values: Tensor) -> None:
        for name, value in values.items():
            self.store.put((name, ONCE), value)

    def __getitem__(self, key: str | Key) -> Tensor:
        return self.store.buffers[(key, ONCE) if isinstance(key, str) else key]


def first(rows: int, width: int = 4) -> Code:
    code = Code("first", x=(rows, 4), w1=(5, 4))
    code.call("aten.linear.default", ["x", "w1"], {"a": (rows, 5)})
    return code.call("aten.relu.default", ["a"], {"h": (rows, 5)})


def second(rows: int) -> Code:
    code = Code("second", h=(rows, 5), w2=(3, 5))
    code.call("aten.linear.default", ["h", "w2"], {"b": (rows, 3)})
    code.call("aten.pow.Tensor_Scalar", ["b"], {"c": (rows, 3)}, extra=[2])
    return code.call("aten.sum.default", ["c"], {"loss": ()})


def reference() -> tuple[Tensor, ...]:
    leaves = [t.clone().requires_grad_() for t in (X, W1, W2)]
    loss = F.linear(F.linear(leaves[0], leaves[1]).relu(), leaves[2]).pow(2).sum()
    return (loss.detach(), *torch.autograd.grad(loss, leaves))


def two_segments(micro_batches: int, released: tuple[int, ...] = ()) -> list[Instruction]:
    rows = 6 // micro_batches
    one = first(rows).build(["h"], ["x", "w1"], ["h"])
    two = second(rows).build(["loss"], ["h", "w2"], ["loss"])
    found: list[Instruction] = [Ones(("d_loss", ONCE), (), "float64")]
    for m in range(micro_batches):
        found += [
            Forward(one, m, (("x", m), ("w1", ONCE)), (("h", m),), True, released),
            Forward(two, m, (("h", m), ("w2", ONCE)), (("loss", m),), True),
            Accumulate(("loss", m), ("loss", ONCE)),
            Free((("loss", m), ("h", m))),
        ]
    for m in range(micro_batches):
        found += [
            Backward("second", m, (("d_loss", ONCE),), (("d_h", m), ("d_w2", ONCE))),
            Backward("first", m, (("d_h", m),), (("d_x", m), ("d_w1", ONCE)), (("w1", ONCE),) * len(released)),
            Free((("d_h", m),)),
        ]
    return found


@pytest.mark.parametrize("micro_batches", [1, 2, 3])
def test_parity_with_autograd(micro_batches: int) -> None:
    rank = Rank()
    rank.put(w1=torch.nn.Parameter(W1.clone()), w2=W2.clone())
    for m, part in enumerate(X.chunk(micro_batches)):
        rank.store.put(("x", m), part)
    rank.run(*two_segments(micro_batches))
    loss, d_x, d_w1, d_w2 = reference()
    torch.testing.assert_close(rank["loss"], loss)
    torch.testing.assert_close(rank["d_w1"], d_w1)
    torch.testing.assert_close(rank["d_w2"], d_w2)
    torch.testing.assert_close(torch.cat([rank[("d_x", m)] for m in range(micro_batches)]), d_x)
    assert not rank.store.kept
    assert all(not value.requires_grad for key, value in rank.store.buffers.items() if key[0] != "w1")


def test_forward_without_keep_makes_no_graph() -> None:
    rank = Rank()
    rank.put(x=X, w1=torch.nn.Parameter(W1.clone()))
    rank.run(Forward(first(6).build(["h"], ["w1"], ["h"]), 0, once("x", "w1"), once("h"), False))
    assert not rank["h"].requires_grad and not rank.store.kept


def test_gradients_that_share_a_buffer_are_not_changed_in_place() -> None:
    """``x + y`` gives both inputs the very gradient of its output; adding to one must spare the other."""
    code = Code("sum", x=(3,), y=(3,)).call("aten.add.Tensor", ["x", "y"], {"z": (3,)}).build(["z"], ["x", "y"], ["z"])
    rank = Rank()
    rank.put(x=torch.ones(3).double(), y=torch.ones(3).double(), d_z=torch.tensor([1.0, 2.0, 3.0]).double())
    seed = rank["d_z"].clone()
    step = (
        Forward(code, 0, once("x", "y"), once("z"), True),
        Backward("sum", 0, once("d_z"), once("d_x", "d_y")),
    )
    rank.run(*step)
    rank.run(*step, *step)
    rank.run(Accumulate(*once("d_x", "total")), Accumulate(*once("d_z", "total")), Accumulate(*once("d_z", "d_x")))
    assert rank["d_z"].equal(seed)
    assert rank["d_y"].equal(3 * seed) and rank["d_x"].equal(4 * seed) and rank["total"].equal(4 * seed)


def test_views_of_one_gradient_are_added_to_apart() -> None:
    """Both inputs get views of one tensor; ``Tensor.backward`` would add to both at once (torch 2.13 does)."""
    code = Code("sum", x=(4,), y=(4,))
    for name in "xy":
        code.call("aten.reshape.default", [name], {f"{name}2": (2, 2)}, extra=[(2, 2)])
    code.call("aten.add.Tensor", ["x2", "y2"], {"z": (2, 2)}).call("aten.pow.Tensor_Scalar", ["z"], {"p": (2, 2)}, [2])
    built = code.build(["p"], ["x", "y"], ["p"])
    rank = Rank()
    rank.put(x=torch.ones(4).double(), y=torch.ones(4).double(), d_p=torch.ones(2, 2).double())
    for count in (1, 2, 3):
        rank.run(
            Forward(built, 0, once("x", "y"), once("p"), True),
            Backward("sum", 0, once("d_p"), once("d_x", "d_y")),
        )
        assert rank["d_x"].eq(4 * count).all() and rank["d_y"].eq(4 * count).all()


def test_autograd_adds_to_totals_in_place() -> None:
    """From the second micro-batch on, without touching a total that somebody else has come to see."""
    code = Code("square", w=(3,)).call("aten.pow.Tensor_Scalar", ["w"], {"p": (3,)}, [2]).build(["p"], ["w"], ["p"])
    rank = Rank()
    weight = torch.nn.Parameter(torch.ones(3).double())
    rank.put(w=weight, d_p=torch.ones(3).double())
    step = (Forward(code, 0, once("w"), once("p"), True), Backward("square", 0, once("d_p"), once("d_w")))
    rank.run(*step)
    total = rank["d_w"]
    rank.run(*step)
    assert rank["d_w"] is total and total.eq(4).all()
    rank.run(Alias(*once("d_w", "seen")), *step, *step)
    assert rank["seen"].eq(4).all() and rank["d_w"].eq(8).all()
    rank.run(Free(once("d_w")), *step)
    assert rank["d_w"].eq(2).all()
    rank.store.clear()
    assert weight.grad is None


def test_alias_is_spared_by_accumulation() -> None:
    rank = Rank()
    rank.put(a=torch.ones(2).double(), b=torch.ones(2).double())
    rank.run(
        Accumulate(*once("a", "t")), Accumulate(*once("b", "t")),  # t is owned now
        Alias(*once("t", "u")), Accumulate(*once("b", "t")), Accumulate(*once("b", "t")),
    )  # fmt: skip
    assert rank["u"].eq(2).all() and rank["t"].eq(4).all() and rank["a"].eq(1).all()


def test_owned_buffers_are_added_to_in_place() -> None:
    rank = Rank()
    rank.put(a=torch.ones(2).double())
    rank.run(Accumulate(*once("a", "t")), Accumulate(*once("a", "t")))
    where = rank["t"].data_ptr()
    rank.run(Accumulate(*once("a", "t")))
    assert rank["t"].data_ptr() == where and rank["t"].eq(3).all()


def test_unused_input_and_missing_seed_give_zeros() -> None:
    code = Code("s", x=(3,), y=(3,)).call("aten.mul.Tensor", ["x", "x"], {"z": (3,)}).build(["z"], ["x", "y"], ["z"])
    rank = Rank()
    rank.put(x=torch.ones(3).double(), y=torch.ones(3).double(), d_z=torch.ones(3).double())
    forward = Forward(code, 0, once("x", "y"), once("z"), True)
    rank.run(forward, Backward("s", 0, once("d_z"), once("d_x", "d_y")))
    assert rank["d_x"].eq(2).all() and rank["d_y"].eq(0).all()
    rank.run(forward, Free(once("d_z", "d_x", "d_y")), Backward("s", 0, once("d_z"), once("d_x", "d_y")))
    assert rank["d_x"].eq(0).all() and rank["d_y"].eq(0).all()


def test_gradients_accumulate_in_the_dtype_of_their_slot() -> None:
    """Eight bfloat16 gradients of 1 + 2^-7 summed in float32: exact, which bfloat16 is not."""
    code = Code("s", x=(1,), w=(1,)).call("aten.mul.Tensor", ["x", "w"], {"z": (1,)}).build(["z"], ["w"], ["z"])
    rank = Rank(d_w="float32", t="float32")
    value = torch.tensor([1 + 2**-7], dtype=torch.bfloat16)
    rank.put(x=value, w=torch.ones(1, dtype=torch.bfloat16), d_z=torch.ones(1, dtype=torch.bfloat16))
    for _ in range(8):
        rank.run(
            Forward(code, 0, once("x", "w"), once("z"), True),
            Backward("s", 0, (("d_z", ONCE),), (None, ("d_w", ONCE))),
            Accumulate(*once("x", "t")),
        )
    assert rank["d_w"].dtype == rank["t"].dtype == torch.float32
    assert rank["d_w"].item() == rank["t"].item() == 8 * (1 + 2**-7)


def test_booleans_accumulate_by_or() -> None:
    rank = Rank(t="bool")
    for value in ([True, False, False], [True, True, False], [False, False, False]):
        rank.put(a=torch.tensor(value))
        rank.run(Accumulate(*once("a", "t")))
    assert rank["t"].tolist() == [True, True, False]


def test_released_inputs_are_not_held_and_come_back() -> None:
    """After the forward nothing holds the gathered weight; backward reads it again from its key."""
    rank = Rank()
    rank.put(w2=W2.clone())
    rank.store.put(("x", 0), X)
    rank.put(w1=W1.clone())
    storage = StorageWeakRef(rank["w1"].untyped_storage())
    forward, backward = two_segments(1, (1,))[:5], two_segments(1, (1,))[5:]
    rank.run(*forward)
    rank.store.forget(("w1", ONCE))
    assert storage.expired()
    rank.put(w1=W1.clone())
    rank.run(*backward)
    _, d_x, d_w1, d_w2 = reference()
    torch.testing.assert_close(rank["d_w1"], d_w1)
    torch.testing.assert_close(rank["d_w2"], d_w2)
    torch.testing.assert_close(rank[("d_x", 0)], d_x)


def test_error_names_the_instruction() -> None:
    rank = Rank()
    rank.put(x=torch.ones(2, 3).double(), w1=W1)
    with pytest.raises(RuntimeError) as caught:
        rank.run(Forward(first(6).build(["h"]), 0, once("x", "w1"), once("h"), False))
    assert "at instruction 1 of 1: forward of segment first, micro-batch 0" in caught.value.__notes__
