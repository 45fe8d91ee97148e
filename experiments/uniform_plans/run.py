"""The searched plan against every uniform plan that a Megatron user could write down, under one cost model.

    python -m experiments.uniform_plans.run gpt3-175b
    python -m experiments.uniform_plans.run llama3-70b

All data x tensor (with and without sequence) x pipeline x ZeRO 0, 1, 3 x recompute x micro-batch size plans
whose degrees multiply to the cluster are built, resolved and priced by ``costmodel.evaluate``, the same
referee that prices the searched plan.  Writes ``results/<workload>.json``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from autoplan import Captured, Cluster, api, zoo
from autoplan.capture import capture
from autoplan.report.progress import Progress
from autoplan.search.folding import Folding, fold
from autoplan.search.uniform import named_plan
from costmodel.evaluate import evaluate
from costmodel.model import CostModel
from searchspace.errors import IllegalPlanError
from searchspace.graph import Graph
from searchspace.microbatch import time_axis
from searchspace.plan import ClusterInfo, Recipe, write_atomically
from searchspace.rebatch import rebatch
from searchspace.resolve import resolve

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Workload:
    """A model of the zoo, its sequence length, a cluster and a global batch."""

    model: str
    sequence: int
    cluster: str
    global_batch: int


WORKLOADS = {
    "gpt3-175b": Workload("gpt3-175b", 2048, "a100-80gb:16x8", 1536),
    "llama3-70b": Workload("llama3-70b", 8192, "h100:8x8", 512),
}


def degrees(total: int) -> Iterator[tuple[int, int, int]]:
    """All (dp, tp, pp) with product ``total``."""
    divisors = [d for d in range(1, total + 1) if total % d == 0]
    for tp, pp in itertools.product(divisors, divisors):
        if total % (tp * pp) == 0:
            yield total // (tp * pp), tp, pp


def settings(workload: Workload) -> list[dict[str, Any]]:
    """Every uniform plan: degrees (tensor parallelism within a node), micro-batch size, and switches."""
    cluster = Cluster.parse(workload.cluster)
    per_node = min(node.count for node in cluster.nodes)
    found = []
    for (dp, tp, pp), size, sequence, zero, recompute in itertools.product(
        degrees(cluster.size), (1, 2, 4, 8, 16), (False, True), (0, 1, 3), (False, True)
    ):
        samples = dp * size
        if tp > per_node or workload.global_batch % samples or (sequence and tp == 1) or (zero and dp == 1):
            continue
        micro_batches = workload.global_batch // samples
        if pp > 1 and micro_batches < pp:
            continue
        found.append(
            {
                "dp": dp, "tp": tp, "pp": pp, "micro_batches": micro_batches,
                "sequence": sequence, "zero": zero, "recompute": recompute,
            }
        )  # fmt: skip
    return found


@cache
def captured(name: str) -> Captured:
    """The model of a workload on ``meta``."""
    workload = WORKLOADS[name]
    return capture(*zoo.build(workload.model, batch=2, sequence=workload.sequence), precision="bf16")


@cache
def prepared(name: str) -> tuple[Graph, Folding, Cluster, Recipe]:
    workload = WORKLOADS[name]
    graph = rebatch(captured(name).graph, workload.global_batch)
    recipe = Recipe(precision="bf16", optimizer="adamw", global_batch=workload.global_batch)
    return graph, fold(graph), Cluster.parse(workload.cluster), recipe


@cache
def cost_model(name: str, micro_batches: int) -> CostModel:
    graph, _, cluster, recipe = prepared(name)
    return CostModel(graph, cluster, recipe, time_axis(graph, micro_batches))


def price(task: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    """One uniform plan: its predicted seconds and peak bytes, or why it does not exist."""
    name, chosen = task
    graph, folding, cluster, recipe = prepared(name)
    least = least_bytes(graph, chosen)
    if least > max(cluster.device(d).usable_memory for d in cluster.devices):
        return {**chosen, "states_alone_bytes": least}
    info = ClusterInfo(name=WORKLOADS[name].cluster, devices=cluster.size)
    try:
        plan = named_plan(graph, info, recipe, folding=folding, **chosen)
        found = evaluate(resolve(graph, plan), cluster, recipe, model=cost_model(name, chosen["micro_batches"]))
    except IllegalPlanError as error:
        return {**chosen, "refused": str(error)}
    return {**chosen, "seconds": found.seconds, "peak_bytes": max(found.peak_bytes), "fits": found.fits}


def least_bytes(graph: Graph, chosen: dict[str, Any]) -> float:
    """A lower bound of the bytes per device: bf16 weight, float32 gradient, master and Adam's two, split perfectly."""
    elements = sum(t.elements for t in graph.parameters)
    model, data, zero = chosen["tp"] * chosen["pp"], chosen["dp"], chosen["zero"]
    held = (2 if zero < 3 else 2 / data) + (4 if zero < 2 else 4 / data) + (12 if zero < 1 else 12 / data)
    return held * elements / model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only-search", action="store_true", help="search again, keep the uniform plans' results")
    arguments = parser.parse_args()
    name, workload = arguments.workload, WORKLOADS[arguments.workload]

    start = time.perf_counter()
    graph = captured(name)
    capture_seconds = time.perf_counter() - start
    plan = api.search(graph, cluster=workload.cluster, global_batch=workload.global_batch)
    total_seconds = time.perf_counter() - start
    peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    assert plan.prediction is not None and plan.search is not None

    searched = {
        "seconds": plan.prediction.seconds,
        "peak_bytes": max(plan.prediction.peak_bytes),
        "bound_seconds": plan.search.bound_seconds,
        "capture_wall_seconds": round(capture_seconds, 1),
        "total_wall_seconds": round(total_seconds, 1),
        "peak_memory_gib": round(peak_gib, 2),
    }
    path = RESULTS / f"{name}.json"
    uniform = json.loads(path.read_text())["uniform"] if arguments.only_search else price_all(name, arguments.processes)
    result = {"workload": vars(workload), "searched": searched, "uniform": uniform}
    write_atomically(path, json.dumps(result, indent=2) + "\n")
    best = uniform["best"][0]["seconds"] if uniform["best"] else float("inf")
    print(f"searched {searched['seconds']:.2f} s, best of {uniform['fit']} uniform plans that fit {best:.2f} s")


def price_all(name: str, processes: int) -> dict[str, Any]:
    """All uniform plans of a workload: how many there are, fit or are refused, and the ten best."""
    tasks = [(name, chosen) for chosen in settings(WORKLOADS[name])]
    rows = []
    with Progress(f"{len(tasks)} uniform plans") as progress, multiprocessing.Pool(processes) as pool:
        for row in pool.imap_unordered(price, tasks, chunksize=8):
            rows.append(row)
            progress(f"{len(rows)} of {len(tasks)}", len(rows) / len(tasks))
    fitting = sorted((r for r in rows if r.get("fits")), key=lambda r: r["seconds"])
    return {
        "plans": len(rows),
        "refused": sum("refused" in r for r in rows),
        "states_alone_do_not_fit": sum("states_alone_bytes" in r for r in rows),
        "fit": len(fitting),
        "best": fitting[:10],
    }


if __name__ == "__main__":
    main()
