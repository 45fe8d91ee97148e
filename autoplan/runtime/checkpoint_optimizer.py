"""Optimizer state by parameter names, as ``torch.distributed.checkpoint.state_dict`` names it.

``optimizer.state.<parameter>.<key>`` is either element-wise (the parameter's shape and regions) or a
scalar; ``optimizer.param_groups.<i>.<key>`` are the hyper-parameters, ``...params`` the parameters' names.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import Metadata, TensorStorageMetadata
from torch.optim import Optimizer

from autoplan.runtime.checkpoint_planner import Path, Shard
from searchspace.errors import CheckpointError
from searchspace.layout import whole

_STATE, _GROUPS = ("optimizer", "state"), ("optimizer", "param_groups")
_LOCAL = ("params", "param_names")
"""What a parameter group says of this process only."""


@dataclass
class OptimizerParts:
    """An optimizer in the pieces of a checkpoint; see :class:`ShardSavePlanner`."""

    shards: list[Shard] = field(default_factory=list)
    values: dict[Path, Any] = field(default_factory=dict)
    lists: dict[Path, list[str]] = field(default_factory=dict)


def take_apart(optimizer: Optimizer, shards: Sequence[Shard], coordinator: bool) -> OptimizerParts:
    """The state of ``optimizer``, which steps on the ``data`` of ``shards``.

    Raises CheckpointError for parameters that are not among ``shards``, and for state that is neither
    element-wise nor scalar: it could not be cut another way.
    """
    found = OptimizerParts()
    for i, group in enumerate(optimizer.param_groups):
        members = [shard for shard in _members(group["params"], shards) if shard is not None]
        found.lists[*_GROUPS, i, "params"] = list(dict.fromkeys(_parameter(shard) for shard in members))
        if coordinator:
            found.values |= {(*_GROUPS, i, key): value for key, value in group.items() if key not in _LOCAL}
        for shard in members:
            for key, value in optimizer.state.get(shard.data, {}).items():
                _take(found, shard, str(key), value)
    return found


def _take(found: OptimizerParts, shard: Shard, key: str, value: object) -> None:
    path = (*_STATE, _parameter(shard), key)
    first = shard.written and not any(shard.offsets)  # one shard of each parameter is
    if isinstance(value, Tensor) and value.shape == shard.data.shape:
        found.shards.append(Shard(path, shard.shape, shard.region, value, shard.written))
    elif isinstance(value, Tensor) and value.numel() == 1:
        found.shards.append(Shard(path, tuple(value.shape), whole(tuple(value.shape)), value, first))
    elif value is None or isinstance(value, bool | int | float | str):
        if first:
            found.values[path] = value
    else:
        kind = f"shape {list(value.shape)}" if isinstance(value, Tensor) else f"type {type(value).__name__}"
        raise CheckpointError(
            f"optimizer state {key!r} of {_parameter(shard)} has {kind}, its shard has shape "
            f"{list(shard.data.shape)}; only element-wise and scalar state can be saved"
        )


def _parameter(shard: Shard) -> str:
    """The parameter's name in the single-device model."""
    return str(shard.path[-1])


def _members(parameters: Sequence[Tensor], shards: Sequence[Shard]) -> list[Shard | None]:
    """The shards that an optimizer steps on; None for the stand-in of a rank that holds none."""
    by_identity = {id(shard.data): shard for shard in shards}
    for parameter in parameters:
        if id(parameter) not in by_identity and parameter.numel():
            raise CheckpointError(
                f"the optimizer has a parameter of shape {list(parameter.shape)} that is not one of the model's; "
                "make it from parallel.parameters()"
            )
    return [by_identity.get(id(parameter)) for parameter in parameters]


Wanted = Shard | str
"""A buffer to fill, or the name of a value to decode."""


