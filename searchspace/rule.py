"""Dimension rules: the ways in which op-trans may split an operator.

A rule gives every tensor dimension of an operator at most one *identifier*.  Splitting the
operator along an identifier splits every tensor dimension that carries it, in the same number
of whole units.  A merged dimension ``(h d)`` carries its outermost identifier ``h`` with the
unit ``d``.  An identifier that an output lacks must be *reduced*: splitting it makes that output
partial.  A dimension without identifier is never split.

The rule of ``linear`` on ``x[b s k], w[n k], bias[n] -> y[b s n]``::

    inputs     ((b, s, k), (n, k), (n,))      outputs  ((b, s, n),)
    reductions {"k": "sum"}                   added    (2,)     # the bias is added once
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from searchspace.errors import RuleError
from searchspace.layout import P, Partial, Placement, R, Reduction, Shape, Split

Identifier = str


@dataclass(frozen=True)
class DimUse:
    """A tensor dimension carries ``id``; one unit of the identifier is ``unit`` elements."""

    id: Identifier
    unit: int = 1


DimUses = tuple[DimUse | None, ...]


@dataclass(frozen=True)
class Choice:
    """One way to place an operator on one axis of a mesh.

    ``label`` is what a plan writes: an identifier, ``"+i,j"`` for passing partial sums of
    inputs i and j through, or ``""`` for replication.
    """

    label: str
    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]

    @property
    def divides(self) -> bool:
        """Whether the axis' devices do different work."""
        return any(placement != R for placement in self.outputs)


@dataclass(frozen=True)
class Rule:
    """The dimension rule of one operator instance (see the module's docstring).

    Fields
        inputs, outputs: the identifier of each dimension of each tensor.
        reductions: for each identifier that outputs may lack, how their parts combine.
        added: inputs that enter the reduced sum once (a bias); partial where it is partial.
        linear: sets of inputs in which the operator is jointly linear and homogeneous, so that
            partial sums of exactly these inputs make partial sums of all outputs.
        text: the notation it came from, for messages.
    """

    inputs: tuple[DimUses, ...]
    outputs: tuple[DimUses, ...]
    reductions: tuple[tuple[Identifier, Reduction], ...] = ()
    added: tuple[int, ...] = ()
    linear: tuple[tuple[int, ...], ...] = ()
    text: str = ""

    def __post_init__(self) -> None:
        reduced = dict(self.reductions)
        for uses in self.inputs + self.outputs:
            ids = [use.id for use in uses if use is not None]
            if len(set(ids)) != len(ids):
                raise RuleError(f"rule {self.text!r}: one tensor carries an identifier twice: {ids}")
        for identifier in self.identifiers:
            lacking = [i for i, uses in enumerate(self.outputs) if identifier not in _ids(uses)]
            if lacking and identifier not in reduced:
                raise RuleError(
                    f"rule {self.text!r}: output {lacking[0]} lacks {identifier!r}, which is not a reduction"
                )

    @cached_property
    def identifiers(self) -> tuple[Identifier, ...]:
        """All identifiers, in order of appearance."""
        found: dict[Identifier, None] = {}
        for uses in self.inputs + self.outputs:
            for use in uses:
                if use is not None:
                    found.setdefault(use.id)
        return tuple(found)

    @cached_property
    def choices(self) -> dict[str, Choice]:
        """Every choice on one axis, by label; the first is replication."""
        found = {"": Choice("", (R,) * len(self.inputs), (R,) * len(self.outputs))}
        reduced = dict(self.reductions)
        for identifier in self.identifiers:
            inputs = [
                P
                if i in self.added and identifier in reduced and identifier not in _ids(uses)
                else _placement(uses, identifier, None)
                for i, uses in enumerate(self.inputs)
            ]
            outputs = [_placement(uses, identifier, reduced.get(identifier)) for uses in self.outputs]
            found[identifier] = Choice(identifier, tuple(inputs), tuple(outputs))
        for together in self.linear:
            label = "+" + ",".join(map(str, together))
            found[label] = Choice(
                label,
                tuple(P if i in together else R for i in range(len(self.inputs))),
                (P,) * len(self.outputs),
            )
        return found

    def units(self, identifier: Identifier, shapes: Sequence[Shape]) -> int:
        """How many units ``identifier`` has, given the shapes of inputs, then outputs."""
        for uses, shape in zip(self.inputs + self.outputs, shapes, strict=True):
            for use, extent in zip(uses, shape, strict=True):
                if use is not None and use.id == identifier:
                    return extent // use.unit
        raise RuleError(f"rule {self.text!r} has no identifier {identifier!r}; it has {self.identifiers}")

    def check(self, shapes: Sequence[Shape]) -> None:
        """Raise RuleError unless the rule fits tensors of ``shapes`` (inputs, then outputs)."""
        every = self.inputs + self.outputs
        if len(every) != len(shapes):
            raise RuleError(f"rule {self.text!r} describes {len(every)} tensors, the operator has {len(shapes)}")
        counts: dict[Identifier, int] = {}
        for uses, shape in zip(every, shapes, strict=True):
            if len(uses) != len(shape):
                raise RuleError(f"rule {self.text!r}: {len(uses)} dimensions for a tensor of shape {shape}")
            for use, extent in zip(uses, shape, strict=True):
                if use is None:
                    continue
                if extent % use.unit:
                    raise RuleError(f"rule {self.text!r}: {use.id!r} has units of {use.unit} in an extent of {extent}")
                if counts.setdefault(use.id, extent // use.unit) != extent // use.unit:
                    raise RuleError(
                        f"rule {self.text!r}: {use.id!r} means {counts[use.id]} units and {extent // use.unit} units"
                    )

    def coarsened(self, identifier: Identifier, factor: int) -> Rule:
        """The same rule with ``identifier`` cut at multiples of ``factor`` of its present units."""

        def coarse(uses: DimUses) -> DimUses:
            return tuple(replace(u, unit=u.unit * factor) if u is not None and u.id == identifier else u for u in uses)

        return replace(self, inputs=tuple(map(coarse, self.inputs)), outputs=tuple(map(coarse, self.outputs)))

    @classmethod
    def opaque(cls, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Rule:
        """The rule of an operator that can only be replicated."""
        return cls(
            tuple((None,) * len(shape) for shape in inputs),
            tuple((None,) * len(shape) for shape in outputs),
            text="opaque",
        )


def _ids(uses: DimUses) -> list[Identifier]:
    return [use.id for use in uses if use is not None]


def _placement(uses: DimUses, identifier: Identifier, reduction: Reduction | None) -> Placement:
    for dim, use in enumerate(uses):
        if use is not None and use.id == identifier:
            return Split(dim, use.unit)
    return R if reduction is None else Partial(reduction)
