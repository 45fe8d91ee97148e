"""One rank against eager PyTorch: what it costs to run through instructions and generated code.

python -m experiments.overhead.one_rank [rounds]
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from autoplan import zoo
from autoplan.api import parallelize
from autoplan.capture import capture
from autoplan.search.uniform import named_plan
from experiments.overhead.comparison import OURS, Contender, report, take_turns
from searchspace.plan import ClusterInfo, Recipe

MODEL = "gpt-small"


def compare(rounds: int, batch: int, **sizes: Any) -> None:
    torch.set_num_threads(1)
    model, args, kwargs = zoo.build(MODEL, batch=batch, device="cpu", **sizes)
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
    setting = ", ".join([MODEL, f"batch {batch}", *(f"{name} {value}" for name, value in sizes.items())])
    report("one_rank", setting, take_turns(contenders, rounds))


if __name__ == "__main__":
    repetitions = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    compare(repetitions, batch=8)
    compare(repetitions, batch=1)
    compare(repetitions, batch=2, vocabulary=50_257)
