"""The cheapest conversion: Dijkstra over layouts (E. W. Dijkstra, 1959), from both ends.

A path is a run of collectives and local moves on the source's mesh, at most one ``send_receive``,
and a run on the target's mesh.  One is enough, since it reaches every layout; between different
meshes it is necessary.  Not offered are

*   a ``send_receive`` in the place of a single collective, which is what libraries tune;
*   a slice right before or after a ``send_receive``, which sends only what is wanted anyway;
*   partial placements on axes that are partial neither in the source nor in the target: zeros
    would be added up, which not every dtype allows.

Ties are broken by the number of moves, then of messages, then by the order of enumeration.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from heapq import heappop, heappush
from math import inf, prod
from typing import NamedTuple

from searchspace.conversion.moves import Move, Path, Placed
from searchspace.conversion.prices import Prices, Seconds
from searchspace.conversion.routes import copies, same_buffers
from searchspace.conversion.space import Code, Space, Step, space
from searchspace.errors import IllegalPlanError
from searchspace.layout import Region, Shape, intersect, layout_text, local_shape, region_of, whole
from searchspace.mesh import Mesh
from searchspace.program import ExchangeKind

Query = tuple[Shape, int, Placed, Placed]

MANY_DEVICES = 16
"""From this many receivers on, one receiver's share rules out relayouts before all is priced.

