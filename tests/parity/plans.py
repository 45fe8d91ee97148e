"""The plans of the parity grid, by name and number of ranks."""

from __future__ import annotations

from typing import Any

from autoplan.search.folding import fold
from autoplan.search.uniform import named_plan
from searchspace.graph import Graph
from searchspace.plan import ClusterInfo, Plan, Recipe

NAMED: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "dp": {"dp": 2},
        "tp": {"tp": 2},
        "tp sequence": {"tp": 2, "sequence": True},
        "pp 1f1b": {"pp": 2, "micro_batches": 4},
        "pp gpipe": {"pp": 2, "micro_batches": 2, "schedule": "gpipe"},
        "zero 1": {"dp": 2, "zero": 1},
        "zero 3": {"dp": 2, "zero": 3, "micro_batches": 2},
        "recompute": {"dp": 2, "recompute": True},
        "uneven stages": {"pp": 2, "stage_sizes": (2, -2), "micro_batches": 2},
    },
    4: {
        "dp": {"dp": 4},
        "tp": {"tp": 4},
        "tp sequence": {"tp": 4, "sequence": True},
        "pp 1f1b": {"pp": 4, "micro_batches": 4},
        "pp gpipe": {"pp": 4, "micro_batches": 2, "schedule": "gpipe"},
        "dp x tp": {"dp": 2, "tp": 2},
        "dp x pp": {"dp": 2, "pp": 2, "micro_batches": 2},
        "tp x pp": {"tp": 2, "pp": 2, "micro_batches": 2},
        "zero 1": {"dp": 4, "zero": 1},
        "zero 3": {"dp": 4, "zero": 3},
        "recompute": {"dp": 2, "tp": 2, "recompute": True},
        "everything": {"dp": 2, "tp": 2, "sequence": True, "zero": 3, "recompute": True, "micro_batches": 2},
        "uneven stages": {"dp": 2, "pp": 2, "stage_sizes": (2, -2), "micro_batches": 2},
    },
}


def forced(graph: Graph, ranks: int, name: str, recipe: Recipe | None = None) -> Plan:
    """The uniform plan called ``name`` for ``ranks`` devices of this kind of machine."""
    cluster = ClusterInfo(name=f"cpu:1x{ranks}", devices=ranks)
    settings = dict(NAMED[ranks][name])
    if "stage_sizes" in settings:
        # two blocks in the first stage, all others in the second
        settings["stage_sizes"] = (2, len(fold(graph).blocks) - 2)
    if recipe is not None and recipe.mode == "inference":
        settings.pop("zero", None)
    return named_plan(graph, cluster, recipe or Recipe(), **settings)
