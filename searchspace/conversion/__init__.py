"""Conversions: from a tensor on one mesh in one layout to the same tensor elsewhere."""

from searchspace.conversion.prices import Bytes, Copy, ElementCount, Prices, Seconds

__all__ = ["Bytes", "Copy", "ElementCount", "Prices", "Seconds"]
