"""Interleaved timing of contenders that compute the same, and the statistics of their ratio.

Machines drift and have neighbours, so contenders take turns: in each round every contender runs once, in an
order that rotates, and only times of the same round are divided.  With several ranks a round's time is
that of the slowest rank, which all start together.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from scipy import stats


@dataclass(frozen=True)
class Contender:
    """One way to train.

    Fields
        step: forward and backward after clearing the gradients; returns the loss, NaN where a rank lacks it.
        parameters: what this rank's optimizer steps on.
    """

    step: Callable[[], float]
    parameters: Sequence[torch.nn.Parameter]


OURS = "autoplan"
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Ratio:
    """Time of autoplan divided by that of a peer, over rounds.

    Fields
        median: of the ratios of single rounds.
        low, high: 95 % confidence interval of the median, bootstrap with bias correction (BCa).
        slower_rounds: rounds in which autoplan took longer.
        sign_test: two-sided p value of the sign test that either is as often the faster one.
    """

    peer: str
    median: float
    low: float
    high: float
    rounds: int
    slower_rounds: int
    sign_test: float

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}] of {self.peer}"


def take_turns(contenders: Mapping[str, Contender], rounds: int, warm_up: int = 3) -> dict[str, list[float]]:
    """Seconds of each contender by round, warm-up left out; the same on all ranks."""
    check_equal(contenders)
    names = list(contenders)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(warm_up + rounds):
        gc.collect()
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            taken = _together(contenders[name].step)
            if number >= warm_up:
                seconds[name].append(taken)
    return seconds


def check_equal(contenders: Mapping[str, Contender], steps: int = 4) -> None:
    """Raise AssertionError unless all contenders train alike: what differs is not worth timing.

    Wrong gradients show in the losses of the steps that follow.
    """
    losses: dict[str, list[float]] = {}
    for name, contender in contenders.items():
        optimizer = torch.optim.SGD(contender.parameters, lr=0.1)
        losses[name] = []
        for _ in range(steps):
            losses[name].append(contender.step())
            optimizer.step()
    wanted = losses[OURS]
    assert wanted[-1] < wanted[0], f"nothing is learnt: {wanted}"
    for name, found in losses.items():
        close = np.allclose(found, wanted, rtol=1e-4) or np.isnan(found).all()
        assert close, f"{name} has losses {found}, {OURS} has {wanted}"


def _together(step: Callable[[], float]) -> float:
    """Seconds of one step, of the slowest rank."""
    if not dist.is_initialized():
        start = time.perf_counter()
        step()
        return time.perf_counter() - start
    dist.barrier()
    start = time.perf_counter()
    step()
    taken = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return taken.item()


def ratio(seconds: Mapping[str, Sequence[float]], peer: str) -> Ratio:
    """How autoplan compares with ``peer``."""
    ratios = np.array(seconds[OURS]) / np.array(seconds[peer])
    interval = stats.bootstrap((ratios,), np.median, random_state=np.random.default_rng(0)).confidence_interval
    slower = int((ratios > 1).sum())
    sign = stats.binomtest(slower, len(ratios)).pvalue
    return Ratio(
        peer, float(np.median(ratios)), float(interval.low), float(interval.high), len(ratios), slower, float(sign)
    )


def report(study: str, setting: str, seconds: Mapping[str, Sequence[float]]) -> None:
    """Print the table of one setting, and keep it under ``results/<study>.json``."""
    ratios = [ratio(seconds, peer) for peer in seconds if peer != OURS]
    medians = {name: float(np.median(times)) for name, times in seconds.items()}
    print(f"{study}, {setting}")
    for name, median in medians.items():
        print(f"  {name:32} {median * 1e3:9.2f} ms")
    for found in ratios:
        print(f"  {found}; slower in {found.slower_rounds} of {found.rounds} rounds, p = {found.sign_test:.2g}")
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{study}.json"
    kept = json.loads(path.read_text()) if path.exists() else {}
    kept[setting] = {
        "machine": machine(),
        "median_seconds": medians,
        "ratios": [asdict(found) for found in ratios],
        "seconds": {name: [round(t, 6) for t in times] for name, times in seconds.items()},
    }
    path.write_text(json.dumps(kept, indent=1) + "\n")


def machine() -> dict[str, str | float]:
    """What ran, in words; ``load`` is the number of runnable tasks over the last minute."""
    return {
        "processor": f"{os.cpu_count()} {platform.machine()} cores",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load": round(os.getloadavg()[0], 2),
    }


def table() -> str:
    """All kept results as a Markdown table."""
    lines = [
        "| setting | against | autoplan | peer | ratio | 95 % interval | slower in | load |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for path in sorted(RESULTS.glob("*.json")):
        for setting, found in json.loads(path.read_text()).items():
            where = f"{path.stem.replace('_', ' ')}: {setting}"
            medians = {name: f"{seconds * 1e3:.1f} ms" for name, seconds in found["median_seconds"].items()}
            for r in found["ratios"]:
                lines.append(
                    f"| {where} | {r['peer']} | {medians[OURS]} | {medians[r['peer']]} | {r['median']:.3f} "
                    f"| {r['low']:.3f} - {r['high']:.3f} | {r['slower_rounds']} of {r['rounds']} "
                    f"| {found['machine']['load']} |"
                )
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
