"""Exact minimisation of a sum of tables by eliminating variables one by one.

Non-serial dynamic programming (Bertelè and Brioschi, 1972): to eliminate a variable, join the
tables that mention it, keep the minimum over its values as a new table over its neighbours, and
remember the minimiser.  A variable of degree one or two costs no more than its edges; what decides
the effort is the widest table, so variables are eliminated in the order of the table they make.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np
from numpy.typing import NDArray

from autoplan.search.problem import Assignment, Costs

Scope = tuple[int, ...]
"""Variables of a table, ascending; axis i of the table belongs to variable i of the scope."""

MAX_ENTRIES = 1 << 22
"""The widest table that is still worth its memory (32 MiB)."""


@dataclass(frozen=True)
class Order:
    """``steps``: eliminated variable and the scope of the table joined for it (the variable included)."""

    steps: tuple[tuple[int, Scope], ...]
    widest: int


@lru_cache(maxsize=64)
def elimination_order(sizes: tuple[int, ...], edges: tuple[tuple[int, int], ...]) -> Order:
    """Greedy order: always the variable with the smallest joined table; ties by index.

    A variable with one value joins nothing: its tables belong to its neighbours alone.
    """
    near: list[set[int]] = [set() for _ in sizes]
    for a, b in edges:
        if sizes[a] > 1 and sizes[b] > 1:
            near[a].add(b)
            near[b].add(a)

    def width(v: int) -> int:
        return sizes[v] * prod(sizes[u] for u in near[v])

    heap = [(width(v), v) for v in range(len(sizes))]
    heapq.heapify(heap)
    done = [False] * len(sizes)
    steps, widest = [], 1
    while heap:
        size, v = heapq.heappop(heap)
        if done[v] or size != width(v):
            continue
        done[v] = True
        around = sorted(near[v])
        steps.append((v, tuple(sorted((v, *around)))))
        widest = max(widest, size)
        for u in around:
            near[u].discard(v)
            near[u].update(w for w in around if w != u)
        for u in around:
            heapq.heappush(heap, (width(u), u))
    return Order(tuple(steps), widest)


def minimise(order: Order, unary: Sequence[Costs], pairs: Sequence[tuple[int, int, Costs]]) -> tuple[float, Assignment]:
    """Minimum of the sum of ``unary[v][x_v]`` and ``table[x_a, x_b]`` over ``(a, b, table)`` in ``pairs``.

    Returns the minimum (``inf`` when all is forbidden) and a minimiser; ties go to the lowest index.
    """
    place = {v: i for i, (v, _) in enumerate(order.steps)}
    buckets: list[list[tuple[Scope, Costs]]] = [[] for _ in order.steps]
    for v, table in enumerate(unary):
        buckets[place[v]].append(((v,), table))
    for a, b, table in pairs:
        if 1 in table.shape:
            v = a if table.shape[1] == 1 else b
            buckets[place[v]].append(((v,), table.reshape(-1)))
            continue
        buckets[min(place[a], place[b])].append(((a, b), table) if a < b else ((b, a), table.T))
    value = 0.0
    choices: list[NDArray[np.intp]] = []
    for i, (v, scope) in enumerate(order.steps):
        joined = np.zeros((1,) * len(scope))
        for narrow, table in buckets[i]:
            joined = joined + table.reshape(_spread(narrow, table.shape, scope))
        axis = scope.index(v)
        choice = joined.argmin(axis=axis)
        message = np.take_along_axis(joined, np.expand_dims(choice, axis), axis).squeeze(axis)
        choices.append(choice)
        rest = scope[:axis] + scope[axis + 1 :]
        if rest:
            buckets[min(place[u] for u in rest)].append((rest, message))
        else:
            value += float(message)
        buckets[i] = []
    found: dict[int, int] = {}
    for (v, scope), choice in zip(reversed(order.steps), reversed(choices), strict=True):
        found[v] = int(choice[tuple(found[u] for u in scope if u != v)])
    return value, tuple(found[v] for v in range(len(unary)))


def _spread(narrow: Scope, shape: tuple[int, ...], scope: Scope) -> tuple[int, ...]:
    extent = dict(zip(narrow, shape, strict=True))
    return tuple(extent.get(u, 1) for u in scope)