class OptimizerReading:
    """How an optimizer's state is read from a checkpoint; first values, then shards, then the result."""

    def __init__(self, optimizer: Optimizer, shards: Sequence[Shard], metadata: Metadata) -> None:
        self._optimizer = optimizer
        self._stored = metadata.state_dict_metadata
        states: dict[str, dict[str, str]] = {}
        groups: dict[int, dict[str, Wanted]] = {}
        for name in self._stored:
            if name.startswith(".".join(_STATE)):
                parameter, _, key = name.removeprefix(".".join(_STATE) + ".").rpartition(".")
                states.setdefault(parameter, {})[key] = name
            elif name.startswith(".".join(_GROUPS)):
                _, _, index, key = name.split(".", 3)
                groups.setdefault(int(index), {})[key] = self._wanted(name)
        if len(groups) != len(optimizer.param_groups):
            raise CheckpointError(
                f"the checkpoint has {len(groups)} parameter groups, the optimizer {len(optimizer.param_groups)}"
                if groups
                else "the checkpoint holds no optimizer state"
            )
        self._groups = [groups[i] for i in sorted(groups)]
        self._members = [_members(group["params"], shards) for group in optimizer.param_groups]
        self._states = [[self._state(shard, states) for shard in members] for members in self._members]

    def _state(self, shard: Shard | None, states: Mapping[str, Mapping[str, str]]) -> dict[str, Wanted]:
        if shard is None:
            return {}
        return {key: self._wanted(name, shard) for key, name in states.get(_saved_name(shard, states), {}).items()}

    def _wanted(self, name: str, shard: Shard | None = None) -> Wanted:
        stored = self._stored[name]
        if not isinstance(stored, TensorStorageMetadata):
            return name
        size, dtype = tuple(stored.size), stored.properties.dtype
        if shard is not None and size == shard.shape:
            if dtype.is_floating_point and shard.data.is_floating_point():
                dtype = shard.data.dtype
            return Shard((name,), size, shard.region, torch.empty_like(shard.data.detach(), dtype=dtype))
        if prod(size) != 1:
            expected = list(shard.shape) if shard is not None else []
            raise CheckpointError(f"{name} has shape {list(size)} in the checkpoint, expected {expected} or a scalar")
        return Shard((name,), size, whole(size), torch.empty(size, dtype=dtype))

    @property
    def _all(self) -> list[Wanted]:
        groups = [wanted for group in self._groups for wanted in group.values()]
        return groups + [wanted for states in self._states for state in states for wanted in state.values()]

    @property
    def values(self) -> tuple[str, ...]:
        """Names of the values to read."""
        return tuple(dict.fromkeys(wanted for wanted in self._all if isinstance(wanted, str)))

    @property
    def shards(self) -> tuple[Shard, ...]:
        """Buffers to fill."""
        return tuple(wanted for wanted in self._all if isinstance(wanted, Shard))

    def check(self, values: Mapping[str, Any]) -> None:
        """CheckpointError when groups, or the kind of optimizer, differ from what was saved."""
        defaults = self._optimizer.defaults
        groups = [_filled(group, values) for group in self._groups]
        group_of = {name: i for i, saved in enumerate(groups) for name in saved.get("params", ())}
        for i, (saved, members) in enumerate(zip(groups, self._members, strict=True)):
            names = dict.fromkeys(_saved_name(shard, group_of) for shard in members if shard is not None)
            elsewhere = [name for name in names if group_of.get(name, i) != i]
            if elsewhere:
                raise CheckpointError(
                    f"{elsewhere[0]} is in parameter group {i} of the optimizer, in the checkpoint in group "
                    f"{group_of[elsewhere[0]]} ({len(elsewhere)} such parameters)"
                )
            lacking = [k for k, value in defaults.items() if not isinstance(value, bool | None) and k not in saved]
            if lacking:
                raise CheckpointError(
                    f"the checkpoint was saved by another kind of optimizer than {type(self._optimizer).__name__}: "
                    f"it has no {', '.join(lacking)}"
                )

    def result(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """What ``optimizer.load_state_dict`` takes; the shards are filled by now."""
        state: dict[int, dict[str, Any]] = {}
        groups = []
        for group, saved, states in zip(self._optimizer.param_groups, self._groups, self._states, strict=True):
            indices = [len(state) + i for i in range(len(states))]
            state |= {i: _filled(wanted, values) for i, wanted in zip(indices, states, strict=True)}
            local = {key: group[key] for key in _LOCAL if key in group} | {"params": indices}
            groups.append(_filled(saved, values) | local)
        return {"state": {i: found for i, found in state.items() if found}, "param_groups": groups}


def _filled(wanted: Mapping[str, Wanted], values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: w.data if isinstance(w, Shard) else values[w] for key, w in wanted.items()}


def _saved_name(shard: Shard, names: Collection[str]) -> str:
    """Under which of its names a (tied) parameter was saved."""
    known = [_parameter(shard), *(str(path[-1]) for path in shard.aliases)]
    return next((name for name in known if name in names), known[0])
