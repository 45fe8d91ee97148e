"""The text form of dimension rules: ``"* k+, n k+, n & -> * n"``.

Inputs are separated by commas, ``->`` comes before the outputs; a tensor lists its dimensions:

    a, h1      an identifier: everything that carries it is split together
    a^         must stay whole
    k+, k+max  may be split where an output lacks it: the parts are summands (candidates of a maximum);
               an identifier that an output lacks is ``+`` by itself, as in einsum
    (h d)      one dimension merged from several, outermost first; only the outermost can be split
    3          a dimension of this extent, never split; ``1`` alone is also a 0-d tensor
    *          any number of leading dimensions, the same everywhere
    &          (after the dimensions of an input) added to the sum once, like the bias of a linear layer
    ?          not a tensor

An identifier that is ``^`` anywhere, or lies inside a merged dimension behind another of extent > 1, is never
split.  The notation follows nnScaler's annotations (OSDI'24), with ``+max`` and ``&`` added.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from searchspace.errors import RuleError
from searchspace.layout import Reduction, Shape
from searchspace.rule import DimUse, DimUses, Identifier, Rule

_TOKEN = re.compile(r"\s*(?:([A-Za-z_]\w*)(\^|\+max|\+)?|(\d+)\^?|(->)|([()*?,&]))")
_REST = "*"


@dataclass(frozen=True)
class Name:
    """One identifier inside a dimension, with its mark: ``""``, ``"^"``, ``"+"`` or ``"+max"``."""

    id: Identifier
    mark: str = ""


Atom = Name | int
Dimension = tuple[Atom, ...]
"""The factors of a dimension, outermost first; a plain dimension has one."""


@dataclass(frozen=True)
class Term:
    """One tensor of a rule: its dimensions, whether ``*`` comes first, and whether it is added once."""

    dims: tuple[Dimension, ...]
    leading: bool = False
    added: bool = False


@dataclass(frozen=True)
class Notation:
    """A parsed rule text; None stands for a non-tensor.  See the module's docstring."""

    inputs: tuple[Term | None, ...]
    outputs: tuple[Term | None, ...]
    text: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        marks: dict[Identifier, str] = {}
        for term in self._terms:
            for dim in term.dims:
                for atom in dim:
                    if isinstance(atom, Name):
                        known = marks.setdefault(atom.id, atom.mark)
                        if known != atom.mark and "^" in (known, atom.mark):
                            raise RuleError(
                                f"rule {self.text!r}: {atom.id!r} is marked {known!r} in one place and "
                                f"{atom.mark!r} in another"
                            )

    @property
    def _terms(self) -> tuple[Term, ...]:
        return tuple(term for term in self.inputs + self.outputs if term is not None)

    @cached_property
    def frozen(self) -> frozenset[Identifier]:
        """Identifiers that are never split: marked so, or not outermost in some dimension."""
        found = set()
        for term in self._terms:
            for dim in term.dims:
                outermost = True
                for atom in dim:
                    if isinstance(atom, Name):
                        if atom.mark == "^" or not outermost:
                            found.add(atom.id)
                        outermost = False
                    elif atom != 1:
                        outermost = False
        return frozenset(found)

    @cached_property
    def reductions(self) -> dict[Identifier, Reduction]:
        """How the parts of each identifier that an output lacks combine."""
        found: dict[Identifier, Reduction] = {}
        outputs = [_names(term) for term in self.outputs if term is not None]
        for term in self._terms:
            for atom in _names(term):
                lacking = not all(atom.id in {n.id for n in names} for names in outputs)
                if lacking and atom.id not in self.frozen and found.get(atom.id) != "max":
                    found[atom.id] = "max" if atom.mark == "+max" else "sum"
        return found

    @property
    def split_space(self) -> tuple[tuple[int, int], ...]:
        """(input, dimension) pairs that can be split; ``*`` counts as dimension 0."""
        return tuple(
            (index, dim)
            for index, term in enumerate(self.inputs)
            if term is not None
            for dim, factors in enumerate([(Name(_REST),)] * term.leading + list(term.dims))
            if (name := _outermost(factors)) is not None and name.id not in self.frozen
        )

    @property
    def normalised(self) -> str:
        """The text with ``^`` on everything that is never split."""
        left = ", ".join(_term_text(term, self.frozen) for term in self.inputs)
        right = ", ".join(_term_text(term, self.frozen) for term in self.outputs)
        return f"{left} -> {right}"

    def extents(self, shapes: Sequence[Shape], **sizes: int) -> dict[Identifier, int]:
        """The extent of each identifier, from the shapes of the input tensors (and further tensors, if given).

        ``sizes`` gives extents that shapes do not determine.  RuleError says which dimension disagrees.
        """
        terms = self._terms
        inputs = sum(term is not None for term in self.inputs)
        if len(shapes) not in (inputs, len(terms)):
            raise RuleError(f"rule {self.text!r} describes {inputs} input tensors, got {len(shapes)}")
        known: dict[Identifier, int] = dict(sizes)
        pending: list[tuple[Dimension, int]] = []
        rest: Shape | None = None
        for term, shape in zip(terms, shapes, strict=False):
            own = len(term.dims)
            if term.leading:
                leading = shape[: len(shape) - own]
                if rest is not None and rest != leading:
                    raise RuleError(f"rule {self.text!r}: '*' means {list(rest)} and {list(leading)}")
                rest = leading
                shape = shape[len(leading) :]
            if len(shape) != own and not (shape == () and term.dims == ((1,),)):
                raise RuleError(f"rule {self.text!r}: {own} dimensions for a tensor of shape {list(shape)}")
            pending += zip(term.dims, shape, strict=False)
        if rest is not None:
            known.update({_leading(i): extent for i, extent in enumerate(rest)})
        while pending:
            left = [(dim, extent) for dim, extent in pending if not self._infer(dim, extent, known)]
            if len(left) == len(pending):
                unknown = sorted({a.id for dim, _ in left for a in dim if isinstance(a, Name) and a.id not in known})
                raise RuleError(f"rule {self.text!r}: the sizes of {unknown} do not follow from the shapes; give them")
            pending = left
        return known

    def _infer(self, dim: Dimension, extent: int, known: dict[Identifier, int]) -> bool:
        """Learn from one dimension; False when more than one of its factors is unknown."""
        factors = [known.get(atom.id) if isinstance(atom, Name) else atom for atom in dim]
        unknown = [atom for atom, factor in zip(dim, factors, strict=True) if factor is None]
        given = prod(factor for factor in factors if factor is not None)
        if len(unknown) > 1:
            return False
        if (not unknown and given != extent) or (unknown and (not given or extent % given)):
            text = _dim_text(dim, frozenset())
            raise RuleError(f"rule {self.text!r}: {text} is a multiple of {given}, but the tensor has {extent}")
        for atom in unknown:
            assert isinstance(atom, Name)
            known[atom.id] = extent // given
        return True

    def output_shapes(self, shapes: Sequence[Shape], **sizes: int) -> tuple[Shape | None, ...]:
        """Shapes of the outputs, from those of the inputs; None for a non-tensor.

        RuleError names identifiers that only outputs have, unless ``sizes`` gives their extents.
        """
        known = self.extents(shapes, **sizes)
        named = {
            a.id for term in self.outputs if term is not None for dim in term.dims for a in dim if isinstance(a, Name)
        }
        if unknown := sorted(named - known.keys()):
            raise RuleError(f"rule {self.text!r}: the sizes of {unknown} do not follow from the inputs; give them")
        leading = tuple(known[name] for i in range(len(known)) if (name := _leading(i)) in known)
        found: list[Shape | None] = []
        for term in self.outputs:
            if term is None:
                found.append(None)
                continue
            own = tuple(prod(known[a.id] if isinstance(a, Name) else a for a in dim) for dim in term.dims)
            found.append(leading + own if term.leading else own)
        return tuple(found)

    def rule(self, shapes: Sequence[Shape], linear: tuple[tuple[int, ...], ...] = (), **sizes: int) -> Rule:
        """The rule for tensors of ``shapes`` (inputs, or inputs and outputs)."""
        known = self.extents(shapes, **sizes)
        found = self.output_shapes(shapes, **sizes)
        inputs = [term for term in self.inputs if term is not None]
        outputs = [term for term in self.outputs if term is not None]
        every = list(shapes[: len(inputs)]) + [shape for shape in found if shape is not None]
        every[len(inputs) :] = shapes[len(inputs) :] or every[len(inputs) :]
        uses = [_uses(term, shape, known, self.frozen) for term, shape in zip(inputs + outputs, every, strict=True)]
        rule = Rule(
            inputs=tuple(uses[: len(inputs)]),
            outputs=tuple(uses[len(inputs) :]),
            reductions=tuple(self.reductions.items()),
            added=tuple(i for i, term in enumerate(inputs) if term.added),
            linear=linear,
            text=self.text,
        )
        rule.check(every)
        return rule


