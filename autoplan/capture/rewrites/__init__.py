"""Rewrites: an operator that cannot be split as it is becomes several that can, with the same result.

See :mod:`autoplan.capture.call` for what a rewrite is given and returns.
"""

from autoplan.capture.call import Rewrite
from autoplan.capture.rewrites import attention, drawing, losses, shapes, statistics

REWRITES: dict[str, Rewrite] = {
    **losses.REWRITES,
    **statistics.REWRITES,
    **drawing.REWRITES,
    **shapes.REWRITES,
    **attention.REWRITES,
}
"""By the target that is rewritten."""
