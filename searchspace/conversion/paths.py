"""The cheapest conversion: Dijkstra over layouts (E. W. Dijkstra, 1959), from both ends.

A path is a run of collectives and local moves on the source's mesh, at most one ``send_receive``,
and a run on the target's mesh.  One is enough, since it reaches every layout; between different
meshes it is necessary.  Two kinds of path are left out because a shorter one does the same: a
slice right before or after a ``send_receive`` (which sends the parts that are wanted anyway), and
a ``send_receive`` in the place of one single move.

Ties are broken by the number of moves, then by the order of enumeration.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

from searchspace.conversion.moves import Move, Path, Placed
from searchspace.conversion.prices import Prices, Seconds
from searchspace.conversion.routes import copies, same_buffers
from searchspace.conversion.space import Code, Space, Step, space
from searchspace.errors import IllegalPlanError
from searchspace.layout import Shape, layout_text
from searchspace.mesh import Device, Mesh
from searchspace.program import ExchangeKind

Query = tuple[Shape, int, Placed, Placed]

MANY_DEVICES = 64
"""From this many receivers on, the first receiver's share rules out relayouts before all is priced."""


def cheapest_path(shape: Shape, element_bytes: int, source: Placed, target: Placed, prices: Prices) -> Path:
    """The cheapest conversion of a tensor of ``shape`` (of what the meshes hold) from ``source`` to ``target``.

    Results are kept for as long as ``prices`` lives.  Raises IllegalPlanError when a layout is
    illegal for the shape: a part would be empty, or a unit would be cut.
    """
    memo = _memo(prices)
    query = (shape, element_bytes, source, target)
    path = memo.paths.get(query)
    if path is None:
        path = memo.paths[query] = _Search(memo, *query).path()
    return path


class _Memo:
    """What is known under one ``Prices``."""

    def __init__(self, prices: Prices) -> None:
        self.prices: Callable[[], Prices | None] = weakref.ref(prices)
        self.paths: dict[Query, Path] = {}
        self.collectives: dict[Mesh, dict[tuple[ExchangeKind, tuple[int, ...], int], Seconds]] = {}
        self.transfers: dict[tuple[Shape, int, Placed, Placed, tuple[Device, ...] | None], Seconds] = {}


_memos: dict[int, _Memo] = {}


def _memo(prices: Prices) -> _Memo:
    """The memo of ``prices``, by identity: equality of price tables could be slow."""
    number = id(prices)
    memo = _memos.get(number)
    if memo is None or memo.prices() is not prices:
        memo = _memos[number] = _Memo(prices)
        weakref.finalize(prices, _forget, number, memo)
    return memo


def _forget(number: int, memo: _Memo) -> None:
    if _memos.get(number) is memo:
        del _memos[number]


class _Reached(NamedTuple):
    """A layout at distance ``seconds`` from an end, ``hops`` moves away; ``step`` leads back to ``origin``."""

    seconds: Seconds
    hops: int
    step: Step | None
    origin: Code | None


class _Side:
    """One end of the search: the layouts around ``start`` on ``mesh``, nearest first.

    ``reverse`` measures distances to ``start`` instead of from it.
    """

    def __init__(self, search: _Search, mesh: Mesh, layouts: Space, start: Code, reverse: bool) -> None:
        self.mesh, self.space, self.start, self.reverse = mesh, layouts, start, reverse
        self.reached: dict[Code, _Reached] = {start: _Reached(0.0, 0, None, None)}
        self.settled: list[Code] = []
        self._heap: list[tuple[Seconds, int, int, Code]] = [(0.0, 0, 0, start)]
        self._price = search.price_steps(mesh)
        self._count = 0

    def settle(self, bound: Seconds, until: Callable[[Code], bool] = lambda _: False) -> Code | None:
        """Settle layouts nearer than ``bound`` until one satisfies ``until``; return that one."""
        heap, reached, price = self._heap, self.reached, self._price
        while heap and heap[0][0] < bound:
            seconds, hops, _, code = heappop(heap)
            if (seconds, hops) > reached[code][:2]:
                continue
            self.settled.append(code)
            for step in self.space.steps(code, self.reverse):
                further = seconds + price(step)
                known = reached.get(step.other)
                if further < bound and (known is None or (further, hops + 1) < known[:2]):
                    self._count += 1
                    reached[step.other] = _Reached(further, hops + 1, step, code)
                    heappush(heap, (further, hops + 1, self._count, step.other))
            if until(code):
                return code
        return None

    def ends(self) -> Iterator[tuple[_Reached, Code]]:
        """Settled layouts that may be next to a ``send_receive``."""
        for code in self.settled:
            reached = self.reached[code]
            if reached.step is None or not (reached.step.kind == "local" and self._slices(reached.step, code)):
                yield reached, code

    def _slices(self, step: Step, code: Code) -> bool:
        """Whether the local ``step`` slices (it may also mask or pad)."""
        return len(self.space.partial(code)) == len(self.space.partial(self.reached[code].origin or ()))

    def moves(self, code: Code | None) -> list[Move]:
        """The moves between ``start`` and ``code``, in the order in which they happen."""
        found: list[Move] = []
        while code is not None:
            _, _, step, origin = self.reached[code]
            if step is not None and origin is not None:
                ends = (code, origin) if self.reverse else (origin, code)
                before, after = map(self.space.decode, ends)
                found.append(Move(step.kind, step.axes, self.mesh, before, self.mesh, after))
            code = origin
        return found if self.reverse else found[::-1]


