"""Clusters: nodes of devices, joined by a fast link inside a node and network interfaces between.

Device ids count through the nodes in order, as ranks do.  ``Cluster.parse`` accepts

    "h100:8x8"                        8 nodes of 8 devices
    "h100:8"                          one node of 8 devices
    "a100-80gb:2x8+v100-32gb:1x16"    nodes of several kinds
    "my-cluster.toml", ".json"        a file with the content of the next form
    {"nodes": [{"device": "a100-80gb", "devices": 8, "count": 2,
                "figures": {"nic.count": 4, "nic.bandwidth": "100 Gb/s"}}]}
"""

from __future__ import annotations

import json
import re
import tomllib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from costmodel.device import Backend, DeviceSpec, customised, describe, preset, preset_names, recognised
from costmodel.units import Bytes
from searchspace.errors import ClusterError
from searchspace.mesh import Device

_SPEC = re.compile(r"^\s*([^:\s]+)\s*:\s*(\d+)\s*(?:[xX]\s*(\d+))?\s*$")
_CPU_HINT = 'for processes on CPUs write "cpu:1x4" (one node of 4 processes)'


@dataclass(frozen=True)
class Node:
    """``count`` equal devices in one machine."""

    device: DeviceSpec
    count: int

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ClusterError(f"0 devices in a node of {self.device.name}; {_CPU_HINT}")


@dataclass(frozen=True)
class Cluster:
    """Nodes in order; devices are numbered through them."""

    name: str
    nodes: tuple[Node, ...]

    def __post_init__(self) -> None:
        if not self.nodes:
            raise ClusterError(f"0 devices in cluster spec {self.name!r}; {_CPU_HINT}")

    @classmethod
    def parse(cls, spec: Cluster | str | PathLike[str] | Mapping[str, Any]) -> Cluster:
        """A cluster from any of the forms above; ClusterError says what is wrong and what is known."""
        if isinstance(spec, Cluster):
            return spec
        if isinstance(spec, Mapping):
            return _from_mapping(spec, "cluster")
        text = fspath(spec)
        if not isinstance(text, str):
            raise ClusterError(f"expected a cluster spec, a path or a mapping, got {spec!r}")
        if Path(text).suffix in (".toml", ".json"):
            return _from_file(Path(text))
        return _from_text(text)

    @classmethod
    def of(cls, device: str, nodes: int, devices_per_node: int) -> Cluster:
        """``nodes`` equal nodes."""
        return cls.parse(f"{device}:{nodes}x{devices_per_node}")

    @property
    def size(self) -> int:
        """Number of devices."""
        return len(self._node_of)

    @property
    def homogeneous(self) -> bool:
        """Whether all nodes are equal."""
        return all(node == self.nodes[0] for node in self.nodes)

    @cached_property
    def _node_of(self) -> tuple[int, ...]:
        return tuple(index for index, node in enumerate(self.nodes) for _ in range(node.count))

    @cached_property
    def _domains(self) -> tuple[int, ...]:
        """The fast-link domain of each node; domains hold whole nodes of one kind."""
        found: list[int] = []
        domain, left = -1, 0
        for index, node in enumerate(self.nodes):
            same = index > 0 and self.nodes[index - 1].device == node.device
            if not same or left < node.count:
                domain, left = domain + 1, max(node.device.link_domain, node.count)
            left -= node.count
            found.append(domain)
        return tuple(found)

    def node_of(self, device: Device) -> int:
        """The index of the node that holds ``device``."""
        if not 0 <= device < len(self._node_of):
            raise ClusterError(f"cluster {self.name!r} has devices 0 to {self.size - 1}, not {device}")
        return self._node_of[device]

    def domain_of(self, device: Device) -> int:
        """The index of the fast-link domain that holds ``device`` (its node, unless a rack is one domain)."""
        return self._domains[self.node_of(device)]

    def domain_of_node(self, node: int) -> int:
        """The index of the fast-link domain that holds node ``node``."""
        return self._domains[node]

    def device(self, device: Device) -> DeviceSpec:
        """The kind of ``device``."""
        return self.nodes[self.node_of(device)].device

    @property
    def devices(self) -> range:
        return range(self.size)

    def describe(self) -> str:
        """One line per run of equal nodes."""
        lines = [f"{self.name}: {self.size} devices"]
        runs: list[tuple[Node, int]] = []
        for node in self.nodes:
            if runs and runs[-1][0] == node:
                runs[-1] = (node, runs[-1][1] + 1)
            else:
                runs.append((node, 1))
        for node, count in runs:
            d = node.device
            lines.append(f"  {count} x {node.count} {describe(d)}")
            lines.append(
                f"    link {d.link.bandwidth / 1e9:g} GB/s, {d.nics} x {d.nic.bandwidth * 8 / 1e9:g} Gb/s between nodes"
            )
        return "\n".join(lines)


