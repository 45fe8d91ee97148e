"""Capture: a PyTorch module becomes a :class:`searchspace.graph.Graph`."""
