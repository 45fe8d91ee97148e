"""Arguments and options that several commands share."""

from __future__ import annotations

import ast
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from costmodel.units import quantity
from searchspace.errors import AutoplanError, ModelError

Model = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="file.py:function, module:function, or a name listed by `autoplan zoo`."),
]
Batch = Annotated[int | None, typer.Option("--batch", min=1, help="Samples in the example inputs.")]
Sequence_ = Annotated[int | None, typer.Option("--sequence", min=1, help="Tokens per sample.")]
Dtype = Annotated[str | None, typer.Option("--dtype", help="Dtype of the weights, e.g. float32, float64, bf16.")]
Sizes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Another parameter of the model, e.g. --set layers=4."),
]
Seed = Annotated[int, typer.Option("--seed", help="Seed of weights, inputs and search.")]
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file.")]


def parse_sizes(texts: Sequence[str] | None) -> dict[str, Any]:
    """``["layers=4", "tied=False"]`` as keyword arguments; what is no Python literal is a string."""
    found: dict[str, Any] = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise ModelError(f"expected --set NAME=VALUE, got {text!r}")
        try:
            found[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            found[name] = value
    return found


def finite(value: float | None) -> float | None:
    """The value, unless it is infinite or no number."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"expected a finite number, got {value}")
    return value


def parse_bytes(text: str) -> int:
    """``"60 GiB"`` as bytes."""
    try:
        size = round(quantity(int(text) if text.isdigit() else text, "bytes"))
    except AutoplanError as error:
        raise typer.BadParameter(str(error)) from None
    if size <= 0:
        raise typer.BadParameter(f"expected more than 0 bytes, got {text!r}")
    return size
