"""Terminals: results go to standard output, progress and errors to standard error."""

from __future__ import annotations

import sys
from typing import TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from searchspace.summary import Table

WIDTH_OF_FILES = 160
"""Columns when the output is a file or a pipe, so that tables are not cut at 80."""


def console(stream: TextIO) -> Console:
    """A console on ``stream`` that wraps lines at the terminal's width only."""
    return Console(file=stream, width=None if stream.isatty() else WIDTH_OF_FILES, highlight=False)


def show(*tables: Table) -> None:
    """Print tables on standard output, as aligned text when that is a file; those without rows are left out."""
    out = console(sys.stdout)
    for table in tables:
        if table.rows:
            out.print(_rich(table)) if out.is_terminal else print(table.text(), end="\n\n")


def _rich(table: Table) -> RichTable:
    headed = any(table.columns)
    made = RichTable(
        title=Text(table.title, "bold"), title_justify="left", show_header=headed, box=SIMPLE_HEAD, pad_edge=False
    )
    for column in table.columns:
        made.add_column(Text(column), overflow="fold")
    for row in table.rows:
        made.add_row(*map(Text, row))
    return made
