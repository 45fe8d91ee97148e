"""Progress: silent for short work, lines in files, a bar on terminals."""

import io

from rich.console import Console

from autoplan.report.progress import Progress


def lines(stream: io.StringIO) -> list[str]:
    return stream.getvalue().splitlines()


def test_short_work_shows_nothing() -> None:
    stream = io.StringIO()
    with Progress("search", patience_s=60, out=Console(file=stream)) as progress:
        progress("stages", 0.5)
    assert stream.getvalue() == ""


def test_a_file_gets_a_line_per_change() -> None:
    stream = io.StringIO()
    with Progress("search", patience_s=0, out=Console(file=stream, width=100)) as progress:
        progress("meshes", 0.25)
        progress("meshes", 0.5)
        progress("stages")
    shown = [line for line in lines(stream) if "meshes" in line or "stages" in line]
    assert shown == ["search: meshes 25 % (0 s)", "search: stages (0 s)"]


def test_a_terminal_shows_a_bar_and_clears_it() -> None:
    stream = io.StringIO()
    with Progress("search", patience_s=0, out=Console(file=stream, width=100, force_terminal=True)) as progress:
        progress._timer.join(5)
        progress("stages [x]", 0.5)
        progress._bars.refresh()
    assert "search: stages [x]" in stream.getvalue()
    assert stream.getvalue().endswith("\x1b[?25h\r\x1b[1A\x1b[2K")


def test_an_exception_ends_the_display() -> None:
    stream = io.StringIO()
    try:
        with Progress("search", patience_s=0, out=Console(file=stream, force_terminal=True)) as progress:
            raise RuntimeError
    except RuntimeError:
        pass
    assert progress._bars is None and not progress._timer.is_alive()
