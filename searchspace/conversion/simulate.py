"""All ranks in one process, on numpy arrays: what an exchange means, for tests of conversions and runtimes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from searchspace.conversion.moves import Placed
from searchspace.errors import ExecutionError
from searchspace.layout import Partial, Region, region_of, relative, whole
from searchspace.mesh import Device
from searchspace.program import Exchange, Key, Rank, Reduction, Slices

Array = NDArray[Any]
Buffers = dict[Device, Array]

_COMBINE = {"sum": np.add, "max": np.maximum}


def execute(exchanges: Mapping[Rank, Exchange], memory: Mapping[Rank, dict[Key, Array]]) -> None:
    """Carry out one step: every rank's buffer ``source`` makes its buffer ``target`` in ``memory``.

    ExecutionError when a message has no receiver or no sender, or does not fit.
    """
    mail: dict[tuple[Rank, Rank], list[Array]] = {}
    for rank, exchange in exchanges.items():
        for peer, slices in exchange.send:
            if exchange.source is None:
                raise ExecutionError(f"rank {rank} sends to rank {peer} but has no source buffer")
            buffer = memory[rank][exchange.source].astype(_numpy_dtype(exchange.dtype))
            mail.setdefault((rank, peer), []).append(buffer[_index(slices)])
    for rank, exchange in exchanges.items():
        arrived = [
            (slices, mail[peer, rank].pop(0)) if mail.get((peer, rank)) else (slices, None)
            for peer, slices in exchange.receive
        ]
        if exchange.target is None:
            continue
        target = np.zeros(exchange.shape, _numpy_dtype(exchange.dtype))
        filled: set[Slices] = set()
        for slices, part in arrived:
            if part is None:
                raise ExecutionError(f"rank {rank} waits for {slices} of {exchange.target[0]}, which nobody sends")
            here = target[_index(slices)]
            if part.shape != here.shape:
                raise ExecutionError(f"rank {rank} got a part of shape {part.shape} for slices {slices}")
            combine = exchange.reduction is not None and slices in filled
            target[_index(slices)] = _combine(exchange.reduction or "sum", here, part) if combine else part
            filled.add(slices)
        memory[rank][exchange.target] = target
    left = sorted(pair for pair, parts in mail.items() if parts)
    if left:
        raise ExecutionError(f"rank {left[0][0]} sent rank {left[0][1]} a part that it does not receive")


def scatter(array: Array, placed: Placed, seed: int = 0) -> Buffers:
    """What each device holds when ``array`` lies as ``placed``; summands of a partial layout are random.

    Summands are whole numbers, so that floating point adds them up exactly if the array is whole-numbered.
    """
    mesh, layout = placed
    random = np.random.default_rng(seed)
    members = [array]
    partial = [axis for axis, placement in enumerate(layout) if isinstance(placement, Partial)]
    places = sorted({tuple(mesh.coordinates(device)[axis] for axis in partial) for device in mesh.devices})
    noise = [random.integers(1, 9, array.shape).astype(array.dtype) for _ in places]
    if Partial("max") in layout:
        winner = random.integers(0, len(places), array.shape)
        members = [np.where(winner == i, array, array - noise[i]) for i in range(len(places))]
    elif partial:
        members = [*noise[:-1], array - np.sum(noise[:-1], axis=0, dtype=array.dtype, initial=0)]
    held = dict(zip(places, members, strict=True))
    return {
        device: held[tuple(mesh.coordinates(device)[axis] for axis in partial)][
            _index(region_of(whole(array.shape), layout, mesh, device))
        ]
        for device in mesh.devices
    }


def gather(buffers: Mapping[Device, Array], base: Region, placed: Placed) -> Array:
    """The array of region ``base`` that ``buffers`` stand for; ExecutionError when replicas differ."""
    mesh, layout = placed
    partial = [axis for axis, placement in enumerate(layout) if isinstance(placement, Partial)]
    reduction: Reduction = next((p.reduction for p in layout if isinstance(p, Partial)), "sum")
    array = np.zeros([high - low for low, high in base], buffers[mesh.devices[0]].dtype)
    known = np.zeros(array.shape, bool)
    for group in mesh.groups(partial):
        place = _index(relative(region_of(base, layout, mesh, group[0]), base))
        value = reduce(lambda a, b: _combine(reduction, a, b), (buffers[device] for device in group))
        if value.shape != array[place].shape:
            raise ExecutionError(f"device {group[0]} holds shape {value.shape}, its region is {array[place].shape}")
        if np.any(known[place] & (array[place] != value)):
            raise ExecutionError(f"device {group[0]} differs from its replicas")
        array[place], known[place] = value, True
    return array


def _combine(reduction: Reduction, a: Array, b: Array) -> Array:
    return _COMBINE[reduction](a, b)


def _index(slices: Slices) -> tuple[slice, ...]:
    return tuple(slice(low, high) for low, high in slices)


def _numpy_dtype(name: str) -> np.dtype:
    """numpy has no bfloat16 or float8: they are simulated in float32."""
    return np.dtype("float32" if name == "bfloat16" or name.startswith("float8") else name)
