"""Starts one process per rank on this machine, with the environment that ``torchrun`` would give them."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import IO

GRACE_S = 20.0
"""How long the other ranks may go on after one has failed, to end with an error of their own."""


@dataclass(frozen=True)
class Failure:
    """The rank that failed first, its exit code (negative: the signal that ended it), and the end of its stderr."""

    rank: int
    code: int
    message: str

    def __str__(self) -> str:
        how = f"killed by {signal.Signals(-self.code).name}" if self.code < 0 else f"exit code {self.code}"
        return f"rank {self.rank} failed ({how})" + (f"\n{self.message}" if self.message else "")


def is_rank(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is a rank already: started by ``torchrun`` or by :func:`start_ranks`."""
    return "RANK" in environment and "WORLD_SIZE" in environment


def start_ranks(command: Sequence[str], ranks: int, grace_s: float = GRACE_S) -> Failure | None:
    """Run ``command`` once per rank and wait for all of them.

    Rank 0 has this process' standard output and error; the others' output is kept from the terminal.
    When a rank fails the others get ``grace_s`` to end, then they are ended.  No rank outlives the call,
    nor Ctrl-C.

    Returns the first failure, or None when all ranks exited with 0.
    """
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()
    failure: Failure | None = None
    with ExitStack() as stack:
        logs: list[IO[bytes]] = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(ranks)]
        processes = _start(command, ranks, logs)
        try:
            for rank, process in enumerate(processes):
                threading.Thread(target=_report, args=(process, rank, ended), daemon=True).start()
            for _ in range(ranks):
                rank = ended.get(timeout=None if failure is None else grace_s)
                code = processes[rank].returncode
                if code and failure is None:
                    failure = Failure(rank, code, _tail(logs[rank]))
        except queue.Empty:
            pass
        finally:
            _end(processes)
    return failure


def _start(command: Sequence[str], ranks: int, logs: Sequence[IO[bytes]]) -> list[subprocess.Popen[bytes]]:
    threads = str(max(1, len(os.sched_getaffinity(0)) // ranks))
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
    }
    sys.stdout.flush()
    sys.stderr.flush()
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(ranks):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            processes.append(
                subprocess.Popen(
                    command,
                    env={"OMP_NUM_THREADS": threads, **os.environ, **shared, **own},
                    stdin=subprocess.DEVNULL,
                    stdout=None if rank == 0 else subprocess.DEVNULL,
                    stderr=None if rank == 0 else logs[rank],
                )
            )
    except BaseException:
        _end(processes)
        raise
    return processes


def _report(process: subprocess.Popen[bytes], rank: int, ended: queue.SimpleQueue[int]) -> None:
    process.wait()
    ended.put(rank)


def _end(processes: Sequence[subprocess.Popen[bytes]], patience_s: float = 3.0) -> None:
    for process in processes:
        process.terminate()  # does nothing to one that has ended
    for process in processes:
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _tail(log: IO[bytes], size: int = 4000) -> str:
    log.seek(0)
    return log.read().decode(errors="replace")[-size:].strip()
