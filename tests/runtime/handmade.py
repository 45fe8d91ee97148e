"""Programs written by hand, for tests of the runtime that need no graph and no plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from searchspace.graph import Argument, Context, InputRef, Operator
from searchspace.layout import Layout, R, Region, Shape, local_shape, region_of, whole
from searchspace.mesh import Mesh
from searchspace.program import (
    ONCE,
    BoundOperator,
    Exchange,
    Instruction,
    Key,
    Program,
    SegmentCode,
    Slices,
    Slot,
    Step,
)
from searchspace.rule import Rule

PLAIN = Context()


class Code:
    """Builds a segment: ``code.call("aten.linear.default", ["x", "w"], {"y": (2, 3)})``."""

    def __init__(self, name: str, **inputs: Shape) -> None:
        self.name = name
        self.shapes: dict[str, Shape] = dict(inputs)
        self.variables = {variable: i for i, variable in enumerate(inputs)}
        self.count = len(inputs)
        self.operators: list[BoundOperator] = []

    def call(
        self,
        target: str,
        inputs: Sequence[str],
        outputs: Mapping[str, Shape],
        extra: Sequence[Argument] = (),
        kwargs: Mapping[str, Argument] = {},
        args: Sequence[Argument] | None = None,
        regions: Sequence[Region] | None = None,
        wholes: Sequence[Shape] | None = None,
        context: Context = PLAIN,
        module: str = "",
    ) -> Code:
        for name, shape in outputs.items():
            self.shapes[name] = shape
            self.variables[name] = len(self.variables)
        names = (*inputs, *outputs)
        shapes = [self.shapes[name] for name in names]
        operator = Operator(
            f"op{len(self.operators)}", target, tuple(args) if args is not None else
            (*(InputRef(i) for i in range(len(inputs))), *extra), tuple(kwargs.items()), tuple(inputs), tuple(outputs),
            Rule.opaque(shapes[: len(inputs)], shapes[len(inputs) :]), module=module, context=context,
        )  # fmt: skip
        self.operators.append(
            BoundOperator(
                operator,
                tuple(self.variables[n] for n in inputs),
                tuple(self.variables[n] for n in outputs),
                tuple(regions or (whole(s) for s in shapes)),
                tuple(wholes or shapes),
            )
        )
        return self

    def build(
        self, outputs: Sequence[str], differentiable: Sequence[str] = (), gradients: Sequence[str] = ()
    ) -> SegmentCode:
        order = list(self.variables)
        return SegmentCode(
            self.name, tuple(self.operators), self.count, tuple(self.variables[n] for n in outputs),
            tuple(n in differentiable for n in order[: self.count]), tuple(n in gradients for n in outputs),
        )  # fmt: skip


def slot(name: str, mesh: Mesh, layout: Layout = (R,), dtype: str = "float64", gradient: bool = False) -> Slot:
    return Slot(name, name, mesh, layout, dtype, R, gradient)


def program(
    world: int,
    steps: Sequence[Mapping[int, Instruction]],
    inputs: Sequence[str] = (),
    outputs: Sequence[str] = (),
    slots: Mapping[str, Slot] | None = None,
    **fields: Any,
) -> Program:
    """A program whose undeclared slots are float64 and replicated on all ranks."""
    mesh = Mesh.line(world)
    known = dict(slots or {})
    for name in (*inputs, *outputs, *_names(steps)):
        known.setdefault(name, slot(name, mesh))
    return Program(
        known, tuple(Step(s) for s in steps), tuple(range(world)), {n: n for n in inputs}, fields.pop("parameters", ()),
        {}, {}, {n: n for n in outputs}, **fields,
    )  # fmt: skip


def _names(steps: Sequence[Mapping[int, Instruction]]) -> list[str]:
    from searchspace.liveness import uses

    return [key[0] for step in steps for i in step.values() for keys in uses(i) for key in keys]


def once(*names: str) -> tuple[Key, ...]:
    return tuple((name, ONCE) for name in names)


def all_reduce(
    source: str, target: str, shape: Shape, group: Sequence[int], reduction: str = "sum", dtype: str = "float64"
) -> dict[int, Instruction]:
    full = whole(shape)
    entries = tuple((peer, full) for peer in group)
    return {
        r: Exchange(
            "all_reduce", tuple(group), (source, ONCE), (target, ONCE), entries, entries, reduction, shape, dtype
        )  # type: ignore[arg-type]
        for r in group
    }


def parts(mesh: Mesh, layout: Layout, shape: Shape) -> list[Region]:
    return [region_of(whole(shape), layout, mesh, rank) for rank in mesh.devices]


def all_gather(
    source: str, target: str, shape: Shape, mesh: Mesh, layout: Layout, dtype: str = "float64"
) -> dict[int, Instruction]:
    regions = parts(mesh, layout, shape)
    group = mesh.devices
    return {
        r: Exchange(
            "all_gather", group, (source, ONCE), (target, ONCE),
            tuple((peer, whole(local_shape(regions[i]))) for peer in group),
            tuple(zip(group, regions, strict=True)), None, shape, dtype,
        )
        for i, r in enumerate(group)
    }  # fmt: skip


def reduce_scatter(
    source: str, target: str, shape: Shape, mesh: Mesh, layout: Layout, dtype: str = "float64", reduction: str = "sum"
) -> dict[int, Instruction]:
    regions = parts(mesh, layout, shape)
    group = mesh.devices
    return {
        r: Exchange(
            "reduce_scatter", group, (source, ONCE), (target, ONCE), tuple(zip(group, regions, strict=True)),
            tuple((peer, whole(local_shape(regions[i]))) for peer in group), reduction, local_shape(regions[i]), dtype,  # type: ignore[arg-type]
        )
        for i, r in enumerate(group)
    }  # fmt: skip


def all_to_all(
    source: str, target: str, shape: Shape, mesh: Mesh, before: Layout, after: Layout, dtype: str = "float64"
) -> dict[int, Instruction]:
    from searchspace.layout import intersect, relative

    have, want = parts(mesh, before, shape), parts(mesh, after, shape)
    group = mesh.devices
    found: dict[int, Instruction] = {}
    for i, r in enumerate(group):
        send: list[tuple[int, Slices]] = []
        receive: list[tuple[int, Slices]] = []
        for j, peer in enumerate(group):
            out, into = intersect(have[i], want[j]), intersect(have[j], want[i])
            if out is not None:
                send.append((peer, relative(out, have[i])))
            if into is not None:
                receive.append((peer, relative(into, want[i])))
        found[r] = Exchange(
            "all_to_all", group, (source, ONCE), (target, ONCE), tuple(send), tuple(receive), None,
            local_shape(want[i]), dtype,
        )  # fmt: skip
    return found


def send_receive(
    source: str, target: str, shape: Shape, origin: int, goals: Sequence[int], dtype: str = "float64"
) -> dict[int, Instruction]:
    group = (origin, *goals)
    full = whole(shape)
    found: dict[int, Instruction] = {
        origin: Exchange(
            "send_receive", group, (source, ONCE), None, tuple((g, full) for g in goals), (), None, shape, dtype
        )
    }
    for goal in goals:
        found[goal] = Exchange("send_receive", group, None, (target, ONCE), (), ((origin, full),), None, shape, dtype)
    return found
