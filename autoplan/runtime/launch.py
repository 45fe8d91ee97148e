"""Starting ranks: joining those that torchrun started, or a pool of local workers of our own.

A :class:`WorkerPool` serves many programs one after the other.  Only loopback addresses are used, the
port is a free one.  Workers end with the process that made them, however it ends; when one of them dies,
the others are told who it was; no rank waits for another longer than the time-out.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from autoplan.runtime import lost, progress
from autoplan.runtime.process_groups import ProcessGroups
from searchspace.errors import ExecutionError, RankLostError

_GRACE_SECONDS = 5.0
"""How long ranks may take to notice that another one has failed, before they are ended."""

_joined: ProcessGroups | None = None


def under_torchrun() -> bool:
    """Whether this process is one of several that a launcher such as torchrun has started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def join(timeout_seconds: float = 600.0, device: torch.device | None = None) -> ProcessGroups:
    """This process's place among the ranks: joins the process group on the first call.

    NCCL on CUDA devices, gloo on CPU.  Raises ExecutionError when no launcher has started this process.
    """
    global _joined
    if _joined is not None and dist.is_initialized():
        return _joined
    if device is None:
        device = _own_device(int(os.environ.get("LOCAL_RANK", "0")))
    timeout = timedelta(seconds=timeout_seconds)
    if not dist.is_initialized():
        if not under_torchrun():
            raise ExecutionError("no ranks to join: start the script with torchrun, or use WorkerPool")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        with lost.communicating(int(os.environ["RANK"]), "joining the other ranks"):
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timeout)
    if _joined is None:
        lost.announce_own_end(dist.distributed_c10d._get_default_store(), dist.get_rank())
    _joined = ProcessGroups(device, timeout)
    return _joined


def _own_device(local_rank: int) -> torch.device:
    if torch.cuda.is_available() and local_rank < torch.cuda.device_count():
        return torch.device("cuda", local_rank)
    return torch.device("cpu")


_Failure = tuple[BaseException, str]
"""What a rank raised, and its traceback."""


@dataclass
class _Worker:
    process: Any
    connection: Connection


