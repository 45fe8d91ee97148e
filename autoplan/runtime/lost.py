"""Lost ranks: what a rank says when its communication fails because another one is gone."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import TracebackType

import torch.distributed as dist

from autoplan.runtime import progress
from searchspace.errors import RankLostError

OBITUARY = "autoplan/lost"
"""The key in a store that every rank reaches, under which stands who was lost and why."""

_launcher: dist.Store | None = None
_said = False

_SIGNS = ("connection closed", "connection reset", "timed out", "timeout", "broken pipe", "remote process", "aborted")


def ask(launcher: dist.Store) -> None:
    """From now on ask this store about lost ranks."""
    global _launcher
    _launcher = launcher


def announce_own_end(store: dist.Store, rank: int) -> None:
    """However this process ends, unless it is killed, it says so in ``store``; the first one's word counts."""
    ask(store)
    hook = sys.excepthook

    def raised(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        _say(store, f"rank {rank} ended with {kind.__name__}: {error}")
        hook(kind, error, trace)

    sys.excepthook = raised
    atexit.register(lambda: _say(store, f"rank {rank} came to the end of its script, or left it by sys.exit"))


def _say(store: dist.Store, text: str) -> None:
    global _said
    if not _said:
        _said = True
        with suppress(RuntimeError):  # the store's host may be gone first
            store.compare_set(OBITUARY, "", text)


@contextmanager
def communicating(rank: int, what: str) -> Iterator[None]:
    """Turn the failure of a communication into RankLostError that names rank, step and communication."""
    try:
        yield
    except RuntimeError as error:
        if not (isinstance(error, dist.DistError) or any(sign in str(error).lower() for sign in _SIGNS)):
            raise
        raise RankLostError(
            f"rank {rank}, step {progress.current()}: {what} failed; {_obituary()}\nthe backend says: {error}"
        ) from None


def _obituary() -> str:
    """What is known of it; the launcher is given a second, since it may not have noticed yet."""
    if _launcher is not None:
        with suppress(RuntimeError):
            _launcher.wait([OBITUARY], timedelta(seconds=1))
            return _launcher.get(OBITUARY).decode()
    return "another rank died or stopped answering within the time-out"
