"""Looking rows up in a table of which a rank holds a range of rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from autoplan.operators.registry import local_operator


@local_operator
def embedding(weight: Tensor, indices: Tensor, start: int, rows: int, padding_idx: int = -1) -> Tensor:
    """Rows ``indices`` of a table of ``rows`` rows, of which ``weight`` holds ``start`` and the following.

    ``weight`` [v, e], ``indices`` [...] global row numbers -> [..., e].  Rows that lie elsewhere give zeros:
    the results of all ranges sum to the whole table's.  The row ``padding_idx`` (global) gets no gradient.
    """
    if weight.shape[0] == rows:
        return F.embedding(indices, weight, padding_idx if padding_idx >= 0 else None)
    local = indices - start
    inside = (local >= 0) & (local < weight.shape[0])
    found = F.embedding(torch.where(inside, local, 0), weight)
    if padding_idx >= 0:
        found = torch.where((indices != padding_idx).unsqueeze(-1), found, found.detach())
    return found * inside.unsqueeze(-1).to(found.dtype)