This is exact as long as a device's share costs no less when it comes from several devices than when
all of it comes from the nearest one.
"""


def cheapest_path(shape: Shape, element_bytes: int, source: Placed, target: Placed, prices: Prices) -> Path:
    """The cheapest conversion of a tensor of ``shape`` (of what the meshes hold) from ``source`` to ``target``.

    Results are kept for as long as ``prices`` lives.  Raises IllegalPlanError when a layout is
    illegal for the shape: a part would be empty, or a unit would be cut.
    """
    memo = _memo(prices)
    query = (shape, element_bytes, source, target)
    path = memo.paths.get(query)
    if path is None:
        path = memo.paths[query] = _Search(memo, prices, *query).path()
    return path


class _Memo:
    """What is known under one ``Prices``."""

    def __init__(self, prices: Prices) -> None:
        self.prices: Callable[[], Prices | None] = weakref.ref(prices)
        self.paths: dict[Query, Path] = {}
        self.collectives: dict[Mesh, dict[tuple[ExchangeKind, tuple[int, ...], int], Seconds]] = {}
        self.transfers: dict[Query, tuple[Seconds, int]] = {}


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


class _Cost(NamedTuple):
    """What decides between paths, in this order."""

    seconds: Seconds
    hops: int
    messages: int


class _Side:
    """One end of the search: the layouts around ``start`` on ``mesh``, nearest first.

    ``reverse`` measures distances to ``start`` instead of from it.  ``reached`` has the shortest way
    of each layout, ``ends`` the shortest one that may be next to a ``send_receive``.
    """

    def __init__(self, search: _Search, mesh: Mesh, layouts: Space, start: Code, reverse: bool) -> None:
        self.mesh, self.space, self.start, self.reverse = mesh, layouts, start, reverse
        self.reached: dict[Code, _Reached] = {start: _Reached(0.0, 0, None, None)}
        self.ends = dict(self.reached)
        self._heap: list[tuple[Seconds, int, int, Code]] = [(0.0, 0, 0, start)]
        self._price = search.price_steps(mesh)
        self._count = 0

    def settle(self, bound: Seconds, until: Callable[[Code], bool] = lambda _: False) -> Code | None:
        """Settle layouts nearer than ``bound`` until one satisfies ``until``; return that one."""
        heap, reached, ends, price = self._heap, self.reached, self.ends, self._price
        while heap and heap[0][0] < bound:
            seconds, hops, _, code = heappop(heap)
            if (seconds, hops) > reached[code][:2]:
                continue
            for step in self.space.steps(code, self.reverse):
                other, further = step.other, _Reached(seconds + price(step), hops + 1, step, code)
                if further.seconds >= bound:
                    continue
                if not step.slices and (other not in ends or further[:2] < ends[other][:2]):
                    ends[other] = further
                if other not in reached or further[:2] < reached[other][:2]:
                    self._count += 1
                    reached[other] = further
                    heappush(heap, (further.seconds, further.hops, self._count, other))
            if until(code):
                return code
        return None

    def moves(self, last: _Reached, code: Code) -> list[Move]:
        """The moves between ``start`` and ``code``, reached by ``last``, in the order in which they happen."""
        found: list[Move] = []
        while last.step is not None and last.origin is not None:
            ends = (code, last.origin) if self.reverse else (last.origin, code)
            before, after = map(self.space.decode, ends)
            found.append(Move(last.step.kind, last.step.axes, self.mesh, before, self.mesh, after))
            code, last = last.origin, self.reached[last.origin]
        return found if self.reverse else found[::-1]


class _Search:
    """One question to :func:`cheapest_path`."""

    def __init__(
        self, memo: _Memo, prices: Prices, shape: Shape, element_bytes: int, source: Placed, target: Placed
    ) -> None:
        self.memo, self.prices = memo, prices
        self.shape, self.element_bytes = shape, element_bytes
        self.source, self.target = source, target
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
            kind, axes, elements = step[:3]
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
        best = _Cost(inf, 0, 0)
        ends: tuple[Code, Code] | None = None
        large = goal_mesh.size >= MANY_DEVICES
        if same:
            ahead.settle(inf, lambda code: code == goal)
            best = _Cost(*ahead.reached[goal][:2], 0)
            back.settle(best.seconds)
        elif large:
            ahead.settle(inf)
            back.settle(inf)
        else:
            left = ahead.settle(inf, lambda code: not spaces[0].partial(code))
            right = back.settle(inf, lambda code: not spaces[1].partial(code))
            assert left is not None and right is not None  # all can be reduced, and made from replicas
            best, ends = self._join(ahead, left, back, right), (left, right)
            ahead.settle(best.seconds)
            back.settle(best.seconds)
        for lower, _, left, right in self._candidates(ahead, back, best.seconds, same, large):
            if lower > best.seconds or (large and lower == best.seconds):
                break
            joined = self._join(ahead, left, back, right)
            if joined < best:
                best, ends = joined, (left, right)
        if ends is None:
            moves = ahead.moves(ahead.reached[goal], goal)
        else:
            left, right = ends
            moves = [
                *ahead.moves(ahead.ends[left], left),
                self._relayout(ahead, left, back, right),
                *back.moves(back.ends[right], right),
            ]
        moves[0] = replace(moves[0], source_mesh=mesh, source=have)
        moves[-1] = replace(moves[-1], target_mesh=goal_mesh, target=want)
        return Path(tuple(moves), best.seconds)

    def _candidates(
        self, ahead: _Side, back: _Side, bound: Seconds, same: bool, large: bool
    ) -> list[tuple[Seconds, int, Code, Code]]:
        """Pairs of layouts for a ``send_receive``, with lower bounds of the whole path, lowest first."""
        least = self._least(ahead, back) if large else None
        found = []
        arrivals = [(far.seconds, right, back.space.partial(right)) for right, far in back.ends.items()]
        for left, near in ahead.ends.items():
            summands = ahead.space.partial(left)
            if near.seconds >= bound or (summands and not same):
                continue
            single = {left, *(step.other for step in ahead.space.steps(left))} if same else ()
            for seconds, right, others in arrivals:
                lower = near.seconds + seconds
                if lower < bound and others == summands and right not in single:
                    share, messages = least(left, right) if least else (0.0, 0)
                    found.append((lower + share, messages, left, right))
        found.sort(key=lambda candidate: candidate[:2])
        return found

    def _least(self, ahead: _Side, back: _Side) -> Callable[[Code, Code], tuple[Seconds, int]]:
        """What one receiver's share of a ``send_receive`` costs, as if it all came from the nearest device.

        Also about how many messages that takes.
        """
        devices, base = back.mesh.devices, whole(self.shape)
        receiver = next((device for device in reversed(devices) if device not in ahead.mesh), devices[-1])
        sender = min((d for d in ahead.mesh.devices if d != receiver), key=lambda d: (abs(d - receiver), d))
        holder = receiver if receiver in ahead.mesh else sender
        parts: dict[Code, Region] = {}
        goals: dict[Code, Region] = {}
        known: dict[int, Seconds] = {0: 0.0}

        def least(left: Code, right: Code) -> tuple[Seconds, int]:
            if left not in parts:
                parts[left] = region_of(base, ahead.space.decode(left), ahead.mesh, holder)
            if right not in goals:
                goals[right] = region_of(base, back.space.decode(right), back.mesh, receiver)
            part, goal = parts[left], goals[right]
            own = intersect(part, goal) if holder == receiver else None
            elements = prod(local_shape(goal)) - (prod(local_shape(own)) if own is not None else 0)
            if elements not in known:
                known[elements] = self.prices.transfer([(sender, receiver, elements * self.element_bytes)])
            pairs = zip(local_shape(goal), local_shape(part), strict=True)
            return known[elements], prod(max(1, wanted // held) for wanted, held in pairs)

        return least

    def _join(self, ahead: _Side, left: Code, back: _Side, right: Code) -> _Cost:
        """What the path costs that goes from ``left`` to ``right`` directly."""
        near, far = ahead.ends[left], back.ends[right]
        seconds, messages = self._price(ahead, left, back, right)
        # The sum is rounded as in _candidates, so that a tight lower bound is equal.
        return _Cost(near.seconds + far.seconds + seconds, near.hops + 1 + far.hops, messages)

    def _price(self, ahead: _Side, left: Code, back: _Side, right: Code) -> tuple[Seconds, int]:
        """The price of laying ``left`` out as ``right``, and the number of messages."""
        source, target = (ahead.mesh, ahead.space.decode(left)), (back.mesh, back.space.decode(right))
        key = (self.shape, self.element_bytes, source, target)
        found = self.memo.transfers.get(key)
        if found is None:
            sent = copies(self.shape, self.element_bytes, source, target)
            size = back.space.elements(right) * self.element_bytes
            found = (self.prices.transfer(sent) if sent else self.prices.local(size)), len(sent)
            self.memo.transfers[key] = found
        return found

    def _relayout(self, ahead: _Side, left: Code, back: _Side, right: Code) -> Move:
        source, target = (ahead.mesh, ahead.space.decode(left)), (back.mesh, back.space.decode(right))
        _, messages = self._price(ahead, left, back, right)
        return Move("send_receive" if messages else "local", (), *source, *target)
