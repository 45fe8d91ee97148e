"""Devices and links: what one kind of accelerator and its connections can do, and who says so.

A preset is a TOML file in ``costmodel/presets``; each of its figures is a pair of a quantity with
its unit and a key of ``presets/sources.toml``, which names the source and its date.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from costmodel.units import Bytes, BytesPerSecond, Dimension, FlopsPerSecond, Seconds, quantity
from searchspace.errors import ClusterError
from searchspace.quantity_text import bytes_text

Backend = Literal["cuda", "cpu"]


@dataclass(frozen=True)
class Source:
    """Where a figure comes from: what it is, and when it was published, read or measured."""

    key: str
    what: str
    date: str


@dataclass(frozen=True)
class Link:
    """A connection, in one direction.

    Fields
        bandwidth: wire rate.
        efficiency: share of the wire rate that large messages reach.
        latency: time of one hop.
    """

    bandwidth: BytesPerSecond
    efficiency: float
    latency: Seconds

    def __post_init__(self) -> None:
        _positive("link bandwidth", self.bandwidth)
        _share("link efficiency", self.efficiency)
        _positive("link latency", self.latency)

    @property
    def rate(self) -> BytesPerSecond:
        """What a large message reaches."""
        return self.bandwidth * self.efficiency


@dataclass(frozen=True)
class DeviceSpec:
    """One kind of device and the node that usually holds it.

    Fields
        peak: operations per second by data type, dense, as ``(("bfloat16", 312e12), ...)``.
        memory: bytes of device memory; ``reserved`` of them never reach the allocator, and
            ``communication`` are staging buffers where there are several devices.
        memory_bandwidth, memory_efficiency: peak rate, and the share that a large copy reaches.
        processors: multiprocessors (compute units, cores) that share a matrix product.
        matmul_efficiency: share of the peak that the best matrix product reaches.
        launch: host time of one operator, which its device time cannot undercut.
        link: between devices of one node; ``link_domain`` devices are joined by it.
        nics, nic: network interfaces per node, and each one's rate.
        sources: the source of every figure, by name (``"peak.bfloat16"``).
    """

    name: str
    title: str
    backend: Backend
    matches: tuple[str, ...]
    peak: tuple[tuple[str, FlopsPerSecond], ...]
    memory: Bytes
    reserved: Bytes
    communication: Bytes
    memory_bandwidth: BytesPerSecond
    memory_efficiency: float
    processors: int
    matmul_efficiency: float
    launch: Seconds
    link: Link
    nics: int
    nic: Link
    devices_per_node: int
    link_domain: int
    sources: tuple[tuple[str, Source], ...] = ()

    def __post_init__(self) -> None:
        for dtype, rate in self.peak:
            _positive(f"peak of {dtype}", rate)
        if "float32" not in dict(self.peak):
            raise ClusterError(f"device {self.name!r} has no peak for float32")
        _positive("memory", self.memory)
        if not 0 <= self.reserved < self.memory:
            raise ClusterError(f"expected 0 <= reserved < memory, got {self.reserved} of {self.memory} bytes")
        _positive("memory bandwidth", self.memory_bandwidth)
        _positive("processors", self.processors)
        _positive("network interfaces", self.nics)
        _positive("launch", self.launch)
        _share("memory efficiency", self.memory_efficiency)
        _share("matmul efficiency", self.matmul_efficiency)

    def __hash__(self) -> int:
        return hash((self.name, self.memory))  # prices are looked up by device very often

    @property
    def usable_memory(self) -> Bytes:
        """Bytes that a process can allocate."""
        return self.memory - self.reserved

    @property
    def memory_rate(self) -> BytesPerSecond:
        """Bytes per second that a large copy moves (reads plus writes)."""
        return self.memory_bandwidth * self.memory_efficiency

    def peak_of(self, dtype: str) -> FlopsPerSecond:
        """Peak rate of ``dtype``; float64 without a figure is half of float32, others are float32."""
        rates = dict(self.peak)
        if dtype in rates:
            return rates[dtype]
        if dtype.startswith("float8") and "float8" in rates:
            return rates["float8"]
        return rates["float32"] / (2 if dtype == "float64" else 1)


def _positive(what: str, value: float) -> None:
    if not value > 0:
        raise ClusterError(f"expected {what} > 0, got {value}")


def _share(what: str, value: float) -> None:
    if not 0 < value <= 1:
        raise ClusterError(f"expected 0 < {what} <= 1, got {value}")


_FIGURES: tuple[tuple[str, Dimension], ...] = (
    ("memory.capacity", "bytes"),
    ("memory.reserved", "bytes"),
    ("memory.communication", "bytes"),
    ("memory.bandwidth", "bytes/s"),
    ("memory.efficiency", "ratio"),
    ("compute.processors", "ratio"),
    ("compute.matmul_efficiency", "ratio"),
    ("compute.launch", "seconds"),
    ("link.bandwidth", "bytes/s"),
    ("link.efficiency", "ratio"),
    ("link.latency", "seconds"),
    ("nic.count", "ratio"),
    ("nic.bandwidth", "bytes/s"),
    ("nic.efficiency", "ratio"),
    ("nic.latency", "seconds"),
)
_OVERRIDES: Mapping[str, Dimension] = dict(_FIGURES)
"""What a cluster file may set for a device, by the figure's name; ``peak.<dtype>`` besides."""


