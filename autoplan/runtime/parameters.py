"""The parameters' shards on the ranks of this process, and the way between them and whole tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from autoplan.runtime.dtypes import torch_dtype
from autoplan.runtime.transport import Transport
from searchspace.errors import CheckpointError, ExecutionError
from searchspace.graph import Graph
from searchspace.layout import Region, Shape, local_shape, region_of, whole
from searchspace.program import ParameterBinding, Program, Rank

EMPTY = "autoplan.no_parameters"
"""The name of the parameter without elements that a rank without shards steps on."""


@dataclass(frozen=True, eq=False)
class ParameterShard:
    """What one rank's optimizer steps on.

    Fields
        tensor: the graph tensor's name.
        name, aliases: qualified names in the single-device model.
        shape: of the whole parameter.
        region: what ``parameter`` holds of it.
        primary: of the ranks that hold this region, whether this one speaks for it.
    """

    tensor: str
    name: str
    aliases: tuple[str, ...]
    shape: Shape
    rank: Rank
    region: Region
    primary: bool
    parameter: nn.Parameter


class Shards:
    """All shards of this process's ranks.

    ``initial`` gives a parameter's whole value by its graph tensor, on ``meta`` if it is not known yet; each is
    sliced at once, so that no second whole copy lives.
    """

    def __init__(self, graph: Graph, program: Program, transport: Transport, initial: Mapping[str, Tensor]) -> None:
        self.graph = graph
        self.transport = transport
        self.bindings: Mapping[str, ParameterBinding] = {b.tensor: b for b in program.parameters}
        self.slots = program.slots
        self.by_rank: dict[Rank, dict[str, ParameterShard]] = {rank: {} for rank in transport.ranks}
        self.uninitialised: dict[str, None] = {}
        for tensor in graph.parameters:
            if tensor.name in self.bindings:
                self._place(tensor.name, initial[tensor.name])
        self._empty = nn.Parameter(torch.empty(0, device=transport.device))

    def _place(self, name: str, value: Tensor) -> None:
        tensor, owners = self.graph.tensor[name], self.owners(name)
        slot = self.slots[self.bindings[name].optimizer]
        dtype = torch_dtype(slot.dtype)
        for rank, held in self.by_rank.items():
            if rank not in slot.mesh:
                continue
            region = region_of(whole(tensor.shape), slot.layout, slot.mesh, rank)
            data = torch.empty(local_shape(region), dtype=dtype, device=self.transport.device)
            if not value.is_meta:
                data.copy_(slice_of(value.detach(), region))
            held[name] = ParameterShard(
                name, tensor.source, tensor.aliases, tensor.shape, rank, region, owners[region] == rank,
                nn.Parameter(data, requires_grad=tensor.requires_grad),
            )  # fmt: skip
        if value.is_meta:
            self.uninitialised[name] = None

    def owners(self, name: str) -> dict[Region, Rank]:
        """The distinct regions in which the optimizer holds a parameter, and the rank that speaks for each."""
        slot = self.slots[self.bindings[name].optimizer]
        found: dict[Region, Rank] = {}
        for rank in slot.mesh.devices:
            region = region_of(whole(self.graph.tensor[name].shape), slot.layout, slot.mesh, rank)
            found.setdefault(region, rank)
        return found

    def __iter__(self) -> Iterator[ParameterShard]:
        """Parameters in the model's order; a parameter's shards by rank."""
        for name in self.bindings:
            for held in self.by_rank.values():
                if name in held:
                    yield held[name]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What the optimizer of this process steps on; a process without shards has one without elements."""
        if not any(self.by_rank.values()):
            yield EMPTY, self._empty
        for shard in self:
            yield shard.name, shard.parameter

    def gather(self, name: str, of: Callable[[ParameterShard], Tensor | None], dtype: torch.dtype) -> Tensor:
        """The whole tensor made of ``of(shard)`` of every shard (None: zeros), on every rank; collective."""
        result = torch.zeros(self.graph.tensor[name].shape, dtype=dtype, device=self.transport.device)
        for region, owner in self.owners(name).items():
            piece = None
            if owner in self.by_rank:
                value = of(self.by_rank[owner][name])
                piece = torch.zeros(local_shape(region), dtype=dtype, device=result.device)
                if value is not None:
                    piece.copy_(value.detach())
            slice_of(result, region).copy_(self.transport.fetch(owner, piece, local_shape(region), dtype))
        return result

    def dtype(self, name: str) -> torch.dtype:
        """The dtype that the optimizer steps on."""
        return torch_dtype(self.slots[self.bindings[name].optimizer].dtype)

    def load(self, name: str, value: Tensor) -> None:
        """Set every shard of a parameter from its whole value; CheckpointError when the shape differs."""
        expected = self.graph.tensor[name].shape
        if tuple(value.shape) != expected:
            source = self.graph.tensor[name].source
            raise CheckpointError(f"{source}: expected shape {list(expected)}, got {list(value.shape)}")
        with torch.no_grad():
            for held in self.by_rank.values():
                if name in held:
                    held[name].parameter.copy_(slice_of(value, held[name].region))
        self.uninitialised.pop(name, None)

    def check_initialised(self) -> None:
        """ExecutionError naming the parameters that have no value yet."""
        if self.uninitialised:
            names = [self.graph.tensor[name].source for name in self.uninitialised]
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ExecutionError(
                f"parameters {', '.join(names[:3])}{more} have no values: the model is on the meta device; "
                "call load_state_dict or initialize first"
            )


def slice_of(value: Tensor, region: Region) -> Tensor:
    """The view of a whole tensor that ``region`` covers."""
    return value[tuple(slice(low, high) for low, high in region)] if region else value
