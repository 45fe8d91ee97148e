"""Planners for ``torch.distributed.checkpoint`` that know uneven regions.

A logical tensor is saved as the chunks that its holders write, each region once, and loaded into
whatever regions the reader holds.  Names and shapes are the single-device model's, so that torch's own
planners read the same files.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    LoadPlan,
    LoadPlanner,
    Metadata,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorStorageMetadata,
    WriteItem,
)
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta, TensorProperties
from torch.distributed.checkpoint.planner import LoadItemType, TensorWriteData, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from searchspace.errors import CheckpointError
from searchspace.layout import Region, Shape, local_shape

Path = tuple[str | int, ...]
"""Where a value stands in the nested state: ``("model", "wte.weight")``.  Its name joins it with dots."""


@dataclass(frozen=True, eq=False)
class Shard:
    """Part of a logical tensor that this process holds.

    Fields
        shape: shape of the whole tensor.
        region: which part of it ``data`` is.
        written: whether this process writes the region; exactly one of its holders does.
        aliases: other paths under which the same tensor is found (a tied parameter).
    """

    path: Path
    shape: Shape
    region: Region
    data: Tensor
    written: bool = True
    aliases: tuple[Path, ...] = ()

    def __post_init__(self) -> None:
        if tuple(self.data.shape) != local_shape(self.region):
            raise CheckpointError(
                f"{self.name}: the buffer has shape {list(self.data.shape)}, its region "
                f"{list(self.region)} has shape {list(local_shape(self.region))}"
            )

    @property
    def name(self) -> str:
        return name_of(self.path)

    @property
    def offsets(self) -> torch.Size:
        return torch.Size(low for low, _ in self.region)

    @property
    def chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(self.offsets, self.data.size())


def name_of(path: Path) -> str:
    """The name of a value in the checkpoint."""
    return ".".join(map(str, path))


@dataclass(frozen=True)
class _Told:
    """What each process tells the coordinator besides its items."""

    paths: Mapping[str, Path]
    aliases: Mapping[str, tuple[Path, ...]]
    lists: Mapping[Path, Sequence[str]]


class ShardSavePlanner(SavePlanner):
    """Writes the shards that this process is to write, and its values.

    ``values`` are given by one process each.  ``lists`` are given by every process, under equal paths;
    their union is saved, in the order of the processes.  A ``problem`` that this process found beforehand
    is raised where all processes learn of it.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        values: Mapping[Path, Any],
        lists: Mapping[Path, Sequence[str]],
        problem: CheckpointError | None = None,
    ) -> None:
        self._shards = {(s.name, s.offsets): s for s in shards if s.written}
        self._values = values
        self._lists = lists
        self._problem = problem
        self._encoded: dict[str, bytes] = {}

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        if self._problem is not None:
            raise self._problem
        self._encoded = {name_of(path): encode(name_of(path), value) for path, value in self._values.items()}

    def create_local_plan(self) -> SavePlan:
        shards = self._shards.values()
        items = [
            WriteItem(
                index=MetadataIndex(shard.name, shard.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=shard.chunk,
                    properties=TensorProperties(dtype=shard.data.dtype),
                    size=torch.Size(shard.shape),
                ),
            )
            for shard in shards
        ]
        items += [_bytes(name) for name in self._encoded]
        paths = {name_of(path): path for path in self._values} | {s.name: s.path for s in shards}
        aliases = {s.name: s.aliases for s in shards if s.aliases}
        return SavePlan(items, planner_data=_Told(paths, aliases, self._lists))

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        told: list[_Told] = [plan.planner_data for plan in all_plans]
        lists = _union([each.lists for each in told])
        self._encoded |= {name_of(path): encode(name_of(path), value) for path, value in lists.items()}
        own = [*all_plans[0].items, *(_bytes(name_of(path)) for path in lists)]
        plans, metadata = create_default_global_save_plan([replace(all_plans[0], items=own), *all_plans[1:]])
        found = metadata.state_dict_metadata
        for name, stored in found.items():
            if isinstance(stored, TensorStorageMetadata):
                held = sum(prod(chunk.sizes) for chunk in stored.chunks)
                if held != prod(stored.size):  # chunks of one layout are equal or disjoint
                    raise CheckpointError(f"{name}: the ranks write {held} of {prod(stored.size)} elements")
        paths = {name_of(path): path for path in lists}
        for each in told:
            paths |= each.paths
            for name, aliases in each.aliases.items():
                for path in aliases:
                    found[name_of(path)] = found[name]
                    paths[name_of(path)] = path
        metadata.planner_data = paths
        return plans, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        index = write_item.index
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(self._encoded[index.fqn])
        assert index.offset is not None
        return self._shards[index.fqn, index.offset].data.detach()


