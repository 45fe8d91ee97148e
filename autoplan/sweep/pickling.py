"""Finds what cannot be sent to another process before anything is sent."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from searchspace.errors import SweepError

_DEPTH = 8


def check_picklable(value: Any, name: str) -> None:
    """SweepError with the path to the smallest part of ``value`` that cannot be pickled.

    Lambdas, closures and local classes are fine (cloudpickle); locks, open files and generators are not.
    """
    error = _failure(value)
    if error is None:
        return
    path, part, error = _smallest(value, name, error, _DEPTH)
    raise SweepError(f"{path} (of type {type(part).__name__}) cannot be sent to the sweep's workers: {error}")


def _smallest(value: Any, path: str, error: Exception, depth: int) -> tuple[str, Any, Exception]:
    if depth:
        for step, part in _parts(value):
            inner = _failure(part)
            if inner is not None:
                return _smallest(part, path + step, inner, depth - 1)
    return path, value, error


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """What ``value`` holds, with how one writes it."""
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"[{index}]", part) for index, part in enumerate(value))
    elif inspect.isfunction(value):
        variables = inspect.getclosurevars(value)
        for scope, names in (("closure", variables.nonlocals), ("global", variables.globals)):
            yield from ((f".<{scope}>.{key}", part) for key, part in names.items())
        yield from ((f".<default>[{index}]", part) for index, part in enumerate(value.__defaults__ or ()))
    elif inspect.ismethod(value):
        yield ".__self__", value.__self__
    elif hasattr(value, "__dict__"):
        yield from ((f".{key}", part) for key, part in vars(value).items())


def _failure(value: Any) -> Exception | None:
    from ray import cloudpickle

    try:
        cloudpickle.dumps(value)
    except Exception as error:
        return error
    return None