@cache
def sources() -> Mapping[str, Source]:
    """All sources that presets refer to."""
    text = (files("costmodel") / "presets" / "sources.toml").read_text(encoding="utf-8")
    return {key: Source(key, entry["what"], entry["date"]) for key, entry in tomllib.loads(text).items()}


@cache
def preset_names() -> tuple[str, ...]:
    """Names of the device presets, ascending."""
    found = (entry.name for entry in (files("costmodel") / "presets").iterdir() if entry.name.endswith(".toml"))
    return tuple(sorted(name.removesuffix(".toml") for name in found if name != "sources.toml"))


_SYNONYMS = {
    "h100-sxm": "h100", "h100-80gb": "h100", "h100-sxm-80gb": "h100", "v100": "v100-32gb", "a100": "a100-80gb",
    "h200-sxm": "h200", "mi250": "mi250x", "4090": "rtx4090", "rtx-4090": "rtx4090",
}  # fmt: skip


@cache
def preset(name: str) -> DeviceSpec:
    """The device preset ``name``; ClusterError with the known names, the nearest one first."""
    name = name.strip().lower()
    name = _SYNONYMS.get(name, name)
    if name not in preset_names():
        near = get_close_matches(name, preset_names(), n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ClusterError(f"unknown device {name!r}: {hint}known devices are {', '.join(preset_names())}")
    text = (files("costmodel") / "presets" / f"{name}.toml").read_text(encoding="utf-8")
    return _device(name, tomllib.loads(text))


def _device(name: str, data: Mapping[str, Any]) -> DeviceSpec:
    """A device from a preset file's content."""
    values: dict[str, float] = {}
    origins: dict[str, Source] = {}
    rate: Dimension = "flop/s"
    named = [*_FIGURES, *((f"peak.{dtype}", rate) for dtype in data["peak"])]
    for figure, dimension in named:
        section, key = figure.split(".")
        text, source = data[section][key]
        values[figure] = quantity(text, dimension)
        origins[figure] = sources()[source]
    return DeviceSpec(
        name=name,
        title=data["title"],
        backend=data["backend"],
        matches=tuple(data["matches"]),
        peak=tuple((dtype, values[f"peak.{dtype}"]) for dtype in data["peak"]),
        memory=round(values["memory.capacity"]),
        reserved=round(values["memory.reserved"]),
        communication=round(values["memory.communication"]),
        memory_bandwidth=values["memory.bandwidth"],
        memory_efficiency=values["memory.efficiency"],
        processors=round(values["compute.processors"]),
        matmul_efficiency=values["compute.matmul_efficiency"],
        launch=values["compute.launch"],
        link=Link(values["link.bandwidth"], values["link.efficiency"], values["link.latency"]),
        nics=round(values["nic.count"]),
        nic=Link(values["nic.bandwidth"], values["nic.efficiency"], values["nic.latency"]),
        devices_per_node=data["devices_per_node"],
        link_domain=data.get("link_domain", 0),
        sources=tuple(origins.items()),
    )


def customised(base: DeviceSpec, figures: Mapping[str, str | int | float]) -> DeviceSpec:
    """``base`` with some figures replaced, by the names of preset files: ``{"memory.capacity": "40 GiB"}``.

    Raises ClusterError for a figure that no device has, or a quantity in a wrong unit.
    """
    peak = dict(base.peak)
    changed: dict[str, float] = {}
    for name, text in figures.items():
        if name.startswith("peak."):
            peak[name.removeprefix("peak.")] = quantity(text, "flop/s")
        elif name in _OVERRIDES:
            changed[name] = quantity(text, _OVERRIDES[name])
        else:
            near = get_close_matches(name, _OVERRIDES, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            known = ", ".join((*_OVERRIDES, "peak.<dtype>"))
            raise ClusterError(f"a device has no figure {name!r}: {hint}figures are {known}")

    def link(section: str, old: Link) -> Link:
        parts = {key: changed[f"{section}.{key}"] for key in ("bandwidth", "efficiency", "latency")
                 if f"{section}.{key}" in changed}  # fmt: skip
        return replace(old, **parts)

    get = changed.get
    return replace(
        base,
        peak=tuple(peak.items()),
        memory=round(get("memory.capacity", base.memory)),
        reserved=round(get("memory.reserved", base.reserved)),
        communication=round(get("memory.communication", base.communication)),
        memory_bandwidth=get("memory.bandwidth", base.memory_bandwidth),
        memory_efficiency=get("memory.efficiency", base.memory_efficiency),
        processors=round(get("compute.processors", base.processors)),
        matmul_efficiency=get("compute.matmul_efficiency", base.matmul_efficiency),
        launch=get("compute.launch", base.launch),
        link=link("link", base.link),
        nics=round(get("nic.count", base.nics)),
        nic=link("nic", base.nic),
    )


def recognised(reported: str, memory: Bytes, backend: Backend = "cuda") -> tuple[DeviceSpec, bool]:
    """The preset of the device that a driver reports as ``reported`` with ``memory`` bytes.

    The second value is False when no preset carries that name, and the one with the nearest
    memory is taken instead.  The result has the reported memory in either case.
    """
    if backend == "cpu":
        base = preset("cpu")
        return replace(base, memory=memory, reserved=min(base.reserved, memory // 8)), True
    text = reported.lower().replace("-", " ")
    candidates = [preset(name) for name in preset_names() if preset(name).backend == backend]
    fitting = [
        (len(match), spec) for spec in candidates for match in spec.matches if match.lower().replace("-", " ") in text
    ]
    if fitting:
        longest = max(length for length, _ in fitting)
        candidates = [spec for length, spec in fitting if length == longest]
    nearest = min(candidates, key=lambda spec: abs(spec.memory - memory))
    return replace(nearest, memory=memory, reserved=min(nearest.reserved, memory // 8)), bool(fitting)


def describe(device: DeviceSpec) -> str:
    """One line: name, memory, peak and bandwidth."""
    rates = ", ".join(f"{dtype} {rate / 1e12:g} TFLOP/s" for dtype, rate in device.peak)
    return f"{device.title}: {bytes_text(device.memory)}, {device.memory_bandwidth / 1e9:g} GB/s, {rates}"
