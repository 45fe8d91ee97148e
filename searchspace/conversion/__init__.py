"""Conversions: from a tensor on one mesh in one layout to the same tensor elsewhere.

``cheapest_path`` finds the moves, ``lower`` turns a move into what each rank executes,
``check_coverage`` proves that this delivers every element once.  The backward half of an adapter
is a conversion as well, between the layouts of the gradients.
"""

from searchspace.conversion.coverage import check_coverage
from searchspace.conversion.lowering import lower
from searchspace.conversion.moves import Move, Path, Placed
from searchspace.conversion.paths import cheapest_path
from searchspace.conversion.prices import Bytes, Copy, ElementCount, Prices, Seconds

__all__ = [
    "Bytes",
    "Copy",
    "ElementCount",
    "Move",
    "Path",
    "Placed",
    "Prices",
    "Seconds",
    "check_coverage",
    "cheapest_path",
    "lower",
]