def parse(text: str) -> Notation:
    """Parse a rule text; RuleError names the first character that makes no sense."""
    tokens: list[re.Match[str]] = []
    position = 0
    end = len(text.rstrip())
    while position < end:
        match = _TOKEN.match(text, position)
        if match is None:
            position += len(text[position:]) - len(text[position:].lstrip())
            raise RuleError(f"rule {text!r}: unexpected {text[position]!r} at character {position}")
        tokens.append(match)
        position = match.end()
    arrows = [i for i, token in enumerate(tokens) if token[4]]
    if len(arrows) != 1:
        raise RuleError(f"rule {text!r}: expected one '->' between inputs and outputs, got {len(arrows)}")
    left, right = tokens[: arrows[0]], tokens[arrows[0] + 1 :]
    return Notation(_terms(left, text) if left else (), _terms(right, text), text)


def parse_rule(text: str, shapes: Sequence[Shape], linear: tuple[tuple[int, ...], ...] = (), **sizes: int) -> Rule:
    """The rule that ``text`` gives an operator on tensors of ``shapes`` (inputs, or inputs and outputs).

    ``sizes`` gives the extents of identifiers inside merged dimensions that the shapes leave open;
    ``linear`` lists sets of inputs whose partial sums pass through.
    """
    return parse(text).rule(shapes, linear, **sizes)


