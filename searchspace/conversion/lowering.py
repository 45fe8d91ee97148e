"""From moves to what each rank executes."""

from __future__ import annotations

from searchspace.conversion.moves import Move
from searchspace.conversion.routes import routes
from searchspace.layout import (
    Partial,
    Region,
    Replicated,
    intersect,
    local_shape,
    region_of,
    relative,
)
from searchspace.mesh import Device, Mesh
from searchspace.program import Exchange, Key, Rank, Slices

Entry = tuple[Rank, Slices]


def lower(move: Move, base: Region, source: Key, target: Key, dtype: str) -> dict[Rank, Exchange]:
    """The exchanges, one per rank of both meshes, that carry out ``move``.

    ``base`` is the region of the whole tensor that each mesh holds (the part of one micro-batch, say),
    ``source`` and ``target`` name the buffers on all ranks, ``dtype`` is the target's.
    """
    have = _regions(base, move.source_mesh, move.source)
    want = _regions(base, move.target_mesh, move.target)
    if move.axes and move.kind != "local":
        if 0 in local_shape(base):  # nothing to exchange
            return {
                rank: Exchange("local", (rank,), source, target, shape=local_shape(region), dtype=dtype)
                for rank, region in want.items()
            }
        return _collective(move, have, want, source, target, dtype)
    send: dict[Rank, list[Entry]] = {rank: [] for rank in (*have, *want)}
    receive: dict[Rank, list[Entry]] = {rank: [] for rank in send}
    pairs = routes(base, move.before, move.after) if not move.axes else _kept(move, have, want)
    for sender, receiver, region in pairs:
        send[sender].append((receiver, relative(region, have[sender])))
        receive[receiver].append((sender, relative(region, want[receiver])))
    everybody = tuple(sorted(send))
    local = move.kind == "local"
    return {
        rank: Exchange(
            move.kind,
            (rank,) if local else everybody,
            source if rank in have else None,
            target if rank in want else None,
            tuple(send[rank]),
            tuple(receive[rank]),
            None,
            local_shape(want[rank]) if rank in want else (),
            dtype,
        )
        for rank in everybody
        if rank in want or not local
    }


def _regions(base: Region, mesh: Mesh, layout: tuple) -> dict[Device, Region]:
    return {device: region_of(base, layout, mesh, device) for device in mesh.devices}


def _kept(move: Move, have: dict[Device, Region], want: dict[Device, Region]) -> list[tuple[Rank, Rank, Region]]:
    """What each rank keeps in a slice, a mask or a pad."""
    first_only = [
        axis for axis in move.axes if isinstance(move.source[axis], Replicated) and move.target[axis] == Partial("sum")
    ]
    found = []
    for rank in move.source_mesh.devices:
        at = move.source_mesh.coordinates(rank)
        region = intersect(have[rank], want[rank])
        if region is not None and all(at[axis] == 0 for axis in first_only):
            found.append((rank, rank, region))
    return found


def _collective(
    move: Move, have: dict[Device, Region], want: dict[Device, Region], source: Key, target: Key, dtype: str
) -> dict[Rank, Exchange]:
    reduced = next((p.reduction for p in (move.source[a] for a in move.axes) if isinstance(p, Partial)), None)
    found = {}
    for group in move.source_mesh.groups(move.axes):
        shared: dict[tuple[str, Region], tuple[Entry, ...]] = {}
        for rank in group:
            mine, goal = have[rank], want[rank]
            # Most members send, or receive, the same: one tuple serves them all.
            send = shared.get(("send", mine))
            if send is None:
                send = shared["send", mine] = tuple(
                    (peer, relative(part, mine)) for peer in group if (part := intersect(mine, want[peer])) is not None
                )
            receive = shared.get(("receive", goal))
            if receive is None:
                receive = shared["receive", goal] = tuple(
                    (peer, relative(part, goal)) for peer in group if (part := intersect(have[peer], goal)) is not None
                )
            found[rank] = Exchange(move.kind, group, source, target, send, receive, reduced, local_shape(goal), dtype)
    return found
