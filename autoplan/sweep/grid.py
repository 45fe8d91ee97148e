"""What a sweep covers: lists whose product are its cells, in a TOML file or a mapping of the same form.

output = "sweep-results"             # folder for plans and tables

[grid]
models = ["gpt3-1.3b", "models.py:build"]
clusters = ["h100", "a100-80gb:1x8"]
devices = [8, 16]                    # clusters resized to so many devices
global_batch = [256, 512]
sequence = [2048]
memory_limit = ["60 GiB"]

[search]                             # the same for every cell: what autoplan.search takes
optimizer = "adamw"
precision = "bf16"
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from autoplan.sweep.cell import Cell
from costmodel.cluster import Cluster
from costmodel.device import preset
from costmodel.units import quantity
from searchspace.errors import ClusterError, SweepError

ModelSource = str | Callable[..., Any]

_LISTS = {"cluster": "clusters"}
_AXES = ("models", "clusters", "devices", "global_batch", "sequence", "memory_limit")


@dataclass(frozen=True)
class Grid:
    """Lists of values; ``None`` in a list means "the default".

    Fields
        models: references as the command line takes them, or functions that return a model and inputs.
        devices: sizes to which each cluster is resized, with as many devices a node as it has.
        memory_limit: bytes per device, or text with a unit.
        search: keyword arguments of ``autoplan.search`` for every cell.
        model: keyword arguments of the model's function for every cell.
    """

    models: tuple[ModelSource, ...]
    clusters: tuple[str, ...]
    devices: tuple[int | None, ...] = (None,)
    global_batch: tuple[int | None, ...] = (None,)
    sequence: tuple[int | None, ...] = (None,)
    memory_limit: tuple[int | str | None, ...] = (None,)
    search: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in _AXES:
            values = getattr(self, name)
            if not values:
                raise SweepError(f"grid.{name} is empty")
            if len(set(values)) != len(values):
                raise SweepError(f"grid.{name} holds a value twice: {list(values)}")
        for name in ("devices", "global_batch", "sequence"):
            for value in getattr(self, name):
                if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                    raise SweepError(f"grid.{name}: expected whole numbers >= 1, got {value!r}")
        for name in ("cluster", "global_batch", "memory_limit"):
            if name in self.search:
                raise SweepError(f"search.{name} belongs into [grid], as grid.{_LISTS.get(name, name)}")

    def cells(self) -> tuple[Cell, ...]:
        """The product of all lists, the last list fastest.

        Raises SweepError or ClusterError for a cluster that does not exist in the wanted size.
        """
        limits = tuple(None if limit is None else _bytes(limit) for limit in self.memory_limit)
        sized = [resized(cluster, count) for cluster, count in product(self.clusters, self.devices)]
        return tuple(
            Cell.of(model, cluster, batch, length, limit, self.search, self.model)
            for model, cluster, batch, length, limit in product(
                self.models, dict.fromkeys(sized), self.global_batch, self.sequence, limits
            )
        )


@dataclass(frozen=True)
class SweepFile:
    """A grid and where its results go."""

    grid: Grid
    output: Path


def read(source: str | os.PathLike[str] | Mapping[str, Any]) -> SweepFile:
    """A sweep from a TOML file or a mapping of the same form; SweepError says which key is wrong.

    Paths in a file (``output``, and models as ``file.py:function``) are relative to the file's folder.
    """
    if isinstance(source, Mapping):
        return _parse(source, "sweep", Path())
    path = Path(source)
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise SweepError(f"{path}: cannot read the sweep: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise SweepError(f"{path}: not TOML: {error}") from None
    return _parse(data, str(path), path.parent)


def resized(cluster: str, devices: int | None) -> str:
    """``cluster`` with ``devices`` devices in nodes of its size: ``("h100:2x8", 32)`` is ``"h100:4x8"``.

    A device's name alone means nodes as its preset has them.
    """
    if devices is None:
        return cluster if ":" in cluster or cluster.endswith((".toml", ".json")) else f"{cluster}:1"
    if ":" in cluster:
        parsed = Cluster.parse(cluster)
        if not parsed.homogeneous:
            raise SweepError(f"cluster {cluster!r} has nodes of several kinds and cannot be resized to {devices}")
        name, per_node = cluster.partition(":")[0], parsed.nodes[0].count
    elif cluster.endswith((".toml", ".json")):
        raise SweepError(f"cluster file {cluster!r} cannot be resized; leave out grid.devices, or name a preset")
    else:
        name, per_node = cluster, preset(cluster).devices_per_node
    if devices <= per_node:
        return f"{name}:1x{devices}"
    if devices % per_node:
        raise SweepError(f"{devices} devices are no whole number of {name} nodes of {per_node}")
    return f"{name}:{devices // per_node}x{per_node}"


def _parse(data: Mapping[str, Any], where: str, folder: Path) -> SweepFile:
    _known(data, ("output", "grid", "search", "model"), where)
    axes = data.get("grid")
    if not isinstance(axes, Mapping):
        raise SweepError(f"{where}: expected a table [grid] with models and clusters")
    _known(axes, _AXES, f"{where}: grid")
    for needed in ("models", "clusters"):
        if needed not in axes:
            raise SweepError(f"{where}: grid.{needed} is missing")
    lists: dict[str, Any] = {name: tuple(v if isinstance(v, list | tuple) else [v]) for name, v in axes.items()}
    lists["models"] = tuple(_relative(model, folder) for model in lists["models"])
    options: dict[str, Any] = {name: data.get(name, {}) for name in ("search", "model")}
    for name, value in options.items():
        if not isinstance(value, Mapping):
            raise SweepError(f"{where}: expected a table [{name}], got {value!r}")
    return SweepFile(Grid(**lists, **options), folder / data.get("output", "sweep-results"))


def _known(data: Mapping[str, Any], names: tuple[str, ...], where: str) -> None:
    unknown = [name for name in data if name not in names]
    if unknown:
        raise SweepError(f"{where}: unknown keys {', '.join(unknown)}; known are {', '.join(names)}")


def _relative(model: Any, folder: Path) -> Any:
    path, _, name = model.rpartition(":") if isinstance(model, str) else ("", "", "")
    return f"{folder / path}:{name}" if path.endswith(".py") else model


def _bytes(limit: int | str) -> int:
    try:
        size = round(quantity(limit, "bytes"))
    except ClusterError as error:
        raise SweepError(f"grid.memory_limit: {error}") from None
    if size <= 0:
        raise SweepError(f"grid.memory_limit: expected more than 0 bytes, got {limit!r}")
    return size
