"""Well-known uniform plans, for comparison: what a person would try first."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from autoplan.search.candidates import Candidate
from autoplan.search.context import Context


@dataclass(frozen=True)
class Known:
    """A name and the keyword arguments of ``named_plan``."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def micro_batches(self) -> int:
        return int(self.settings.get("micro_batches", 1))


def known_plans(context: Context, best: Candidate | None) -> list[Known]:
    """Data parallelism, FSDP, Megatron's layouts, and the uniform plan with the degrees of ``best``."""
    size, batch = context.cluster.size, context.graph.batch or 1
    per_node = min(node.count for node in context.cluster.nodes)
    if size == 1:
        return []
    found = [Known("DP", {"dp": size})]
    if context.training:
        found.append(Known("FSDP", {"dp": size, "zero": 3, "recompute": context.options.recompute}))
    if size <= per_node:
        found.append(Known(f"Megatron TP{size}", {"tp": size}))
    else:
        stages = size // per_node
        settings = {"tp": per_node, "pp": stages, "micro_batches": batch, "sequence": True}
        found.append(Known(f"Megatron TP{per_node}xPP{stages}", settings))
    if best is not None:
        degrees = {"dp": best.outer, "tp": best.inner, "pp": best.stages}
        name = "x".join(f"{k.upper()}{v}" for k, v in degrees.items() if v > 1)
        zero = int(context.training and best.outer > 1)
        more = {"micro_batches": best.micro_batches, "sequence": best.inner > 1, "zero": zero}
        found.append(Known(f"uniform {name}", {**degrees, **more}))
    return found
