"""The command line's frame: sub-commands, and errors as one clear message without a traceback."""

from __future__ import annotations

import importlib.metadata
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from autoplan.cli import catalog, planning, running, sweeping
from autoplan.report.console import console
from searchspace.errors import AutoplanError

USER_ERROR = 2
INTERRUPTED = 130


class ClearErrors(TyperGroup):
    """Ends with code 2 on an error that a user can mend, with 130 on Ctrl-C."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except AutoplanError as error:
            if ctx.params.get("debug"):
                raise
            console(sys.stderr).print(f"error: {error}", style="red", markup=False, soft_wrap=True)
            raise typer.Exit(USER_ERROR) from None
        except KeyboardInterrupt:
            console(sys.stderr).print("interrupted; files that were written are complete", style="yellow")
            raise typer.Exit(INTERRUPTED) from None


app = typer.Typer(
    name="autoplan",
    cls=ClearErrors,
    help="Search how to split a single-device PyTorch model over many devices, and run the plan.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"autoplan {importlib.metadata.version('autoplan-torch')}")
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Options of all commands; their order here is that of the help."""


app.command("plan")(planning.plan)
app.command("show")(planning.show)
app.command("run")(running.run)
app.command("verify")(running.verify)
app.command("sweep")(sweeping.sweep)
app.command("schema")(catalog.schema)
app.command("zoo")(catalog.zoo)
app.add_typer(catalog.cluster_app, name="cluster")


def main() -> None:
    """Entry point of the console script."""
    app()
