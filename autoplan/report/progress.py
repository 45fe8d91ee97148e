"""Progress on whatever takes more than two seconds, on standard error."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from autoplan.report.console import console

PATIENCE_S = 2.0
"""Nothing is shown of work that ends sooner."""


class Progress:
    """Shows what is being done: ``with Progress("search") as progress: progress("stages", 0.4)``.

    On a terminal a line with a spinner, a bar when the share that is done is known, and the elapsed time;
    in a file one line whenever the text changes, at most one in ``PATIENCE_S``.
    """

    def __init__(self, title: str, patience_s: float = PATIENCE_S, out: Console | None = None) -> None:
        self._console = out or console(sys.stderr)
        self._title, self._text, self._share = title, "", None
        self._patience_s = patience_s
        self._start = self._written = time.monotonic()
        self._bars: Bars | None = None
        self._lock = threading.Lock()
        self._timer = threading.Timer(patience_s, self._appear)
        self._timer.daemon = True

    _share: float | None

    def __enter__(self) -> Progress:
        self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        with self._lock:
            self._patience_s = float("inf")
            if self._bars is not None:
                self._bars.stop()
                self._bars = None

    def __call__(self, text: str, share: float | None = None) -> None:
        """Now ``text`` is done, of which ``share`` (0 to 1) is behind us, or None when nobody knows."""
        with self._lock:
            changed = text != self._text
            self._text, self._share = text, share
            if self._bars is not None:
                self._update()
            elif changed and not self._console.is_terminal:
                self._write()

    def _appear(self) -> None:
        with self._lock:
            if self._patience_s == float("inf"):
                return
            if not self._console.is_terminal:
                self._write()
                return
            self._bars = Bars(
                SpinnerColumn(),
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=30),
                TimeElapsedColumn(),
                console=self._console,
                transient=True,
            )
            self._bars.add_task(self._title, total=None)
            self._update()
            self._bars.start()

    def _update(self) -> None:
        assert self._bars is not None
        share = self._share
        self._bars.update(
            self._bars.task_ids[0],
            description=self._description,
            total=None if share is None else 1.0,
            completed=0.0 if share is None else share,
        )

    @property
    def _description(self) -> str:
        return f"{self._title}: {self._text}" if self._text else self._title

    def _write(self) -> None:
        now = time.monotonic()
        if now - self._start < self._patience_s or now - self._written < min(self._patience_s, PATIENCE_S):
            return
        self._written = now
        share = "" if self._share is None else f" {100 * self._share:.0f} %"
        self._console.print(f"{self._description}{share} ({now - self._start:.0f} s)", markup=False)
