"""What a process holds of a model's state: of a plain model all of it, of a parallel one its ranks' shards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autoplan.runtime.checkpoint_planner import Shard
from autoplan.runtime.parameters import Shards
from autoplan.runtime.state import State
from searchspace.errors import CheckpointError
from searchspace.layout import Layout, Region, Shape, region_of, whole
from searchspace.mesh import Mesh
from searchspace.program import Rank


@dataclass(frozen=True)
class ModelTensor:
    """A parameter or persistent buffer of the single-device model; ``aliases`` are its further names."""

    name: str
    shape: Shape
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Holding:
    """What one process holds.

    Fields
        tensors: everything that the model's state dict names, here or elsewhere; equal on all processes.
        shards: what this process holds of it.  The ``data`` of a parameter is what optimizers step on.
        objects: what the state dict has besides tensors, by name; equal on all processes.
        process: index of this process; process 0 coordinates.
        distributed: whether there are others, in ``group`` (None: torch's default group).
        device: where this process computes.
        information: saved under ``autoplan.<key>``.
    """

    tensors: tuple[ModelTensor, ...]
    shards: tuple[Shard, ...]
    objects: Mapping[str, Any] = field(default_factory=dict)
    process: int = 0
    distributed: bool = False
    group: dist.ProcessGroup | None = None
    device: torch.device = torch.device("cpu")
    information: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        empty = [str(shard.path[-1]) for shard in self.shards if shard.data.is_meta]
        if empty:
            raise CheckpointError(f"{empty[0]} is on the meta device and has no values ({len(empty)} such tensors)")


def single_device(model: nn.Module) -> Holding:
    """A plain model, to save or load it in the same format.

    What its state dict has besides tensors is in ``Restored.objects`` after loading.
    """
    kept = model.state_dict(keep_vars=True)
    names: dict[int, list[str]] = {}
    for name, value in kept.items():
        if isinstance(value, Tensor):
            names.setdefault(id(value), []).append(name)
    tensors = tuple(ModelTensor(n, tuple(kept[n].shape), tuple(others)) for n, *others in names.values())
    shards = tuple(shard_of(t, whole(t.shape), kept[t.name], written=True) for t in tensors)
    objects = {name: value for name, value in kept.items() if not isinstance(value, Tensor)}
    device = next((shard.data.device for shard in shards), torch.device("cpu"))
    return Holding(tensors, shards, objects, device=device)


def parallel_model(state: State, shards: Shards, information: Mapping[str, Any]) -> Holding:
    """The ranks of this process in a parallel model.

    What the model does not use lies whole on every process, as buffers do; process 0 writes those.
    """
    transport, graph = shards.transport, shards.graph
    names: dict[str, list[str]] = {}
    for name, used in state.names.items():
        names.setdefault(name if used is None else used, []).append(name)
    tensors: list[ModelTensor] = []
    found: list[Shard] = []
    process = transport.ranks[0]
    for turn, (key, (name, *aliases)) in enumerate(names.items()):
        binding = shards.bindings.get(key)
        if binding is None:
            value = state.buffers.get(key, state.others.get(key))
            if isinstance(value, Tensor):
                tensors.append(ModelTensor(name, tuple(value.shape), tuple(aliases)))
                found.append(shard_of(tensors[-1], whole(tensors[-1].shape), value, process == 0))
            continue
        tensors.append(ModelTensor(name, graph.tensor[key].shape, tuple(aliases)))
        slot = shards.slots[binding.optimizer]
        data = {rank: held[key].parameter for rank, held in shards.by_rank.items() if key in held}
        found += shards_on(tensors[-1], slot.layout, slot.mesh, data, turn)
    return Holding(
        tuple(tensors),
        tuple(found),
        {name: value for name, value in state.others.items() if not isinstance(value, Tensor)},
        process,
        transport.world > len(transport.ranks),
        transport.control,
        transport.device,
        information,
    )


def shard_of(tensor: ModelTensor, region: Region, data: Tensor, written: bool) -> Shard:
    """A part of a model's tensor under its path in the checkpoint."""
    aliases = tuple(("model", alias) for alias in tensor.aliases)
    return Shard(("model", tensor.name), tensor.shape, region, data, written, aliases)


def shards_on(
    tensor: ModelTensor, layout: Layout, mesh: Mesh, data: Mapping[Rank, Tensor], turn: int = 0
) -> list[Shard]:
    """The shards that the ranks in ``data`` hold of a tensor that lies on ``mesh`` in ``layout``.

    Of the ranks that hold the same region one writes it; ``turn`` (any number, equal on all processes)
    chooses, so that replicas share the work.
    """
    return [
        shard_of(tensor, region, data[rank], rank == ranks[turn % len(ranks)])
        for region, ranks in _holders(tensor.shape, layout, mesh).items()
        for rank in ranks
        if rank in data
    ]


@lru_cache(maxsize=4096)
def _holders(shape: Shape, layout: Layout, mesh: Mesh) -> Mapping[Region, tuple[Rank, ...]]:
    found: dict[Region, list[Rank]] = {}
    for rank in mesh.devices:
        found.setdefault(region_of(whole(shape), layout, mesh, rank), []).append(rank)
    return {region: tuple(ranks) for region, ranks in found.items()}
