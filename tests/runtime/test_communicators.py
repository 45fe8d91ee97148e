"""Both communicators do the same, bit for bit, for every kind of exchange; uneven parts are ordinary."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from autoplan.runtime import launch
from autoplan.runtime.codegen import SegmentCompiler
from autoplan.runtime.in_process import InProcess
from autoplan.runtime.launch import WorkerPool
from autoplan.runtime.store import Store
from searchspace.layout import R, Split, local_shape
from searchspace.mesh import Mesh
from searchspace.program import ONCE, Exchange, Free, Program
from tests.runtime.handmade import (
    all_gather,
    all_reduce,
    all_to_all,
    once,
    parts,
    program,
    reduce_scatter,
    send_receive,
)

CPU = torch.device("cpu")
LINE = Mesh.line(4)
MIXED = Mesh((("x", 3),), (2, 0, 3))
"""A group whose order is not ascending."""


def values(shape: tuple[int, ...], rank: int, dtype: str = "float64") -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * 10).to(getattr(torch, dtype))


def local(mesh: Mesh, layout: tuple, shape: tuple[int, ...], dtype: str = "float64") -> dict[int, Tensor]:
    return {
        rank: values(local_shape(region), rank, dtype)
        for rank, region in zip(mesh.devices, parts(mesh, layout, shape), strict=True)
    }


def moved(dtype: str) -> dict[str, tuple[Program, dict[int, Tensor]]]:
    """Programs from input ``x`` to output ``y``, with each rank's ``x``."""
    found = {}
    for name, mesh in {"line": LINE, "mixed": MIXED}.items():
        for label, layout in {"dim 0": (Split(0),), "dim 1": (Split(1),)}.items():
            for size, shape in {"even": (12, 12), "uneven": (7, 13)}.items():
                case = f"{name}, {label}, {size}"
                other = (Split(1 - layout[0].dim),)
                found[f"all_gather, {case}"] = (all_gather("x", "y", shape, mesh, layout, dtype), layout, shape, mesh)
                found[f"all_to_all, {case}"] = (
                    all_to_all("x", "y", shape, mesh, layout, other, dtype), layout, shape, mesh
                )  # fmt: skip
    found["send to three"] = (send_receive("x", "y", (3, 5), 2, [0, 1, 3], dtype), (R,), (3, 5), LINE)
    found["scalar"] = (send_receive("x", "y", (), 1, [3], dtype), (R,), (), LINE)
    return {
        name: (partly(steps), local(mesh, layout, shape, dtype)) for name, (steps, layout, shape, mesh) in found.items()
    }


def partly(steps: Mapping[int, Exchange]) -> Program:
    """A program in which not all ranks take part: the others have no result."""
    from tests.runtime.handmade import slot

    mesh = Mesh((("x", len(steps)),), tuple(steps))
    goals = tuple(r for r, e in steps.items() if e.target)
    slots = {"x": slot("x", mesh), "y": slot("y", Mesh((("x", len(goals)),), goals))}
    return program(4, [steps], ["x"], ["y"], slots)


def reduced() -> dict[str, tuple[Program, dict[int, Tensor]]]:
    found = {}
    for dtype, reduction in (
        ("float64", "sum"),
        ("float32", "max"),
        ("bfloat16", "sum"),
        ("int64", "sum"),
        ("bool", "sum"),
    ):
        for mesh in (LINE, MIXED):
            case = f"{dtype} {reduction} {mesh.devices}"
            exchange = all_reduce("x", "y", (5, 3), mesh.devices, reduction, dtype)
            found[f"all_reduce {case}"] = (exchange, local(mesh, (R,), (5, 3), dtype))
            if dtype == "bool":
                continue
            for shape in ((12, 2), (7, 2)):
                for layout in ((Split(0),), (Split(1, 1),)) if shape[0] == 12 else ((Split(0),),):
                    if layout[0].dim == 1:
                        shape = (2, 7)
                    exchange = reduce_scatter("x", "y", shape, mesh, layout, dtype, reduction)
                    found[f"reduce_scatter {case} {shape} {layout[0]}"] = (exchange, local(mesh, (R,), shape, dtype))
    return {name: (partly(steps), data) for name, (steps, data) in found.items()}


def in_process(case: Program, data: Mapping[int, Tensor]) -> dict[int, Tensor | None]:
    stores = {rank: Store() for rank in case.ranks}
    run = InProcess(len(case.ranks)).prepare(case, stores, SegmentCompiler(CPU))
    for rank, value in data.items():
        stores[rank].put(("x", ONCE), value.clone())
    run()
    return {rank: store.buffers.get(("y", ONCE)) for rank, store in stores.items()}


def on_this_rank(cases: Mapping[str, tuple[Program, Mapping[int, Tensor]]]) -> dict[str, Tensor | None]:
    transport = launch.join()
    found = {}
    for name, (case, data) in cases.items():
        store = Store()
        run = transport.prepare(case, {transport.rank: store}, SegmentCompiler(CPU))
        if transport.rank in data:
            store.put(("x", ONCE), data[transport.rank].clone())
        run()
        found[name] = store.buffers.get(("y", ONCE))
    return found


