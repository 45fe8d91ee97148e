"""Names of dtypes as graphs and programs write them."""

from __future__ import annotations

import torch

from searchspace.errors import ExecutionError


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype called ``name``; ExecutionError for an unknown name."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ExecutionError(f"torch has no dtype {name!r}")
    return found
