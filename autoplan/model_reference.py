"""Models by reference: ``file.py:function``, ``module:function``, or a name of the zoo.

The function returns ``(model, args, kwargs)``, or a model and the inputs of one call: a tensor, a tuple of
positional or a dict of keyword inputs.  Of ``batch``, ``sequence``, ``device``, ``dtype``, ``labels`` and
``seed`` it is given those that it has parameters for.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.machinery
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from autoplan import zoo
from autoplan.zoo import Example
from searchspace.errors import AutoplanError, ModelError

_OPTIONAL = ("device", "dtype", "labels", "seed")
_SHAPE = "(model, args, kwargs), or a model and its inputs (a tensor, a tuple or a dict)"


def load_model(reference: str | Callable[..., Any], **options: Any) -> Example:
    """The model and example inputs that ``reference`` names, or that a function returns.

    ``options`` are those of :func:`autoplan.zoo.build`, None for "not given"; a function that has no
    parameter of that name refuses a given one, except ``device``, ``dtype``, ``labels`` and ``seed``.

    Raises ModelError, which says what was found instead.
    """
    given = {name: value for name, value in options.items() if value is not None}
    if not isinstance(reference, str):
        return example_of(model_name(reference), _call(model_name(reference), reference, given))
    path, separator, name = reference.rpartition(":")
    if not separator:
        if reference.endswith(".py"):
            raise ModelError(f"{reference}: say which function makes the model, {reference}:FUNCTION")
        return zoo.build(reference, **given)
    module = _from_file(Path(path)) if path.endswith(".py") else _from_module(path)
    return example_of(reference, _call(reference, _function(reference, module, name), given))


def example_of(reference: str, returned: Any) -> Example:
    """``returned`` as model, args, kwargs; ModelError when it is nothing of the kind."""
    if isinstance(returned, tuple) and len(returned) in (2, 3) and isinstance(returned[0], nn.Module):
        model, inputs, *rest = returned
        if rest:
            if isinstance(inputs, tuple | list) and isinstance(rest[0], Mapping):
                return Example(model, tuple(inputs), dict(rest[0]))
        elif isinstance(inputs, Mapping):
            return Example(model, (), dict(inputs))
        elif isinstance(inputs, tuple | list):
            return Example(model, tuple(inputs), {})
        elif isinstance(inputs, torch.Tensor):
            return Example(model, (inputs,), {})
    what = type(returned).__name__
    if isinstance(returned, tuple):
        what = f"a tuple of {', '.join(type(item).__name__ for item in returned) or 'nothing'}"
    raise ModelError(f"{reference}: expected {_SHAPE}, got {what}")


def model_name(source: str | Callable[..., Any]) -> str:
    """What messages and tables call a model."""
    return source if isinstance(source, str) else getattr(source, "__qualname__", repr(source))


def source_digest(reference: str | Callable[..., Any]) -> str:
    """Changes when the text that defines the model does: the file's, module's, function's or configuration's."""
    if not isinstance(reference, str):
        try:
            text = inspect.getsource(reference)
        except (OSError, TypeError):
            text = repr(getattr(reference, "__code__", type(reference)))
        return _digest(text.encode())
    path, separator, _ = reference.rpartition(":")
    if not separator:
        return _digest(repr(zoo.CONFIGS.get(reference)).encode())
    if path.endswith(".py"):
        file: str | None = path
    else:
        spec = _spec(path)
        file = spec.origin if spec is not None else None
    try:
        return _digest(Path(file or path).read_bytes())
    except OSError as error:
        raise ModelError(f"{reference}: cannot read the model: {error.strerror}") from None


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ModelError(f"{path}: no such file")
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # as `python file.py` does, for the file's own imports
    name = f"autoplan_model_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # the suffix is .py
    execute = spec.loader.exec_module
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    _guarded(str(path), lambda: execute(module))
    return module


def _from_module(name: str) -> ModuleType:
    spec = _spec(name)
    if spec is None:
        raise ModelError(f"no module {name!r}; for a file write PATH.py:FUNCTION")
    return _guarded(name, lambda: importlib.import_module(name))


def _spec(name: str) -> importlib.machinery.ModuleSpec | None:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # a console script lacks it
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None


def _function(reference: str, module: ModuleType, name: str) -> Callable[..., Any]:
    found = getattr(module, name, None)
    if found is None:
        own = [n for n, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__]
        near = difflib.get_close_matches(name, own, n=1) or own[:5]
        raise ModelError(f"{reference}: no function {name!r}; there is {', '.join(near) or 'no function at all'}")
    if isinstance(found, nn.Module) or (isinstance(found, type) and issubclass(found, nn.Module)):
        raise ModelError(f"{reference} is a module; name a function that returns {_SHAPE}")
    if not callable(found):
        raise ModelError(f"{reference} is of type {type(found).__name__}; name a function that returns {_SHAPE}")
    return found


def _call(reference: str, function: Callable[..., Any], given: Mapping[str, Any]) -> Any:
    parameters = inspect.signature(function).parameters
    every = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    accepted = {name: value for name, value in given.items() if every or name in parameters}
    refused = [name for name in given if name not in accepted and name not in _OPTIONAL]
    if refused:
        raise ModelError(f"{reference} has no parameter {', '.join(refused)}; it has ({', '.join(parameters)})")
    needed = [
        name
        for name, p in parameters.items()
        if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and name not in accepted
    ]
    if needed:
        raise ModelError(f"{reference} needs a value of {', '.join(needed)}; give the parameter a default")
    return _guarded(reference, lambda: function(**accepted))


def _guarded(reference: str, call: Callable[[], Any]) -> Any:
    """Run a user's code; what it raises becomes a ModelError with the line that raised it."""
    try:
        return call()
    except AutoplanError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else reference
        raise ModelError(f"{reference}: {type(error).__name__}: {error} (at {where})") from error
