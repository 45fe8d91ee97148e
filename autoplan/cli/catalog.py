"""``autoplan zoo``, ``autoplan cluster`` and ``autoplan schema``: what there is."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from autoplan import zoo as models
from autoplan.report.console import show
from autoplan.report.progress import Progress
from costmodel.cluster import Cluster
from costmodel.device import describe, preset, preset_names
from searchspace.plan import Plan
from searchspace.summary import Table

cluster_app = typer.Typer(help="Clusters and device presets.", no_args_is_help=True, rich_markup_mode=None)


def zoo() -> None:
    """List the built-in models."""
    rows = []
    with Progress("zoo") as progress:
        for index, name in enumerate(models.names()):
            progress(name, index / len(models.names()))
            config = models.CONFIGS[name]
            length = "" if config.sequence is None else str(config.sequence)
            rows.append((name, f"{models.parameter_count(name) / 1e6:,.1f} M", length))
    show(Table("Models", ("name", "parameters", "sequence"), tuple(rows)))


def schema() -> None:
    """Print the JSON Schema of plan files."""
    print(json.dumps(Plan.json_schema(), indent=2))


@cluster_app.command("list")
def list_presets() -> None:
    """List the devices that a cluster can be made of."""
    rows = tuple((name, describe(preset(name))) for name in preset_names())
    show(Table("Devices (write DEVICE:NODESxDEVICES_PER_NODE, e.g. h100:8x8)", ("name", "figures"), rows))


@cluster_app.command("show")
def show_cluster(
    spec: Annotated[str, typer.Argument(metavar="CLUSTER", help="DEVICE:NODESxDEVICES, or a .toml or .json file.")],
) -> None:
    """Print what a cluster consists of."""
    print(Cluster.parse(spec).describe())