def detect(device_name: str, count: int, memory_bytes: Bytes, *, backend: Backend = "cuda", nodes: int = 1) -> Cluster:
    """The cluster of ``nodes`` machines like this one, as the caller's driver reports it.

    ``device_name``, ``count`` and ``memory_bytes`` are name, number and memory of one node's devices.
    A CUDA device that no preset describes is taken for the one with the nearest memory, with a warning.
    """
    if count < 1 or nodes < 1:
        raise ClusterError(f"0 devices in cluster spec 'detected' ({nodes} nodes of {count}); {_CPU_HINT}")
    spec, known = recognised(device_name, memory_bytes, backend)
    if not known:
        warnings.warn(
            f"no preset describes {device_name!r}; costs are those of {spec.name} with its memory. "
            "Pass cluster=... with your own figures for better plans.",
            stacklevel=2,
        )
    return Cluster(f"{spec.name}:{nodes}x{count}", (Node(spec, count),) * nodes)


def _from_text(text: str) -> Cluster:
    nodes: list[Node] = []
    for part in text.split("+"):
        match = _SPEC.match(part)
        if match is None:
            raise ClusterError(
                f"expected a cluster spec like 'h100:8x8' (nodes x devices per node), a .toml or .json file, "
                f"or a mapping, got {text!r}; known devices are {', '.join(preset_names())}"
            )
        name, first, second = match.groups()
        count, per_node = (int(first), int(second)) if second else (1, int(first))
        device = preset(name)
        if count * per_node == 0:
            raise ClusterError(f"0 devices in cluster spec {text!r}; {_CPU_HINT}")
        nodes += [Node(device, per_node)] * count
    return Cluster(text.replace(" ", ""), tuple(nodes))


def _from_file(path: Path) -> Cluster:
    try:
        text = path.read_text(encoding="utf-8")
        data = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ClusterError(f"{path}: cannot read the cluster: {error}") from None
    except (tomllib.TOMLDecodeError, json.JSONDecodeError) as error:
        raise ClusterError(f"{path}: not {path.suffix[1:].upper()}: {error}") from None
    if not isinstance(data, dict):
        raise ClusterError(f"{path}: expected a mapping with 'nodes', got {type(data).__name__}")
    return _from_mapping(data, path.stem, str(path))


def _from_mapping(data: Mapping[str, Any], name: str, where: str = "cluster") -> Cluster:
    unknown = sorted(set(data) - {"name", "nodes"})
    if unknown or not isinstance(data.get("nodes", []), list):
        raise ClusterError(f"{where}: expected 'nodes' (a list) and optionally 'name', got {sorted(data)}")
    name = str(data.get("name", name))
    nodes: list[Node] = []
    for index, entry in enumerate(data.get("nodes", [])):
        place = f"{where}: /nodes/{index}"
        if not isinstance(entry, Mapping) or "device" not in entry:
            raise ClusterError(f"{place}: expected a mapping with 'device', got {entry!r}")
        unknown = sorted(set(entry) - {"device", "devices", "count", "figures"})
        if unknown:
            raise ClusterError(f"{place}: unknown keys {unknown}; known are device, devices, count, figures")
        try:
            device = preset(str(entry["device"]))
            if entry.get("figures"):
                device = customised(device, dict(entry["figures"]))
        except ClusterError as error:
            raise ClusterError(f"{place}: {error}") from None
        devices, count = entry.get("devices", device.devices_per_node), entry.get("count", 1)
        if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in (devices, count)):
            raise ClusterError(f"{place}: expected whole numbers of devices and nodes, got {devices!r} and {count!r}")
        if devices * count == 0:
            raise ClusterError(f"{place}: 0 devices in cluster spec {name!r}; {_CPU_HINT}")
        nodes += [Node(device, devices)] * count
    return Cluster(name, tuple(nodes))
