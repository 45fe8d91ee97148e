"""Capture: a PyTorch module becomes a :class:`searchspace.graph.Graph`."""

from autoplan.capture.captured import Captured
from autoplan.capture.front import capture

__all__ = ["Captured", "capture"]
