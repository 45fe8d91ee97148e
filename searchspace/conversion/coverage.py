"""Proof that a step of communication delivers every element exactly once.

Written from the meaning of :class:`searchspace.program.Exchange` alone, not from how exchanges are
made: it follows regions of the whole tensor from the senders' buffers to the receivers'.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from searchspace.conversion.moves import Placed
from searchspace.errors import IllegalPlanError
from searchspace.layout import Layout, Partial, Region, intersect, region_of
from searchspace.mesh import Device
from searchspace.program import Exchange, Rank, Reduction, Slices

Summand = tuple[int, ...]
"""Coordinates along the partial axes: which summand of the value a device holds."""


def check_coverage(
    tensor: str, exchanges: Mapping[Rank, Exchange], base: Region, source: Placed, target: Placed
) -> None:
    """Raise IllegalPlanError unless ``exchanges`` turn ``source`` into ``target``, both of region ``base``.

    Proved: every message has one sender and one receiver, which mean the same elements; nothing is
    overwritten; and of each device's region (taken together with the devices that hold the other
    summands of it) every element of every summand of the source arrives exactly once, or for
    maxima, at least once.
    """
    reductions = {p.reduction for p in (*source[1], *target[1]) if isinstance(p, Partial)}
    if len(reductions) > 1:
        raise IllegalPlanError(f"{tensor}: one exchange cannot turn a sum of parts into a maximum of parts, or back")
    reduction: Reduction = min(reductions, default="sum")
    received = _Received(tensor, exchanges, base, source, target, reduction)
    mesh, layout = target
    summands = sorted({_summand(source, device) for device in source[0].devices})
    for members in mesh.groups(_partial_axes(layout)):
        goal = received.want[members[0]]
        for summand in summands:
            regions = [r for member in members for s, r in received.pieces[member] if s == summand]
            least, most = _times(goal, regions)
            if least < 1 or (most > 1 and reduction == "sum"):
                raise IllegalPlanError(
                    f"{tensor}: rank {members[0]} needs each element of {_text(goal)} exactly once"
                    f"{f' from summand {summand}' if summand else ''}, but would get some"
                    f" {least if least < 1 else most} times"
                )


class _Received:
    """For each device of the target, the (summand, region of the whole tensor) pairs that it receives."""

    def __init__(
        self,
        tensor: str,
        exchanges: Mapping[Rank, Exchange],
        base: Region,
        source: Placed,
        target: Placed,
        reduction: Reduction,
    ) -> None:
        self.tensor = tensor
        have = {device: region_of(base, source[1], source[0], device) for device in source[0].devices}
        self.want = {device: region_of(base, target[1], target[0], device) for device in target[0].devices}
        self.pieces: dict[Device, list[tuple[Summand, Region]]] = {}
        sent: dict[tuple[Rank, Rank], deque[Region]] = {}
        for rank, exchange in exchanges.items():
            for peer, slices in exchange.send:
                if rank not in have:
                    raise IllegalPlanError(f"{tensor}: rank {rank} sends but holds nothing")
                sent.setdefault((rank, peer), deque()).append(self._place(rank, slices, have[rank]))
        for rank, goal in self.want.items():
            if rank not in exchanges:
                raise IllegalPlanError(f"{tensor}: rank {rank} needs {_text(goal)} but takes no part")
            exchange = exchanges[rank]
            if exchange.reduction not in (None, reduction):
                raise IllegalPlanError(f"{tensor}: rank {rank} combines by {exchange.reduction}, not {reduction}")
            self.pieces[rank] = []
            for peer, slices in exchange.receive:
                region = self._place(rank, slices, goal)
                queue = sent.get((peer, rank))
                if not queue:
                    raise IllegalPlanError(
                        f"{tensor}: rank {rank} waits for {_text(region)}; rank {peer} sends nothing"
                    )
                if (given := queue.popleft()) != region:
                    raise IllegalPlanError(
                        f"{tensor}: rank {rank} wants {_text(region)}, rank {peer} sends it {_text(given)}"
                    )
                self.pieces[rank].append((_summand(source, peer), region))
            self._check_overwriting(rank, goal, exchange)
        for (rank, peer), left in sent.items():
            if left:
                raise IllegalPlanError(f"{tensor}: rank {peer} does not receive {_text(left[0])} from rank {rank}")

    def _place(self, rank: Rank, slices: Slices, region: Region) -> Region:
        """The region that ``slices`` of a buffer mean that holds ``region``."""
        found = tuple((origin + low, origin + high) for (low, high), (origin, _) in zip(slices, region, strict=True))
        if any(low < 0 for low, _ in slices) or intersect(found, region) != found:
            raise IllegalPlanError(f"{self.tensor}: slices {_text(slices)} of rank {rank} exceed its {_text(region)}")
        return found

    def _check_overwriting(self, rank: Rank, goal: Region, exchange: Exchange) -> None:
        regions = [region for _, region in self.pieces[rank]]
        distinct = list(dict.fromkeys(regions))
        _, most = _times(goal, distinct if exchange.reduction else regions)
        if most > 1:
            raise IllegalPlanError(f"{self.tensor}: rank {rank} overwrites elements of {_text(goal)}")


def _times(goal: Region, regions: Sequence[Region]) -> tuple[int, int]:
    """How often, at least and at most, ``regions`` cover an element of ``goal``."""
    if any(low == high for low, high in goal):
        return 1, 1  # there is nothing to cover
    if all(region == goal for region in regions):
        return len(regions), len(regions)
    bounds = [sorted({*interval, *(edge for r in regions for edge in r[d])}) for d, interval in enumerate(goal)]
    places = [{edge: i for i, edge in enumerate(edges)} for edges in bounds]
    counts = np.zeros([len(edges) - 1 for edges in bounds], dtype=np.int64)
    for region in regions:
        counts[tuple(slice(at[low], at[high]) for at, (low, high) in zip(places, region, strict=True))] += 1
    return int(counts.min()), int(counts.max())


def _partial_axes(layout: Layout) -> tuple[int, ...]:
    return tuple(axis for axis, placement in enumerate(layout) if isinstance(placement, Partial))


def _summand(placed: Placed, device: Device) -> Summand:
    at = placed[0].coordinates(device)
    return tuple(at[axis] for axis in _partial_axes(placed[1]))


def _text(region: Iterable[tuple[int, int]]) -> str:
    return "[" + ", ".join(f"{low}:{high}" for low, high in region) + "]"