class WorkerPool:
    """``world_size`` local ranks that run picklable functions together, again and again.

    ``pool.run(function, *arguments)`` calls the function on every rank, within an initialised process
    group, and returns the results by rank.  Workers start on first use.  After a lost rank the next
    call starts fresh ones.  Use as a context manager, or call :meth:`close`.
    """

    def __init__(self, world_size: int, timeout_seconds: float = 60.0, device: str = "cpu", threads: int = 1) -> None:
        if world_size < 1:
            raise ExecutionError(f"a pool needs at least one rank, got world_size={world_size}")
        if device == "cuda" and torch.cuda.device_count() < world_size:
            raise ExecutionError(f"{world_size} ranks need as many CUDA devices, found {torch.cuda.device_count()}")
        self.world_size = world_size
        self.timeout_seconds = timeout_seconds
        self.device = device
        self.threads = threads
        self._workers: list[_Worker] = []
        self._store: dist.TCPStore | None = None
        self._board: Any = None
        self._group = (0, world_size)

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids by rank; empty before the first call."""
        return tuple(worker.process.pid for worker in self._workers)

    def start(self) -> None:
        """Start the workers, if they do not run."""
        if self._workers:
            return
        context = multiprocessing.get_context("spawn")
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        self._store = dist.TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(),
            timeout=timedelta(seconds=self.timeout_seconds),
        )  # fmt: skip
        self._board = context.Array("q", self.world_size, lock=False)
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            settings = (rank, port, self.timeout_seconds, self.device, self.threads)
            process = context.Process(target=_serve, args=(theirs, settings, self._board), daemon=True)
            process.start()
            theirs.close()
            self._workers.append(_Worker(process, ours))

    def run(self, function: Callable[..., Any], *arguments: Any, ranks: int | None = None) -> list[Any]:
        """Call ``function(*arguments)`` on every rank, or on the first ``ranks``; results by rank.

        An exception that a rank raises is raised here, with the rank's traceback as a note.  Raises
        RankLostError, naming rank, signal and step, when a rank dies or does not answer in time.
        """
        size = self.world_size if ranks is None else ranks
        if not 1 <= size <= self.world_size:
            raise ExecutionError(f"a pool of {self.world_size} ranks cannot run {size}")
        self.start()
        if self._group[1] != size:
            self._group = (self._group[0] + 1, size)
        task = pickle.dumps((self._group, function, arguments))
        for worker in self._workers[:size]:
            with suppress(BrokenPipeError, ConnectionResetError):  # died since the last call: collecting notices
                worker.connection.send_bytes(task)
        try:
            results, failures, dead = self._collect(size)
        except BaseException:  # Ctrl-C: nobody waits for the answers any more
            self._end()
            raise
        if failures or dead:
            raise self._failure(failures, dead, size)
        return [results[rank] for rank in range(size)]

    def close(self) -> None:
        """End all workers."""
        for worker in self._workers:
            worker.connection.close()  # ends its loop
        deadline = time.monotonic() + 1.0
        for worker in self._workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
        self._workers.clear()
        self._store = None
        self._group = (0, self.world_size)

    # -- collecting ------------------------------------------------------------------------------

    def _collect(self, size: int) -> tuple[dict[int, Any], dict[int, _Failure], dict[int, str]]:
        """Results, exceptions and causes of death by rank."""
        results: dict[int, Any] = {}
        failures: dict[int, _Failure] = {}
        dead: dict[int, str] = {}
        deadline: float | None = None
        while len(results) + len(failures) + len(dead) < size:
            silent = [r for r in range(size) if r not in results and r not in failures and r not in dead]
            patience = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not wait([self._workers[r].connection for r in silent], patience):
                if not dead:  # else they wait for the dead one, perhaps since the start
                    dead = {r: f"rank {r} stopped answering at step {self._board[r]}" for r in silent}
                break
            for rank in silent:
                connection = self._workers[rank].connection
                if not connection.poll():
                    continue
                try:
                    kind, payload = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionResetError):
                    dead[rank] = self._cause_of_death(rank)
                    self._publish(dead[rank])
                    deadline = deadline or time.monotonic() + _GRACE_SECONDS
                    continue
                if kind == "result":
                    results[rank] = payload
                else:
                    failures[rank] = payload
                    deadline = deadline or time.monotonic() + _GRACE_SECONDS
        return results, failures, dead

    def _end(self) -> None:
        """End all workers at once, whatever they are doing."""
        for worker in self._workers:
            worker.process.kill()
        self.close()

    def _cause_of_death(self, rank: int) -> str:
        process = self._workers[rank].process
        process.join(1.0)
        code = process.exitcode
        how = f"was killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exited with {code}"
        return f"rank {rank} {how} at step {self._board[rank]}"

    def _publish(self, text: str) -> None:
        if self._store is not None:
            self._store.set(lost.OBITUARY, text)

    def _failure(self, failures: dict[int, _Failure], dead: dict[int, str], size: int) -> BaseException:
        """What to raise; ends the workers unless all have failed alike, so that they are still in step."""
        alike = len(failures) == size and len({type(error) for error, _ in failures.values()}) == 1
        out_of_touch = any(isinstance(error, RankLostError) for error, _ in failures.values())
        if dead or out_of_touch or not alike:
            self._end()
        own = [rank for rank, (error, _) in failures.items() if not isinstance(error, RankLostError)]
        if own:  # the others only lost touch because of this one
            error, text = failures[own[0]]
            error.add_note(f"on rank {own[0]}:\n{text}")
        elif dead:
            error = RankLostError("; ".join(dead[rank] for rank in sorted(dead)))
        else:
            error, _ = next(iter(failures.values()))
        for rank, (other, _) in sorted(failures.items()):
            if other is not error:
                error.add_note(f"rank {rank} ended with {type(other).__name__}: {other}")
        return error


def spawn(function: Callable[..., Any], world_size: int, *arguments: Any, timeout_seconds: float = 600.0) -> list[Any]:
    """Run ``function(*arguments)`` on ``world_size`` fresh local ranks, and end them; results by rank."""
    cuda = torch.cuda.is_available() and torch.cuda.device_count() >= world_size
    threads = max(1, (os.cpu_count() or 1) // world_size)
    with WorkerPool(world_size, timeout_seconds, "cuda" if cuda else "cpu", threads) as pool:
        return pool.run(function, *arguments)


# -- in the worker -----------------------------------------------------------------------------------


def _serve(connection: Connection, settings: Sequence[Any], board: Any) -> None:
    """A worker's life: one task after the other until the connection closes."""
    rank, port, timeout_seconds, kind, threads = settings
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    torch.set_num_threads(threads)
    progress.publish_to(board, rank)
    loopback = "lo0" if os.uname().sysname == "Darwin" else "lo"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    timeout = timedelta(seconds=timeout_seconds)
    device = torch.device("cuda", rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
    lost.ask(store)
    present: tuple[int, int] | None = None
    while True:
        try:
            task = connection.recv_bytes()
        except (EOFError, OSError):
            os._exit(0)
        progress.report(0)
        try:
            group, function, arguments = pickle.loads(task)
            if group != present:
                _enter_group(group, store, rank, device, timeout)
                present = group
            answer = ("result", function(*arguments))
        except Exception as error:
            answer = ("failure", (_portable(error), traceback.format_exc()))
        connection.send_bytes(_packed(answer))
        if answer[0] == "failure" and isinstance(answer[1][0], RankLostError):
            os._exit(1)  # closes the connections, so that ranks that wait for this one notice


def _end_with(parent: Any) -> None:
    """No orphans: this process ends when its parent does, whatever it is doing."""
    parent.join()
    os._exit(1)


def _enter_group(
    group: tuple[int, int], store: dist.Store, rank: int, device: torch.device, timeout: timedelta
) -> None:
    """Leave the process group of before, and form ``group``: (number, ranks)."""
    global _joined
    if dist.is_initialized():
        dist.destroy_process_group()
    number, size = group
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=dist.PrefixStore(f"group{number}", store),
        rank=rank,
        world_size=size,
        timeout=timeout,
    )
    _joined = ProcessGroups(device, timeout)


def _packed(answer: tuple[str, Any]) -> bytes:
    try:
        return pickle.dumps(answer)
    except Exception as error:
        failure = ExecutionError(f"the result cannot be sent back: {error}")
        return pickle.dumps(("failure", (failure, traceback.format_exc())))


def _portable(error: Exception) -> Exception:
    """``error`` itself if it survives pickling, else an ExecutionError that says the same."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return ExecutionError(f"{type(error).__name__}: {error}")
