"""What a chain of reshapes and permutations does to a tensor, and the same without detours.

``nn.MultiheadAttention`` views ``[t, b, h d]`` as ``[t, (b h), d]``, transposes, and views the result as
``[b, h, t, d]``: on the way the heads are merged behind the batch, where they cannot be split.  Seen as a whole
the chain only takes ``h d`` apart and permutes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Any

from autoplan.capture.call import Emit

_SAME = frozenset({"aten.contiguous.default"})


@dataclass
class Arrangement:
    """A tensor as atoms of another: factors of the dims of ``base``, permuted and grouped into dims.

    Fields
        sizes: extent of each atom.  from_dim: the dim of ``base`` that it is a factor of.
        order: atoms as they lie in ``base``, outermost first.
        groups: atoms of each dim of the tensor, outermost first; none for a dim of extent 1.
        merged: whether some tensor on the way had factors of several dims of ``base`` in one dim.
    """

    base: Any
    sizes: dict[int, int] = field(default_factory=dict)
    from_dim: dict[int, int] = field(default_factory=dict)
    order: list[int] = field(default_factory=list)
    groups: list[list[int]] = field(default_factory=list)
    merged: bool = False

    @classmethod
    def of(cls, value: Any) -> Arrangement:
        """Follow ``value`` back through reshapes, permutations and copies."""
        made = getattr(value, "origin", None)
        if made is not None and made.given and hasattr(made.given[0], "shape"):
            found = cls.of(made.given[0]) if made.target in _FOLLOWED else None
            if found is not None and found._apply(made.target, made.given[1:], tuple(value.shape)):
                return found
        start = cls(value)
        for dim, extent in enumerate(value.shape):
            start.groups.append([start._atom(extent, dim)] if extent != 1 else [])
        start.order = [atom for group in start.groups for atom in group]
        return start

    @property
    def mixed(self) -> bool:
        """Whether a dim has factors of several dims of ``base``."""
        return any(len({self.from_dim[atom] for atom in group}) > 1 for group in self.groups)

    def emit(self, emit: Emit) -> Any:
        """The tensor, by at most a reshape, a permutation and a reshape."""
        apart = _reshaped(emit, self.base, tuple(self.sizes[atom] for atom in self.order))
        places = tuple(self.order.index(atom) for group in self.groups for atom in group)
        moved = apart if places == tuple(range(len(places))) else emit("aten.permute.default", apart, places)
        return _reshaped(emit, moved, tuple(prod(self.sizes[atom] for atom in group) for group in self.groups))

    def without(self, dim: int, base: Any) -> Arrangement:
        """The same arrangement of ``base``, which lacks the one atom of dimension ``dim``."""
        (atom,) = self.groups[dim]
        order = [a for a in self.order if a != atom]
        groups = self.groups[:dim] + self.groups[dim + 1 :]
        return Arrangement(base, self.sizes, self.from_dim, order, groups, self.merged)

    def _apply(self, target: str, args: tuple[Any, ...], shape: tuple[int, ...]) -> bool:
        rank = len(self.groups)
        if target in _SAME:
            return True
        if target == "aten.reshape.default":
            return self.regroup(shape)
        if target == "aten.unsqueeze.default":
            self.groups.insert(args[0] % (rank + 1), [])
        elif target == "aten.transpose.int" and rank:
            a, b = args[0] % rank, args[1] % rank
            self.groups[a], self.groups[b] = self.groups[b], self.groups[a]
        elif target == "aten.t.default":
            self.groups.reverse()
        elif target == "aten.permute.default":
            self.groups = [self.groups[d % rank] for d in args[0]]
        return True

    def regroup(self, shape: tuple[int, ...]) -> bool:
        """Deal the atoms out to dims of ``shape``, splitting some; False where one would have to be cut unevenly."""
        if 0 in shape:
            return False
        pending = [atom for group in self.groups for atom in group]
        groups: list[list[int]] = []
        for extent in shape:
            group: list[int] = []
            while extent > 1:
                atom = pending.pop(0)
                size = self.sizes[atom]
                if extent % size:
                    if size % extent:
                        return False
                    atom, rest = self._split(atom, extent)
                    pending.insert(0, rest)
                extent //= self.sizes[atom]
                group.append(atom)
            groups.append(group)
        self.groups = groups
        self.merged |= self.mixed
        return True

    def _atom(self, size: int, dim: int) -> int:
        atom = len(self.sizes)
        self.sizes[atom], self.from_dim[atom] = size, dim
        return atom

    def _split(self, atom: int, outer: int) -> tuple[int, int]:
        """Two atoms in place of one."""
        pair = self._atom(outer, self.from_dim[atom]), self._atom(self.sizes[atom] // outer, self.from_dim[atom])
        at = self.order.index(atom)
        self.order[at : at + 1] = pair
        return pair


_FOLLOWED = _SAME | {
    "aten.reshape.default",
    "aten.unsqueeze.default",
    "aten.transpose.int",
    "aten.t.default",
    "aten.permute.default",
}


def _reshaped(emit: Emit, x: Any, shape: tuple[int, ...]) -> Any:
    return x if tuple(x.shape) == shape else emit("aten.reshape.default", x, shape)
