"""Which step this rank is at, for messages: its own, and those of whoever watches it."""

from __future__ import annotations

from collections.abc import MutableSequence

_step = 0
_board: MutableSequence[int] | None = None
_rank = 0


def publish_to(board: MutableSequence[int], rank: int) -> None:
    """From now on write the step to ``board[rank]``: memory shared with the process that started this one."""
    global _board, _rank
    _board, _rank = board, rank


def report(step: int) -> None:
    """This rank begins ``step``."""
    global _step
    _step = step
    if _board is not None:
        _board[_rank] = step


def current() -> int:
    """The step that :func:`report` was last told, 0 before the first."""
    return _step
