"""Nested Python values: taken apart into leaves with paths, and put together again.

Containers are tuples (named ones too), lists, mappings (dict, OrderedDict, transformers' ModelOutput and
BatchEncoding), dataclasses, and whatever is registered with ``torch.utils._pytree``.  Anything else is a leaf.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree


@dataclass(frozen=True)
class Structure:
    """The shape of a nested value: a leaf, or a container with named children and a way to build it."""

    children: tuple[tuple[str, Structure], ...] = ()
    build: Callable[[list[Any]], Any] | None = None

    @property
    def leaves(self) -> int:
        return 1 if self.build is None else sum(child.leaves for _, child in self.children)

    def unflatten(self, leaves: list[Any]) -> Any:
        """The value whose leaves, in order, are ``leaves``; ValueError when there are more or fewer."""
        if len(leaves) != self.leaves:
            raise ValueError(f"expected {self.leaves} leaves, got {len(leaves)}")
        return self._take(iter(leaves))

    def _take(self, supply: Iterator[Any]) -> Any:
        if self.build is None:
            return next(supply)
        return self.build([child._take(supply) for _, child in self.children])


def flatten(value: Any, path: str = "") -> tuple[list[tuple[str, Any]], Structure]:
    """(path, leaf) pairs in order, and the structure.  A path is written ``"args.0.ids"``."""
    opened = _open(value)
    if opened is None:
        return [(path, value)], Structure()
    items, build = opened
    leaves: list[tuple[str, Any]] = []
    children: list[tuple[str, Structure]] = []
    for key, item in items:
        found, child = flatten(item, f"{path}.{key}" if path else str(key))
        leaves += found
        children.append((str(key), child))
    return leaves, Structure(tuple(children), build)


Opened = tuple[list[tuple[Any, Any]], Callable[[list[Any]], Any]]


def _open(value: Any) -> Opened | None:
    """Children of a container by key, and the function that builds the container from new children."""
    kind = type(value)
    if isinstance(value, torch.Tensor | str | bytes | type) or is_cache(value):
        return None
    if isinstance(value, tuple):
        if hasattr(value, "_fields"):
            return list(zip(value._fields, value, strict=True)), lambda items: kind(*items)
        return list(enumerate(value)), (lambda items: tuple(items)) if kind is tuple else (lambda items: kind(items))
    if isinstance(value, list):
        return list(enumerate(value)), lambda items: items if kind is list else kind(items)
    if isinstance(value, dict | UserDict | Mapping):
        keys, blank = list(value), _blank(value)
        return [(key, value[key]) for key in keys], lambda items: _mapping(kind, blank, keys, items)
    if dataclasses.is_dataclass(value):
        names = [f.name for f in dataclasses.fields(value)]
        return [(n, getattr(value, n)) for n in names], lambda items: _record(kind, names, items)
    if kind in _pytree.SUPPORTED_NODES:
        children, context = _pytree.SUPPORTED_NODES[kind].flatten_fn(value)
        rebuild = _pytree.SUPPORTED_NODES[kind].unflatten_fn
        return list(enumerate(children)), lambda items: rebuild(items, context)
    return None


def _blank(value: Any) -> Any:
    """An empty copy of a mapping that is more than a dict (a defaultdict, a BatchEncoding), or None."""
    if type(value) is dict or dataclasses.is_dataclass(value) or not hasattr(value, "clear"):
        return None
    blank = copy.copy(value)
    blank.clear()
    return blank


def _mapping(kind: type, blank: Any, keys: list[Any], items: list[Any]) -> Any:
    """A mapping of type ``kind`` with ``keys`` in this order."""
    pairs = dict(zip(keys, items, strict=True))
    if kind is dict:
        return pairs
    if dataclasses.is_dataclass(kind):  # transformers' ModelOutput: a dataclass and a dict at once, None left out
        return kind(**pairs)
    if blank is None:
        return kind(pairs)
    fresh = copy.copy(blank)
    for key, item in pairs.items():
        fresh[key] = item
    return fresh


def _record(kind: type, names: list[str], items: list[Any]) -> Any:
    """A dataclass instance built field by field, since ``__init__`` may take other arguments."""
    fresh: Any = object.__new__(kind)
    for name, item in zip(names, items, strict=True):
        object.__setattr__(fresh, name, item)
    return fresh


def is_cache(value: Any) -> bool:
    """Whether ``value`` is a key/value cache such as transformers' DynamicCache."""
    return any(base.__name__ in ("Cache", "DynamicCache") for base in type(value).__mro__)


def holds_tensors(value: Any, depth: int = 3) -> bool:
    """Whether an object that is no container has tensors among its attributes."""
    if isinstance(value, torch.Tensor):
        return True
    if depth == 0:
        return False
    inside: list[Any] = list(getattr(value, "__dict__", {}).values())
    if isinstance(value, list | tuple | set | frozenset):
        inside += value
    if isinstance(value, dict):
        inside += value.values()
    return any(holds_tensors(item, depth - 1) for item in inside)


def select(leaves: list[tuple[str, Any]], prefix: str) -> list[str]:
    """The paths that are ``prefix`` or lie below it."""
    return [path for path, _ in leaves if path == prefix or path.startswith(prefix + ".")]


__all__ = ["Structure", "flatten", "holds_tensors", "is_cache", "select"]
