"""Local operators: what a rank computes where ATen has no operator that works on a shard.

Each is a plain, differentiable Python function of tensors and numbers, defined under the qualified
name ``autoplan.<name>.default`` both here (:func:`resolve`) and in ``torch.ops.autoplan`` (where the
capture finds its schema).  They work on meta tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])

_LIBRARY = torch.library.Library("autoplan", "DEF")
_FUNCTIONS: dict[str, Callable[..., Any]] = {}


def local_operator(function: Function) -> Function:
    """Register ``function`` as ``autoplan.<its name>.default``; its annotations give the schema."""
    name = function.__name__
    _LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=()))
    _LIBRARY.impl(name, function, "CompositeImplicitAutograd")
    function._schema = getattr(torch.ops.autoplan, name).default._schema  # type: ignore[attr-defined]
    _FUNCTIONS[f"autoplan.{name}.default"] = function
    return function


def register(target: str, function: Callable[..., Any]) -> bool:
    """Let ``target`` mean ``function`` from now on; whether it meant nothing before."""
    first = target not in _FUNCTIONS
    _FUNCTIONS[target] = function
    resolve.cache_clear()
    return first


def names() -> tuple[str, ...]:
    """The targets of autoplan's own local operators."""
    return tuple(target for target in _FUNCTIONS if target.startswith("autoplan."))


@cache
def resolve(target: str) -> Callable[..., Any]:
    """What computes ``target``: ``"aten.linear.default"`` or ``"autoplan.embedding.default"``.

    Raises AttributeError when nothing is called so.
    """
    if target in _FUNCTIONS:
        return _FUNCTIONS[target]
    parts = target.split(".")
    if len(parts) != 3:
        raise AttributeError(f"expected a target namespace.operator.overload, got {target!r}")
    namespace, packet, overload = parts
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)
