"""One rank against eager PyTorch: what it costs to run through instructions and generated code.

python -m experiments.overhead.one_rank [rounds]
"""

from __future__ import annotations

import sys

import torch

from autoplan import zoo
from autoplan.api import parallelize
from autoplan.capture import capture
from autoplan.search.uniform import named_plan
from experiments.overhead.comparison import OURS, Contender, report, take_turns
from searchspace.plan import ClusterInfo, Recipe


def compare(model_name: str, batch: int, rounds: int) -> None:
    torch.set_num_threads(1)
    model, args, kwargs = zoo.build(model_name, batch=batch, device="cpu")
    captured = capture(model, args, kwargs)
    plan = named_plan(captured.graph, ClusterInfo(name="cpu:1x1", devices=1), Recipe())
    parallel = parallelize(captured, plan=plan)

    def ours() -> float:
        parallel.zero_grad()
        return parallel.train_step(*args, **kwargs).item()

    def eager() -> float:
        model.zero_grad()
        loss = model(*args, **kwargs)
        loss.backward()
        return loss.item()

    contenders = {
        OURS: Contender(ours, list(parallel.parameters())),
        "eager PyTorch": Contender(eager, list(model.parameters())),
    }
    report("one_rank", f"{model_name}, batch {batch}", take_turns(contenders, rounds))


if __name__ == "__main__":
    repetitions = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    compare("gpt-small", 8, repetitions)
    compare("gpt-small", 1, repetitions)
