"""Two-rank tensor parallelism against ``torch.distributed.tensor.parallel.parallelize_module``.

    python -m experiments.overhead.tensor_parallel [rounds]

Both split the same way (Megatron-LM, arXiv 1909.08053): attention by heads, feed-forward by hidden features,
token embedding, output projection and loss by vocabulary.  ``sequence`` also splits what lies between
along the sequence (arXiv 2205.05198).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

from autoplan import zoo
from autoplan.api import parallelize
from autoplan.capture import capture
from autoplan.runtime.launch import WorkerPool
from autoplan.search.uniform import named_plan
from experiments.overhead.comparison import OURS, Contender, report, take_turns
from searchspace.graph import Graph
from searchspace.plan import ClusterInfo, Plan, Recipe

RANKS = 2
MODEL = "gpt-small"


def megatron_plan(graph: Graph) -> Plan:
    """The tensor-parallel plan with token embedding, head and loss split by vocabulary, as the baseline is."""
    plan = named_plan(graph, ClusterInfo(name=f"cpu:1x{RANKS}", devices=RANKS), Recipe(), tp=RANKS)
    operators = dict(plan.transformation.operators)
    for op in graph.operators:
        if op.name == "token/embedding":
            operators[op.name] = {"tp": "v"}
        elif op.name == "head/linear":
            operators[op.name] = {"tp": "n"}
        elif op.name.startswith("position/") or op.name == "add":
            operators[op.name] = {}
    return plan.replace(transformation=plan.transformation.model_copy(update={"operators": operators}))


def autoplan_contender(batch: int) -> Contender:
    model, args, kwargs = zoo.build(MODEL, batch=batch, device="cpu")
    captured = capture(model, args, kwargs)
    parallel = parallelize(captured, plan=megatron_plan(captured.graph))

    def step() -> float:
        parallel.zero_grad()
        return parallel.train_step(*args, **kwargs).item()

    return Contender(step, list(parallel.parameters()))


def dtensor_contender(batch: int, vocabulary_parallel_loss: bool, one_input: bool) -> Contender:
    """The model as a user of ``parallelize_module`` writes it, following PyTorch's tensor-parallel tutorial.

    ``one_input``: an attention's input becomes a DTensor once and not once for each projection, so that
    its gradient is reduced once.
    """
    model, args, kwargs = zoo.build(MODEL, batch=batch, device="cpu")
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    plan: dict[str, Any] = {"token": RowwiseParallel(input_layouts=Replicate())}
    for i, layer in enumerate(model.layers):
        layer.attention.heads //= RANKS
        if one_input:
            plan[f"layers.{i}.attention"] = PrepareModuleInput(
                input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),)
            )
        plan[f"layers.{i}.attention.query"] = ColwiseParallel()
        plan[f"layers.{i}.attention.key"] = ColwiseParallel()
        plan[f"layers.{i}.attention.value"] = ColwiseParallel()
        plan[f"layers.{i}.attention.out"] = RowwiseParallel()
        plan[f"layers.{i}.feed_forward.up"] = ColwiseParallel()
        plan[f"layers.{i}.feed_forward.down"] = RowwiseParallel()
    plan["head"] = (
        ColwiseParallel(use_local_output=False)
        if vocabulary_parallel_loss
        else ColwiseParallel(output_layouts=Replicate())
    )
    parallelize_module(model, mesh, plan)
    model.head.weight = model.token.weight  # parallelize_module made two parameters of the tied one
    context: Callable[[], Any] = loss_parallel if vocabulary_parallel_loss else contextlib.nullcontext

    def step() -> float:
        model.zero_grad()
        with context():
            loss = model(*args, **kwargs)
            loss.backward()
        return (loss.full_tensor() if isinstance(loss, DTensor) else loss).item()

    return Contender(step, list(model.parameters()))


def run(batch: int, rounds: int) -> dict[str, list[float]]:
    """One rank's part."""
    contenders = {
        OURS: autoplan_contender(batch),
        "parallelize_module": dtensor_contender(batch, False, False),
        "parallelize_module, loss_parallel": dtensor_contender(batch, True, False),
        "parallelize_module, loss_parallel, one input": dtensor_contender(batch, True, True),
    }
    return take_turns(contenders, rounds)


if __name__ == "__main__":
    repetitions = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    with WorkerPool(RANKS, timeout_seconds=600.0, threads=1) as pool:
        for size in (8, 1):
            report("tensor_parallel", f"{MODEL}, batch {size}", pool.run(run, size, repetitions)[0])