def _bytes(name: str) -> WriteItem:
    return WriteItem(index=MetadataIndex(name), type=WriteItemType.BYTE_IO)


def _union(lists: Sequence[Mapping[Path, Sequence[str]]]) -> dict[Path, list[str]]:
    for rank, each in enumerate(lists):
        if each.keys() != lists[0].keys():
            raise CheckpointError(
                f"rank {rank} has {len(each)} parameter groups, rank 0 has {len(lists[0])}; "
                "every rank needs the same groups, empty ones included"
            )
    return {path: list(dict.fromkeys(name for each in lists for name in each[path])) for path in lists[0]}


def encode(name: str, value: object) -> bytes:
    """``value`` as bytes that ``torch.load`` reads without running code; CheckpointError for what it refuses."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        decode(name, io.BytesIO(buffer.getvalue()))
    except (pickle.PickleError, AttributeError, TypeError, CheckpointError) as error:
        raise CheckpointError(
            f"{name} cannot be saved: use tensors, numbers, strings and containers of them only; {_first(error)}"
        ) from None
    return buffer.getvalue()


def decode(name: str, stream: io.BytesIO) -> Any:
    """Inverse of :func:`encode`; ValueError when the bytes are none of torch's archives."""
    if not zipfile.is_zipfile(stream):
        raise ValueError(f"{name} is unreadable")
    stream.seek(0)
    try:
        return torch.load(stream, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{name} holds objects that are not loaded for safety: {_first(error)}") from None


def _first(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


@dataclass(frozen=True)
class Request:
    """What a process wants of a checkpoint: shards to fill, and names of values to decode."""

    shards: tuple[Shard, ...] = ()
    values: tuple[str, ...] = ()


@dataclass
class ShardLoadPlanner(LoadPlanner):
    """Fills the shards of a request, all replicas in this process, and collects its values."""

    request: Request
    problem: CheckpointError | None = None
    values: dict[str, Any] = field(default_factory=dict)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        if self.problem is not None:
            raise self.problem
        assert metadata is not None
        self._metadata = metadata.state_dict_metadata
        self._shards: dict[tuple[str, torch.Size], list[Shard]] = {}
        for shard in self.request.shards:
            self._shards.setdefault((shard.name, shard.offsets), []).append(shard)

    def create_local_plan(self) -> LoadPlan:
        chunks: dict[str, list[ChunkStorageMetadata]] = {}
        for (name, _), shards in self._shards.items():
            chunks.setdefault(name, []).append(shards[0].chunk)
        items: list[ReadItem] = []
        for name, wanted in chunks.items():
            stored = self._metadata[name]
            assert isinstance(stored, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(name, stored, wanted)
        for name in self.request.values:
            if isinstance(self._metadata[name], BytesStorageMetadata):
                nothing, index = torch.Size((0,)), MetadataIndex(name)
                items.append(ReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing))
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        self.values[name] = decode(name, value)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        index = read_item.dest_index
        assert index.offset is not None
        return _narrow(self._shards[index.fqn, index.offset][0].data, read_item)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        index = read_item.dest_index
        assert index.offset is not None
        for replica in self._shards[index.fqn, index.offset][1:]:
            _narrow(replica.data, read_item).copy_(tensor)


def _narrow(tensor: Tensor, read_item: ReadItem) -> Tensor:
    view = tensor.detach()
    for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
        view = view.narrow(dim, start, length)
    return view
