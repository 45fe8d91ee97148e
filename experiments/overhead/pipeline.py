"""A two-stage pipeline against ``torch.distributed.pipelining``, both 1F1B with the same cut and micro-batches.

    python -m experiments.overhead.pipeline [rounds]

Embeddings are not tied: ``torch.distributed.pipelining`` leaves a parameter of two stages to its user.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from autoplan import zoo
from autoplan.api import parallelize
from autoplan.capture import capture
from autoplan.runtime.launch import WorkerPool
from autoplan.search.uniform import named_plan
from autoplan.zoo.layers import token_loss
from experiments.overhead.comparison import OURS, Contender, report, take_turns
from searchspace.plan import ClusterInfo, Recipe

RANKS = 2
MODEL = "gpt-small"


def autoplan_contender(batch: int, micro_batches: int) -> Contender:
    model, args, kwargs = zoo.build(MODEL, batch=batch, device="cpu", tied=False)
    captured = capture(model, args, kwargs)
    cluster = ClusterInfo(name=f"cpu:1x{RANKS}", devices=RANKS)
    plan = named_plan(captured.graph, cluster, Recipe(), pp=RANKS, micro_batches=micro_batches)
    parallel = parallelize(captured, plan=plan)

    def step() -> float:
        parallel.zero_grad()
        return parallel.train_step(*args, **kwargs).item()

    return Contender(step, list(parallel.parameters()))


class FirstStage(nn.Module):
    """Embeddings and the first half of the layers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.token, self.position = model.token, model.position
        self.layers = model.layers[: len(model.layers) // 2]

    def forward(self, tokens: Tensor) -> Tensor:
        x_BSD = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x_BSD = layer(x_BSD)
        return x_BSD


class LastStage(nn.Module):
    """The second half of the layers and the output projection."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.layers = model.layers[len(model.layers) // 2 :]
        self.norm, self.head = model.norm, model.head

    def forward(self, x_BSD: Tensor) -> Tensor:
        for layer in self.layers:
            x_BSD = layer(x_BSD)
        return self.head(self.norm(x_BSD))


def pipelining_contender(batch: int, micro_batches: int) -> Contender:
    model, _, inputs = zoo.build(MODEL, batch=batch, device="cpu", tied=False)
    rank = dist.get_rank()
    module = FirstStage(model) if rank == 0 else LastStage(model)
    stage = PipelineStage(module, rank, RANKS, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=micro_batches, loss_fn=token_loss)

    def step() -> float:
        module.zero_grad()
        if rank == 0:
            schedule.step(inputs["tokens"])
            return float("nan")
        losses: list[Tensor] = []
        schedule.step(target=inputs["labels"], losses=losses)
        return torch.stack(losses).mean().item()

    return Contender(step, list(module.parameters()))


def run(batch: int, micro_batches: int, rounds: int) -> dict[str, list[float]]:
    """One rank's part."""
    contenders = {
        OURS: autoplan_contender(batch, micro_batches),
        "torch.distributed.pipelining": pipelining_contender(batch, micro_batches),
    }
    return take_turns(contenders, rounds)


if __name__ == "__main__":
    repetitions = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    with WorkerPool(RANKS, timeout_seconds=600.0, threads=1) as pool:
        for size, parts in ((8, 4), (16, 16)):
            report(
                "pipeline",
                f"{MODEL}, batch {size}, {parts} micro-batches",
                pool.run(run, size, parts, repetitions)[0],
            )
