"""Who sends what to whom when a tensor is laid out anew."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from math import prod

from searchspace.conversion.moves import Placed
from searchspace.conversion.prices import Copy
from searchspace.layout import Interval, Layout, Partial, Region, Shape, Split, cut, is_partial, whole
from searchspace.mesh import Device, Mesh

Class = tuple[int, ...]
"""Devices of one class hold the same region: the number of their part along each dimension."""

Route = tuple[Device, Device, Region]
"""(from, to, what): the two devices may be the same."""


class Holders:
    """Which devices of ``mesh`` hold which part of ``base``, by classes.

    ``parts[d]`` are the parts of dimension d, in order.
    """

    def __init__(self, base: Region, layout: Layout, mesh: Mesh) -> None:
        self.parts: list[list[Interval]] = []
        self._axes: list[list[int]] = []
        for dim, interval in enumerate(base):
            parts, axes = [interval], []
            for axis, placement in enumerate(layout):
                if isinstance(placement, Split) and placement.dim == dim:
                    size = mesh.shape[axis]
                    parts = [cut(part, placement.unit, size, i) for part in parts for i in range(size)]
                    axes.append(axis)
            self.parts.append(parts)
            self._axes.append(axes)
        self.mesh = mesh
        self.replicas: dict[Class, list[Device]] = {}
        for device in sorted(mesh.devices):
            self.replicas.setdefault(self.class_of(device), []).append(device)
        self.holding = {device: which for which, devices in self.replicas.items() for device in devices}

    def class_of(self, device: Device) -> Class:
        at, shape = self.mesh.coordinates(device), self.mesh.shape
        found = []
        for axes in self._axes:
            index = 0
            for axis in axes:
                index = index * shape[axis] + at[axis]
            found.append(index)
        return tuple(found)

    def region(self, which: Class) -> Region:
        return tuple(parts[i] for parts, i in zip(self.parts, which, strict=True))


def _overlaps(parts: Sequence[Interval], wanted: Interval) -> list[tuple[int, Interval]]:
    """The parts (ascending) that have something of ``wanted``: their numbers, and what they have."""
    low, high = wanted
    first = bisect_right(parts, low, key=lambda part: part[1])
    last = bisect_left(parts, high, key=lambda part: part[0])
    return [(i, (max(low, parts[i][0]), min(high, parts[i][1]))) for i in range(first, last)]


@lru_cache(maxsize=512)
def holders(base: Region, layout: Layout, mesh: Mesh) -> Holders:
    """The (shared) :class:`Holders` of these arguments."""
    return Holders(base, layout, mesh)


def routes(base: Region, source: Placed, target: Placed) -> list[Route]:
    """Routes that give each device of the target its region of ``base``, every element once.

    A device takes what it holds from itself.  Replicas share the work: the devices that want
    something of one part, in ascending order, are dealt out in equal runs to its holders in
    ascending order, so that neighbours serve neighbours.  Partial layouts must be partial on the
    same axes of the same mesh; summands are then laid out each for itself.
    """
    have, want = holders(base, source[1], source[0]), holders(base, target[1], target[0])
    overlaps = [[_overlaps(have.parts[d], part) for part in parts] for d, parts in enumerate(want.parts)]
    sizes = source[0].shape
    partial = [axis for axis, p in enumerate(source[1]) if isinstance(p, Partial) and sizes[axis] > 1]
    pieces: dict[Class, list[tuple[Class, Region]]] = {}
    for which in want.replicas:
        pieces[which] = []
        for combination in product(*(overlaps[d][i] for d, i in enumerate(which))):
            pieces[which].append((tuple(i for i, _ in combination), tuple(part for _, part in combination)))
    found: list[Route] = []
    requests: dict[tuple[Class, Class], list[tuple[Device, Region]]] = {}
    for device in sorted(target[0].devices):
        summand = tuple(target[0].coordinates(device)[axis] for axis in partial)
        mine = have.holding.get(device)
        for held, region in pieces[want.holding[device]]:
            if held == mine:
                found.append((device, device, region))
            else:
                requests.setdefault((held, summand), []).append((device, region))
    for (held, summand), wanted in requests.items():
        senders = have.replicas[held]
        if partial:
            at = source[0].coordinates
            senders = [device for device in senders if tuple(at(device)[axis] for axis in partial) == summand]
        found += [(senders[k * len(senders) // len(wanted)], *request) for k, request in enumerate(wanted)]
    return found


def copies(shape: Shape, element_bytes: int, source: Placed, target: Placed) -> list[Copy]:
    """What :func:`routes` sends between different devices, in bytes."""
    sizes: dict[int, int] = {}  # by identity: replicas want the same region objects
    found = []
    for sender, receiver, region in routes(whole(shape), source, target):
        if sender != receiver:
            size = sizes.get(id(region))
            if size is None:
                size = sizes[id(region)] = prod(high - low for low, high in region) * element_bytes
            found.append((sender, receiver, size))
    return found


def same_buffers(shape: Shape, source: Placed, target: Placed) -> bool:
    """Whether source and target are the same devices, each with the same region and nothing partial."""
    if is_partial(source[1]) or is_partial(target[1]) or sorted(source[0].devices) != sorted(target[0].devices):
        return False
    have, want = (holders(whole(shape), layout, mesh) for mesh, layout in (source, target))
    return all(have.region(have.holding[d]) == want.region(want.holding[d]) for d in have.holding)
