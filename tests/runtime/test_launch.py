"""Pools of workers and lost ranks: everybody ends in time, the message says who, how and when."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from autoplan.runtime import launch, progress
from autoplan.runtime.codegen import SegmentCompiler
from autoplan.runtime.launch import WorkerPool
from autoplan.runtime.store import Store
from searchspace.errors import ExecutionError, NonFiniteError, RankLostError
from searchspace.program import ONCE
from tests.runtime.handmade import all_reduce, once, program

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def fragile() -> Iterator[WorkerPool]:
    with WorkerPool(3, timeout_seconds=4) as pool:
        yield pool


def total(value: int) -> int:
    mine = torch.tensor(value + dist.get_rank())
    dist.all_reduce(mine)
    return int(mine)


def train_until(victim: int, how: int | None, last: int) -> str:
    """Five steps of one all-reduce; at ``last`` the victim sends itself the signal ``how`` (None: raises)."""
    transport = launch.join()
    store = Store()
    case = program(3, [all_reduce("x", "y", (4,), (0, 1, 2))], ["x"], ["y"])
    run = transport.prepare(case, {transport.rank: store}, SegmentCompiler(torch.device("cpu")))
    for step in range(1, 6):
        progress.report(step)
        if step == last and transport.rank == victim:
            if how is None:
                raise ValueError("no more data")
            os.kill(os.getpid(), how)
        store.put(("x", ONCE), torch.ones(4, dtype=torch.float64))
        run()
        assert store.buffers[once("y")[0]].eq(3).all()
    return "done"


def ended(pids: tuple[int, ...]) -> bool:
    for pid in pids:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            continue
        return False
    return True


def test_results_by_rank_and_any_number_of_ranks(pool: WorkerPool) -> None:
    assert pool.run(total, 1) == [10, 10, 10, 10]
    assert pool.run(total, 1, ranks=2) == [3, 3]
    assert pool.run(total, 5, ranks=1) == [5]
    pids = pool.pids
    assert pool.run(total, 0) == [6] * 4 and pool.pids == pids
    with pytest.raises(ExecutionError, match="a pool of 4 ranks cannot run 5"):
        pool.run(total, 0, ranks=5)


def test_a_rank_dies_in_the_middle_of_a_step(fragile: WorkerPool) -> None:
    fragile.start()
    pids = fragile.pids
    begin = time.monotonic()
    with pytest.raises(RankLostError, match="rank 1 was killed by SIGKILL at step 3") as caught:
        fragile.run(train_until, 1, signal.SIGKILL, 3)
    assert time.monotonic() - begin < 30  # most of it is starting the workers
    notes = "\n".join(caught.value.__notes__)
    for rank in (0, 2):  # the others end with an error of their own, which says the same
        assert f"rank {rank} ended with RankLostError: rank {rank}, step 3" in notes
    assert "all_reduce from x to y among ranks [0, 1, 2] failed" in notes
    assert "rank 1 was killed by SIGKILL" in notes
    assert ended(pids)


def test_a_rank_dies_while_it_starts() -> None:
    """The others wait for it to join, and cannot notice."""
    with WorkerPool(2, timeout_seconds=600) as pool:
        pool.start()
        os.kill(pool.pids[1], signal.SIGKILL)
        with pytest.raises(RankLostError, match=r"^rank 1 was killed by SIGKILL at step 0$"):
            pool.run(total, 1)
        assert pool.run(total, 1) == [3, 3]


@pytest.mark.slow
def test_a_rank_hangs(fragile: WorkerPool) -> None:
    fragile.start()
    pids = fragile.pids
    with pytest.raises(RankLostError, match="rank 2 stopped answering at step 2") as caught:
        fragile.run(train_until, 2, signal.SIGSTOP, 2)
    assert "rank 0 ended with RankLostError: rank 0, step 2" in "\n".join(caught.value.__notes__)
    assert ended(pids)


def test_a_rank_raises_while_others_wait(fragile: WorkerPool) -> None:
    with pytest.raises(ValueError, match="no more data") as caught:
        fragile.run(train_until, 0, None, 4)
    assert "on rank 0:" in caught.value.__notes__[0] and "train_until" in caught.value.__notes__[0]
    assert fragile.pids == ()  # the next call starts fresh workers


def fail_together(kind: type[Exception]) -> None:
    raise kind("all of us")


def test_alike_failures_keep_the_pool(pool: WorkerPool) -> None:
    pool.start()
    pids = pool.pids
    with pytest.raises(NonFiniteError, match="all of us"):
        pool.run(fail_together, NonFiniteError)
    assert pool.run(total, 0) == [6] * 4 and pool.pids == pids


def unsendable() -> object:
    return lambda: None


def test_result_that_cannot_be_sent(pool: WorkerPool) -> None:
    with pytest.raises(ExecutionError, match="the result cannot be sent back"):
        pool.run(unsendable)


@pytest.mark.parametrize("size", [0, -1])
def test_no_ranks(size: int) -> None:
    with pytest.raises(ExecutionError, match=f"a pool needs at least one rank, got world_size={size}"):
        WorkerPool(size)


def test_joining_without_a_launcher() -> None:
    with pytest.raises(ExecutionError, match="no ranks to join: start the script with torchrun"):
        launch.join()


SCRIPT = """
    import os, pathlib
    from autoplan.runtime import launch
    from tests.runtime.models import PLANS, gpt, parallel_gpt

    if __name__ == "__main__":
        parallel = parallel_gpt(launch.join(60), **PLANS["tp"])
        loss = parallel.train_step(**gpt()[1]).item()
        pathlib.Path(__file__).with_name(f"loss{os.environ['RANK']}").write_text(repr(loss))
"""

ORPHANS = """
    import os, signal, sys, time
    from autoplan.runtime.launch import WorkerPool

    if __name__ == "__main__":
        pool = WorkerPool(2)
        pool.run(os.getpid)
        print(*pool.pids, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
"""


def script(tmp_path: Path, text: str) -> str:
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(text))
    return str(path)


def test_torchrun(tmp_path: Path) -> None:
    from tests.runtime.models import gpt

    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, script(tmp_path, SCRIPT)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    model, batch = gpt()
    losses = [float((tmp_path / f"loss{rank}").read_text()) for rank in range(2)]
    assert losses == pytest.approx([model(**batch)["loss"].item()] * 2, abs=1e-12)


ENDS = """
    import sys
    import torch
    from autoplan.runtime.launch import join
    from searchspace.errors import RankLostError

    transport = join(timeout_seconds=60)
    if transport.rank == 1:
        {last}
    try:
        transport.reduce([torch.ones(1)], "sum")
    except RankLostError as error:
        print(error, flush=True)
"""


@pytest.mark.parametrize(
    ("last", "why"),
    [
        ("raise ValueError('no more data')", "rank 1 ended with ValueError: no more data"),
        ("sys.exit(0)", "rank 1 came to the end of its script, or left it by sys.exit"),
    ],
)
def test_under_torchrun_others_learn_why_a_rank_ended(tmp_path: Path, last: str, why: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    text = textwrap.dedent(ENDS).format(last=last)
    done = subprocess.run(
        [*command, script(tmp_path, text)], env=environment, capture_output=True, text=True, timeout=90
    )
    assert f"a sum over all ranks failed; {why}\n" in done.stdout


def test_no_orphans(tmp_path: Path) -> None:
    """Workers end when the process that started them is killed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, script(tmp_path, ORPHANS)], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == -signal.SIGKILL
    pids = tuple(int(word) for word in done.stdout.split())
    assert len(pids) == 2
    deadline = time.monotonic() + 10
    while not ended(pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert ended(pids)
