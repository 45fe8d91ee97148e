"""Quantities as text for messages and tables."""

from __future__ import annotations


def bytes_text(count: float) -> str:
    """``"79.2 GiB"``, with the largest binary prefix that leaves at least one."""
    for prefix, factor in (("Ti", 2**40), ("Gi", 2**30), ("Mi", 2**20), ("Ki", 2**10)):
        if abs(count) >= factor:
            return f"{count / factor:.1f} {prefix}B"
    return f"{count:.0f} B"


def seconds_text(seconds: float) -> str:
    """``"1.32 s"``, ``"4.10 ms"``, ``"7.2 us"``."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.2f} ms"
    return f"{seconds * 1e6:.1f} us"
