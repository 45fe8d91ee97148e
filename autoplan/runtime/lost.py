"""Lost ranks: what a rank says when its communication fails because another one is gone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch.distributed as dist

from autoplan.runtime import progress
from searchspace.errors import RankLostError

OBITUARY = "autoplan/lost"
"""Where a launcher that sees a rank die says so, in its own store."""

_launcher: dist.Store | None = None

_SIGNS = ("connection closed", "connection reset", "timed out", "timeout", "broken pipe", "remote process", "aborted")


def ask(launcher: dist.Store) -> None:
    """From now on ask this store about lost ranks."""
    global _launcher
    _launcher = launcher


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
    """What the launcher knows; it is given a second, since it may not have noticed yet."""
    if _launcher is not None:
        with suppress(RuntimeError):
            _launcher.wait([OBITUARY], timedelta(seconds=1))
            return _launcher.get(OBITUARY).decode()
    return "another rank died or stopped answering within the time-out"
