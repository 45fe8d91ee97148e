"""Units: the one place where GB, GiB, Gb/s, TFLOP/s and microseconds become plain numbers.

Inside autoplan there are only seconds, bytes, bytes per second, floating point operations, and
operations per second.  Text with a unit ("80 GiB", "400 Gb/s", "3.35 TB/s") is converted once,
at the door, by :func:`quantity`; a unit that does not fit what is asked for is refused.

Prefixes are what they say: k, M, G, T are powers of 1000; Ki, Mi, Gi, Ti powers of 1024.  A "b" is
a bit, a "B" eight of them.
"""

from __future__ import annotations

import re
from typing import Literal

from searchspace.errors import ClusterError

Seconds = float
Bytes = int
Flops = float
BytesPerSecond = float
FlopsPerSecond = float

Dimension = Literal["seconds", "bytes", "bytes/s", "flop/s", "ratio"]

_PREFIX = {
    "": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15,
    "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40,
}  # fmt: skip
_DECIMAL = {name: factor for name, factor in _PREFIX.items() if not name.endswith("i")}
_PER_SECOND = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}

_UNITS: dict[Dimension, dict[str, float]] = {
    "seconds": dict(_PER_SECOND),
    "bytes": {f"{p}B": float(f) for p, f in _PREFIX.items()},
    "bytes/s": {f"{p}B/s": float(f) for p, f in _PREFIX.items()} | {f"{p}b/s": f / 8 for p, f in _DECIMAL.items()},
    "flop/s": {f"{p}FLOP/s": float(f) for p, f in _DECIMAL.items()},
    "ratio": {"": 1.0, "%": 0.01},
}
_TEXT = re.compile(r"^\s*([0-9.]+(?:[eE][+-]?\d+)?)\s*([A-Za-z%/]*)\s*$")

GiB = _PREFIX["Gi"]
"""Bytes in a gibibyte."""


def quantity(text: str | int | float, dimension: Dimension) -> float:
    """``"80 GiB"`` as bytes, ``"400 Gb/s"`` as bytes per second...; a bare number is in base units.

    Raises ClusterError for text that is no number with a unit of ``dimension``.
    """
    if isinstance(text, int | float) and not isinstance(text, bool):
        return float(text)
    match = _TEXT.match(str(text))
    units = _UNITS[dimension]
    try:
        number = float(match.group(1)) if match else None
    except ValueError:
        number = None
    if match is None or number is None or match.group(2) not in units:
        known = ", ".join(repr(unit) for unit in units if unit)
        raise ClusterError(f"expected a quantity in {dimension} with a unit of {known}, got {text!r}")
    return number * units[match.group(2)]


def gib(count: float) -> Bytes:
    """``count`` GiB in bytes."""
    return round(count * GiB)


def as_gib(count: float) -> float:
    """Bytes as GiB, for messages and tables."""
    return count / GiB