def format_rule(rule: Rule, shapes: Sequence[Shape]) -> str:
    """A rule as text, which :func:`parse_rule` reads back; ``shapes`` are those of inputs, then outputs."""
    reduced = dict(rule.reductions)
    lacking = {i for i in rule.identifiers if any(all(u is None or u.id != i for u in uses) for uses in rule.outputs)}
    marks = {i: "+max" if reduced[i] == "max" else "+" for i in rule.identifiers if i in lacking}

    def tensor(uses: DimUses, shape: Shape) -> str:
        words = []
        for use, extent in zip(uses, shape, strict=True):
            if use is None:
                words.append(str(extent))
            else:
                name = use.id + marks.get(use.id, "")
                words.append(name if use.unit == 1 else f"({name} {use.unit})")
        return " ".join(words) or "1"

    inputs = [
        tensor(uses, shape) + (" &" if i in rule.added else "")
        for i, (uses, shape) in enumerate(zip(rule.inputs, shapes, strict=False))
    ]
    outputs = [tensor(uses, shape) for uses, shape in zip(rule.outputs, shapes[len(inputs) :], strict=True)]
    return f"{', '.join(inputs)} -> {', '.join(outputs)}".strip()


def _terms(tokens: Sequence[re.Match[str]], text: str) -> tuple[Term | None, ...]:
    groups: list[list[re.Match[str]]] = [[]]
    for token in tokens:
        if token[5] == ",":
            groups.append([])
        else:
            groups[-1].append(token)
    return tuple(_term(group, text) for group in groups)


def _term(tokens: Sequence[re.Match[str]], text: str) -> Term | None:
    if [token[5] for token in tokens] == ["?"]:
        return None
    dims: list[Dimension] = []
    inside: list[Atom] | None = None
    leading = added = False
    for place, token in enumerate(tokens):
        symbol = token[5]
        if symbol is None:
            atom: Atom = int(token[3]) if token[3] else Name(token[1], token[2] or "")
            if inside is None:
                dims.append((atom,))
            else:
                inside.append(atom)
        elif symbol == "(" and inside is None:
            inside = []
        elif symbol == ")" and inside:
            dims.append(tuple(inside))
            inside = None
        elif symbol == "*" and place == 0:
            leading = True
        elif symbol == "&" and place == len(tokens) - 1 and dims:
            added = True
        else:
            raise RuleError(f"rule {text!r}: {symbol!r} cannot stand at character {token.start(5)}")
    if inside is not None:
        raise RuleError(f"rule {text!r}: '(' is never closed")
    if not dims and not leading:
        raise RuleError(f"rule {text!r}: a tensor without dimensions; write 1 for a 0-d tensor, ? for a non-tensor")
    return Term(tuple(dims), leading, added)


def _names(term: Term) -> list[Name]:
    return [atom for dim in term.dims for atom in dim if isinstance(atom, Name)]


def _leading(index: int) -> Identifier:
    return f"{_REST}{index}"


def _outermost(dim: Dimension) -> Name | None:
    """The identifier by which a dimension can be split, before freezing."""
    for atom in dim:
        if isinstance(atom, Name):
            return atom
        if atom != 1:
            return None
    return None


def _uses(term: Term, shape: Shape, known: dict[Identifier, int], frozen: frozenset[Identifier]) -> DimUses:
    """The uses of one tensor's dimensions; one of extent 1 is never split."""
    leading = len(shape) - len(term.dims) if term.leading else 0
    found: list[DimUse | None] = [DimUse(f"l{i}") if shape[i] > 1 else None for i in range(leading)]
    for dim in term.dims if shape else ():
        name = _outermost(dim)
        if name is None or name.id in frozen or known[name.id] < 2:
            found.append(None)
        else:
            found.append(
                DimUse(name.id, prod(known[a.id] if isinstance(a, Name) else a for a in dim) // known[name.id])
            )
    return tuple(found)


def _term_text(term: Term | None, frozen: frozenset[Identifier]) -> str:
    if term is None:
        return "?"
    words = ["*"] * term.leading + [_dim_text(dim, frozen) for dim in term.dims] + ["&"] * term.added
    return " ".join(words)


def _dim_text(dim: Dimension, frozen: frozenset[Identifier]) -> str:
    words = [
        str(atom) if isinstance(atom, int) else atom.id + ("^" if atom.id in frozen else atom.mark) for atom in dim
    ]
    return words[0] if len(words) == 1 else f"({' '.join(words)})"
