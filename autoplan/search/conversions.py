"""Tables of conversion costs: the cheapest path between all layouts of a tensor on one mesh.

``searchspace.conversion`` finds one path when it is asked for one; a strategy selection asks for
all pairs, so here the same steps at the same prices fill a matrix (Floyd, 1962).  Irregular
relayouts by single transfers are left out, which can only overestimate.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from autoplan.search.problem import Costs
from searchspace.conversion import Prices
from searchspace.conversion.space import Code, Space, space
from searchspace.layout import Layout, R, Shape
from searchspace.mesh import Mesh


class Conversions:
    """Seconds between layouts on ``mesh`` at ``prices``; tables are kept by shape."""

    def __init__(self, mesh: Mesh, prices: Prices) -> None:
        self.mesh, self.prices = mesh, prices
        self._tables: dict[tuple[int, int], Costs] = {}
        self._spaces: dict[int, Space] = {}
        self._seconds: dict[tuple[str, tuple[int, ...], int], float] = {}

    def table(self, shape: Shape, element_bytes: int, sources: Sequence[Layout], targets: Sequence[Layout]) -> Costs:
        """Seconds of the cheapest path from each of ``sources`` to each of ``targets``: shape (len, len)."""
        layouts = tuple(dict.fromkeys((*sources, *targets)))
        where = space(self.mesh.shape, shape, layouts)
        self._spaces[id(where)] = where  # keeps it alive, and its id its own
        key = (id(where), element_bytes)
        codes = reachable(where)
        if key not in self._tables:
            self._tables[key] = self._all_pairs(where, codes, element_bytes)
        at = {layout: codes[where.encode(layout)] for layout in layouts}
        rows, columns = [at[layout] for layout in sources], [at[layout] for layout in targets]
        return self._tables[key][np.ix_(rows, columns)]

    def _all_pairs(self, where: Space, codes: dict[Code, int], element_bytes: int) -> Costs:
        table = np.full((len(codes), len(codes)), np.inf)
        np.fill_diagonal(table, 0.0)
        for code, i in codes.items():
            for step in where.steps(code):
                j = codes[step.other]
                table[i, j] = min(table[i, j], self._price(step.kind, step.axes, step.elements * element_bytes))
        for k in range(len(codes)):
            np.minimum(table, table[:, k, None] + table[None, k, :], out=table)
        return table

    def _price(self, kind: str, axes: tuple[int, ...], size: int) -> float:
        key = (kind, axes, size)
        if key not in self._seconds:
            local = kind == "local"
            self._seconds[key] = (
                self.prices.local(size) if local else self.prices.collective(kind, self.mesh, axes, size)  # type: ignore[arg-type]
            )
        return self._seconds[key]


@lru_cache(maxsize=4096)
def reachable(where: Space) -> dict[Code, int]:
    """The layouts that steps lead to from replication, numbered."""
    start = where.encode((R,) * len(where.sizes))
    found = {start: 0}
    pending = [start]
    while pending:
        for step in where.steps(pending.pop()):
            if step.other not in found:
                found[step.other] = len(found)
                pending.append(step.other)
    return found
