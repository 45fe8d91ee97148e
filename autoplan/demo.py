"""``make demo``: search a plan for a small GPT, train it on 4 CPU ranks and on one device, compare the losses.

The text is the source of Python's own ``argparse`` as bytes; the embeddings are tied, there is no dropout, and
all is computed in float64, so that the two curves may differ by rounding only.
"""

from __future__ import annotations

import argparse
import inspect
import sys
import time
from pathlib import Path
from typing import Any

import torch

from autoplan import zoo
from autoplan.report.console import show
from autoplan.report.progress import Progress
from autoplan.zoo import Example
from autoplan.zoo.preset import IGNORED
from searchspace.errors import AutoplanError
from searchspace.plan import Plan
from searchspace.summary import Table, tables

RANKS = 4
BATCH = 16
SEQUENCE = 64
TOLERANCE = 1e-9
LEARNING_RATE = 1e-3


def example() -> Example:
    """The model and the shape of its inputs; the same weights in every process."""
    return zoo.build(
        "gpt-small", batch=BATCH, sequence=SEQUENCE, width=128, heads=4, device="cpu", dtype="float64", seed=1
    )


def batches(steps: int) -> list[dict[str, Any]]:
    """``steps`` batches of consecutive bytes: tokens and, as labels, the bytes that follow them."""
    text = torch.frombuffer(bytearray(inspect.getsource(argparse).encode()), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(steps):
        starts = torch.randint(len(text) - SEQUENCE - 1, (BATCH, 1), generator=generator)
        windows = text[starts + torch.arange(SEQUENCE + 1)]
        labels = windows[:, 1:].clone()
        labels[0, : SEQUENCE // 2] = IGNORED  # ranks and micro-batches see different numbers of labels
        found.append({"tokens": windows[:, :-1], "labels": labels})
    return found


def train_alone(steps: int) -> list[float]:
    """The loss of each step on a single device, in plain PyTorch."""
    model = example().model
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for batch in batches(steps):
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_together(plan: Plan, steps: int) -> list[float]:
    """The loss of each step on this rank of the plan."""
    from autoplan import api

    parallel = api.parallelize(*example(), plan=plan)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=LEARNING_RATE)
    losses = []
    for batch in batches(steps):
        losses.append(parallel.train_step(**batch).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def main(arguments: list[str] | None = None) -> int:
    """Run the demonstration; 0 when the curves agree."""
    from autoplan import api
    from autoplan.runtime.launch import spawn

    parser = argparse.ArgumentParser(prog="python -m autoplan.demo", description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--output", type=Path, default=Path("plan.json"), help="where the plan is written")
    options = parser.parse_args(arguments)

    with Progress("search") as progress:
        plan = api.search(*example(), cluster=f"cpu:1x{RANKS}", global_batch=BATCH, progress=progress)
    plan.save(options.output)
    show(*tables(plan))
    print(f"plan written to {options.output}\n")

    start = time.perf_counter()
    with Progress(f"training on {plan.world_size} ranks"):
        together = spawn(train_together, plan.world_size, plan, options.steps)[0]
    seconds = time.perf_counter() - start
    with Progress("training on one device"):
        alone = train_alone(options.steps)
    worst = max(abs(a - b) for a, b in zip(together, alone, strict=True))
    title = f"Loss on {plan.world_size} ranks ({seconds:.1f} s with their start) and on one device"
    show(curves(together, alone, title))
    equal = worst <= TOLERANCE
    print(f"largest difference {worst:.1e}: the curves are {'equal' if equal else 'DIFFERENT'}")
    return 0 if equal else 1


def curves(together: list[float], alone: list[float], title: str, width: int = 40) -> Table:
    """Both losses step by step, with a bar for the eye."""
    top = max(alone)
    rows = tuple(
        (str(step), f"{a:.12f}", f"{b:.12f}", f"{abs(a - b):.1e}", "#" * round(width * b / top))
        for step, (a, b) in enumerate(zip(together, alone, strict=True))
    )
    return Table(title, ("step", "ranks", "one device", "difference", ""), rows)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except AutoplanError as error:
        sys.exit(f"error: {error}")