def close(a: Tensor | None, b: Tensor | None) -> bool:
    """Equal but for the order in which a backend adds."""
    if a is None or b is None:
        return a is b
    scale = 0.25 if a.dtype == torch.bfloat16 else 1e-12
    return a.dtype == b.dtype and a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=1e-12, atol=scale)


@pytest.mark.parametrize("dtype", ["float64", "bool", "complex64", "int16"])
def test_movements_are_equal_on_processes(pool: WorkerPool, dtype: str) -> None:
    cases = moved(dtype)
    results = pool.run(on_this_rank, cases)
    for name, (case, data) in cases.items():
        expected = in_process(case, data)
        for rank, found in enumerate(results):
            want = expected[rank]
            assert (found[name] is None) == (want is None), (name, rank)
            assert want is None or found[name].equal(want), (name, rank)


def test_reductions_are_equal_on_processes(pool: WorkerPool) -> None:
    cases = reduced()
    results = pool.run(on_this_rank, cases)
    for name, (case, data) in cases.items():
        expected = in_process(case, data)
        for rank, found in enumerate(results):
            assert close(found[name], expected[rank]), (name, rank, found[name], expected[rank])


def test_in_process_against_plain_torch() -> None:
    case, data = moved("float64")["all_gather, mixed, dim 1, uneven"]
    whole = torch.cat([data[rank] for rank in MIXED.devices], 1)
    assert all(in_process(case, data)[rank].equal(whole) for rank in MIXED.devices)
    case, data = moved("float64")["all_to_all, line, dim 0, uneven"]
    whole = torch.cat([data[rank] for rank in range(4)])
    wanted = whole.split([4, 3, 3, 3], 1)
    assert all(in_process(case, data)[rank].equal(wanted[rank]) for rank in range(4))
    case, data = reduced()["reduce_scatter float64 sum (2, 0, 3) (7, 2) S(0)"]
    total = sum(data[rank] for rank in MIXED.devices)
    for part, rank in zip(total.split([3, 2, 2]), MIXED.devices, strict=True):
        assert torch.allclose(in_process(case, data)[rank], part)


def test_several_entries_a_peer_self_copy_and_zeros(pool: WorkerPool) -> None:
    """Rank 0 sends two pieces to rank 1, keeps one itself; what nobody fills is zero."""
    x, y = ("x", ONCE), ("y", ONCE)
    rows = [((i, i + 1), (0, 3)) for i in range(4)]
    out = ((1, rows[2]), (0, rows[1]), (1, rows[0]))
    into = ((0, rows[0]), (0, rows[1]))
    steps = {
        0: Exchange("send_receive", (0, 1), x, y, out, ((0, rows[3]),), None, (4, 3), "float64"),
        1: Exchange("send_receive", (0, 1), None, y, (), into, None, (4, 3), "float64"),
    }
    case, data = partly(steps), {0: values((4, 3), 0, "float32"), 1: values((4, 3), 1)}
    expected = in_process(case, data)
    first = torch.zeros(4, 3, dtype=torch.float64)
    first[3] = data[0][1]
    assert expected[0].equal(first)
    second = torch.zeros(4, 3, dtype=torch.float64)
    second[0], second[1] = data[0][2], data[0][0]
    assert expected[1].equal(second)
    for rank, found in enumerate(pool.run(on_this_rank, {"case": (case, data)})):
        assert (expected[rank] is None and found["case"] is None) or found["case"].equal(expected[rank])


def test_reduced_point_to_point(pool: WorkerPool) -> None:
    """Rank 2 adds what ranks 0, 1 and itself hold, as gradients of a tied weight meet."""
    full = ((0, 3),)
    steps = {
        r: Exchange("send_receive", (0, 1, 2), ("x", ONCE), ("y", ONCE) if r == 2 else None, ((2, full),),
                    tuple((p, full) for p in (0, 1, 2)) if r == 2 else (), "sum", (3,), "float64")
        for r in (0, 1, 2)
    }  # fmt: skip
    case, data = partly(steps), {r: values((3,), r) for r in range(3)}
    want = data[0] + data[1] + data[2]
    assert in_process(case, data)[2].equal(want)
    assert pool.run(on_this_rank, {"case": (case, data)})[2]["case"].equal(want)


def test_local_pieces(pool: WorkerPool) -> None:
    """Local exchanges slice, place among zeros, and make zeros."""
    x, y = ("x", ONCE), ("y", ONCE)
    middle, full = ((1, 3),), ((0, 2),)
    cut = {0: Exchange("local", (0,), x, ("m", ONCE), ((0, middle),), ((0, full),), None, (2,), "float64")}
    pad = {0: Exchange("local", (0,), ("m", ONCE), y, ((0, full),), ((0, middle),), None, (4,), "float64")}
    zero = {1: Exchange("local", (1,), None, y, (), (), None, (4,), "float64")}
    from tests.runtime.handmade import slot

    slots = {"y": slot("y", Mesh.line(2))}
    case = program(4, [cut, pad, zero, {0: Free(once("m"))}], ["x"], ["y"], slots)
    data = {r: values((4,), r) for r in range(4)}
    results = pool.run(on_this_rank, {"case": (case, data)})
    want = data[0].clone()
    want[0] = want[3] = 0
    for found in (in_process(case, data), {r: result["case"] for r, result in enumerate(results)}):
        assert found[0].equal(want) and found[1].equal(torch.zeros(4, dtype=torch.float64)) and found[2] is None