class _Search:
    """One question to :func:`cheapest_path`."""

    def __init__(self, memo: _Memo, shape: Shape, element_bytes: int, source: Placed, target: Placed) -> None:
        self.memo, self.shape, self.element_bytes = memo, shape, element_bytes
        self.source, self.target = source, target
        prices = memo.prices()
        assert prices is not None  # the caller holds it
        self.prices = prices
        for mesh, layout in (source, target):
            if len(layout) != len(mesh.axes):
                raise IllegalPlanError(
                    f"layout {layout_text(layout)!r} has {len(layout)} placements for mesh axes {mesh.axis_names}"
                )

    def price_steps(self, mesh: Mesh) -> Callable[[Step], Seconds]:
        """The price of a step on ``mesh``, remembered by what it depends on."""
        known = self.memo.collectives.setdefault(mesh, {})
        prices, element_bytes = self.prices, self.element_bytes

        def price(step: Step) -> Seconds:
            kind, axes, elements, _ = step
            key = (kind, axes, elements * element_bytes)
            seconds = known.get(key)
            if seconds is None:
                size = elements * element_bytes
                seconds = prices.local(size) if kind == "local" else prices.collective(kind, mesh, axes, size)
                known[key] = seconds
            return seconds

        return price

    def path(self) -> Path:
        (mesh, have), (goal_mesh, want) = self.source, self.target
        same = mesh.devices == goal_mesh.devices and mesh.shape == goal_mesh.shape
        spaces = (
            (space(mesh.shape, self.shape, (have, want)),) * 2
            if same
            else (space(mesh.shape, self.shape, (have,), (want,)), space(goal_mesh.shape, self.shape, (want,), (have,)))
        )
        start, goal = spaces[0].encode(have), spaces[1].encode(want)
        if start == goal if same else same_buffers(self.shape, self.source, self.target):
            return Path((), 0.0)
        ahead = _Side(self, mesh, spaces[0], start, reverse=False)
        back = _Side(self, goal_mesh, spaces[1], goal, reverse=True)
        if same:
            ahead.settle(inf, lambda code: code == goal)
            best, ends = ahead.reached[goal][:2], None
            back.settle(best[0])
        else:
            left = ahead.settle(inf, lambda code: not spaces[0].partial(code))
            right = back.settle(inf, lambda code: not spaces[1].partial(code))
            assert left is not None and right is not None  # all can be reduced, and sliced from replicas
            ends = (left, right)
            near, far = ahead.reached[left], back.reached[right]
            best = (near.seconds + self._relayout(ahead, left, back, right) + far.seconds, near.hops + 1 + far.hops)
            ahead.settle(best[0] - far.seconds)
            back.settle(best[0] - near.seconds)
        for lower, hops, left, right in self._candidates(ahead, back, best[0], same):
            if (lower, hops) >= best:
                break
            seconds = ahead.reached[left].seconds + back.reached[right].seconds
            seconds += self._relayout(ahead, left, back, right)
            if (seconds, hops) < best:
                best, ends = (seconds, hops), (left, right)
        return Path(self._relabelled(ahead, back, goal, ends), best[0])

    def _candidates(
        self, ahead: _Side, back: _Side, bound: Seconds, same: bool
    ) -> list[tuple[Seconds, int, Code, Code]]:
        """Pairs of layouts for a ``send_receive``, with lower bounds of seconds, and moves; best first."""
        found = []
        arrivals = list(back.ends())
        large = back.mesh.size >= MANY_DEVICES
        for near, left in ahead.ends():
            summands = ahead.space.partial(left)
            if summands and not same:
                continue
            single = {step.other for step in ahead.space.steps(left)} if same else ()
            for far, right in arrivals:
                lower = near.seconds + far.seconds
                if (
                    lower >= bound
                    or back.space.partial(right) != summands
                    or (same and left == right)
                    or right in single
                ):
                    continue
                if large:
                    lower += self._relayout(ahead, left, back, right, back.mesh.devices[-1:])
                found.append((lower, near.hops + 1 + far.hops, left, right))
        found.sort(key=lambda candidate: candidate[:2])
        return found

    def _relayout(
        self, ahead: _Side, left: Code, back: _Side, right: Code, receivers: tuple[Device, ...] | None = None
    ) -> Seconds:
        """The price of going from ``left`` to ``right`` directly (for ``receivers`` alone: a lower bound)."""
        source, target = (ahead.mesh, ahead.space.decode(left)), (back.mesh, back.space.decode(right))
        key = (self.shape, self.element_bytes, source, target, receivers)
        seconds = self.memo.transfers.get(key)
        if seconds is None:
            sent = copies(self.shape, self.element_bytes, source, target, receivers)
            local = 0.0 if receivers else self.prices.local(back.space.elements(right) * self.element_bytes)
            seconds = self.prices.transfer(sent) if sent else local
            self.memo.transfers[key] = seconds
        return seconds

    def _relabelled(self, ahead: _Side, back: _Side, goal: Code, ends: tuple[Code, Code] | None) -> tuple[Move, ...]:
        """The moves of the best path, with the layouts at its ends written as the caller writes them."""
        if ends is None:
            moves = ahead.moves(goal)
        else:
            left, right = ends
            source, target = (ahead.mesh, ahead.space.decode(left)), (back.mesh, back.space.decode(right))
            silent = not copies(self.shape, self.element_bytes, source, target)
            kind: ExchangeKind = "local" if silent else "send_receive"
            moves = [*ahead.moves(left), Move(kind, (), *source, *target), *back.moves(right)]
        moves[0] = replace(moves[0], source_mesh=self.source[0], source=self.source[1])
        moves[-1] = replace(moves[-1], target_mesh=self.target[0], target=self.target[1])
        return tuple(moves)
