"""How a call ``(args, kwargs, loss_args)`` becomes the graph's input tensors, and outputs become the user's."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from autoplan.capture.structure import Structure, flatten, holds_tensors, is_cache, select
from searchspace.errors import CaptureError
from searchspace.layout import Shape


@dataclass(frozen=True)
class InputLeaf:
    """One tensor of the call.

    ``dtype`` is what the graph wants, ``given`` what the user passed at capture (they differ under
    ``precision="bf16"``); both are accepted later.
    """

    path: str
    name: str
    shape: Shape
    dtype: torch.dtype
    given: torch.dtype
    batch_dim: int | None

    def check_shape(self, shape: Shape, batch: int | None) -> None:
        """Raise CaptureError unless ``shape`` is the captured one, with the extent ``batch`` of the batch."""
        dim = self.batch_dim
        expected = self.shape
        if dim is not None and batch is not None:
            expected = (*expected[:dim], batch, *expected[dim + 1 :])
        if shape == expected:
            return
        message = f"{self.path}: expected shape {expected}, got {shape}"
        if (
            dim is not None
            and len(shape) == len(expected)
            and shape[:dim] + shape[dim + 1 :] == (expected[:dim] + expected[dim + 1 :])
        ):
            raise CaptureError(
                f"{message}: a batch of {shape[dim]} (dimension {dim}) where {batch} was captured; pad or drop what "
                "does not fill a batch, or capture again for another"
            )
        raise CaptureError(f"{message}; a model is captured for one shape, capture again for another")


@dataclass(frozen=True)
class CallSignature:
    """The call that was captured: its tensors, the values that were baked in, and its structure."""

    tensors: tuple[InputLeaf, ...]
    baked: tuple[tuple[str, Any], ...]
    structure: Structure
    order: tuple[str, ...]
    batch: int | None

    def rebuild(self, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...]]:
        """(args, kwargs, loss_args) with ``tensors`` in the order of ``self.tensors``."""
        leaves = {leaf.path: tensor for leaf, tensor in zip(self.tensors, tensors, strict=True)}
        leaves.update(self.baked)
        call = self.structure.unflatten([leaves[path] for path in self.order])
        return call["args"], call["kwargs"], call["loss_args"]

    def flatten(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
        loss_args: Sequence[Any] | None = (),
        *,
        batch: int | None = None,
    ) -> dict[str, torch.Tensor]:
        """The graph's input tensors by name, cast to the graph's dtypes.

        ``loss_args`` None is a call of the model alone: those of the loss are neither expected nor returned.
        ``batch`` is the extent that the batch dimension must have, by default that of the capture.
        Raises CaptureError when structure, a shape, a dtype or a baked value differs from the capture.
        """
        if loss_args is None:
            return self._of_the_model.flatten(args, kwargs, batch=batch)
        leaves = self._leaves(args, kwargs, loss_args)
        self._check_paths(leaves)
        found: dict[str, torch.Tensor] = {}
        for leaf in self.tensors:
            tensor = leaves[leaf.path]
            if not isinstance(tensor, torch.Tensor):
                raise CaptureError(f"{leaf.path}: captured as a tensor of shape {leaf.shape}, got {_short(tensor)}")
            leaf.check_shape(tuple(tensor.shape), self.batch if batch is None else batch)
            if tensor.dtype not in (leaf.dtype, leaf.given):
                raise CaptureError(f"{leaf.path}: expected {leaf.given}, got {tensor.dtype}")
            found[leaf.name] = tensor.to(leaf.dtype)
        for path, value in self.baked:
            given = leaves.get(path)
            if not _same(given, value):
                raise CaptureError(
                    f"{path}: {_short(value)} was baked in at capture, got {_short(given)}; capture again for "
                    "another value, or pass a tensor"
                )
        return found

    @cached_property
    def _of_the_model(self) -> CallSignature:
        """The part that does not concern the loss."""

        def own(path: str) -> bool:
            return path.partition(".")[0] != "loss_args"

        tensors = tuple(leaf for leaf in self.tensors if own(leaf.path))
        baked = tuple((path, value) for path, value in self.baked if own(path))
        return replace(self, tensors=tensors, baked=baked, order=tuple(path for path in self.order if own(path)))

    def _check_paths(self, leaves: Mapping[str, Any]) -> None:
        """Raise CaptureError that names missing and unexpected arguments; None may be left out or added."""
        expected = {leaf.path: f"{leaf.path} (a tensor of shape {leaf.shape})" for leaf in self.tensors}
        expected |= {path: f"{path} ({_short(value)})" for path, value in self.baked}
        optional = {path for path, value in self.baked if value is None}
        missing = [path for path in expected if path not in leaves and path not in optional]
        surplus = [path for path, value in leaves.items() if path not in expected and value is not None]
        if missing or surplus:
            parts = [f"missing {', '.join(missing)}"] if missing else []
            parts += [f"not expected {', '.join(f'{path} ({_short(leaves[path])})' for path in surplus)}"] * bool(
                surplus
            )
            raise CaptureError(
                f"the call differs from the captured one: {'; '.join(parts)}. Expected are "
                f"{', '.join(expected.values()) or 'no arguments'}, by position or keyword as at capture"
            )

    def batch_of(self, args: Sequence[Any], kwargs: Mapping[str, Any] | None, loss_args: Sequence[Any]) -> int | None:
        """The extent of the batch dimension in this call; CaptureError when its tensors disagree."""
        leaves = self._leaves(args, kwargs, loss_args)
        extents: dict[str, int] = {}
        for leaf in self.tensors:
            tensor = leaves.get(leaf.path)
            if leaf.batch_dim is not None and isinstance(tensor, torch.Tensor) and tensor.ndim > leaf.batch_dim:
                extents[leaf.path] = tensor.shape[leaf.batch_dim]
        if len(set(extents.values())) > 1:
            raise CaptureError(f"inputs disagree about the extent of the batch: {extents}")
        return next(iter(extents.values()), None)

    @staticmethod
    def _leaves(args: Sequence[Any], kwargs: Mapping[str, Any] | None, loss_args: Sequence[Any]) -> dict[str, Any]:
        return dict(flatten(_call(args, kwargs, loss_args))[0])


def sign(
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    loss_args: Sequence[Any],
    *,
    batch_dims: Mapping[str, int | None] | None = None,
    floating: torch.dtype | None = None,
) -> CallSignature:
    """The signature of a call.

    ``batch_dims`` overrides the inferred batch dimension by path or prefix of a path; ``floating`` is the
    dtype that floating-point tensors get in the graph.  Raises CaptureError for what cannot be an input.
    """
    leaves, structure = flatten(_call(args, kwargs, loss_args))
    tensors = [(path, leaf) for path, leaf in leaves if isinstance(leaf, torch.Tensor)]
    baked = tuple((path, leaf) for path, leaf in leaves if not isinstance(leaf, torch.Tensor))
    for path, leaf in tensors:
        if type(leaf) not in (torch.Tensor, torch.nn.Parameter, torch._subclasses.FakeTensor):
            raise CaptureError(f"{path}: expected a plain torch.Tensor, got {type(leaf).__name__}")
        if leaf.layout != torch.strided:
            raise CaptureError(f"{path}: expected a dense tensor, got layout {leaf.layout}")
    for path, leaf in baked:
        if is_cache(leaf):
            raise CaptureError(f"{path}: {type(leaf).__name__} is a cache of past keys and values; leave it out")
        if holds_tensors(leaf):
            raise CaptureError(
                f"{path}: {type(leaf).__name__} holds tensors but is no container that autoplan knows; pass a "
                "tuple, list, dict or dataclass, or register it with torch.utils._pytree.register_pytree_node"
            )
    dims = infer_batch_dims(tensors, batch_dims or {})
    names: Counter[str] = Counter()
    inputs = []
    for path, leaf in tensors:
        name = _identifier(path)
        names[name] += 1
        name = name if names[name] == 1 else f"{name}__{names[name]}"
        dtype = floating if floating is not None and leaf.is_floating_point() else leaf.dtype
        inputs.append(InputLeaf(path, name, tuple(leaf.shape), dtype, leaf.dtype, dims[path]))
    extents = [leaf.shape[leaf.batch_dim] for leaf in inputs if leaf.batch_dim is not None]
    order = tuple(path for path, _ in leaves)
    return CallSignature(tuple(inputs), baked, structure, order, extents[0] if extents else None)


def infer_batch_dims(
    tensors: Sequence[tuple[str, torch.Tensor]], overrides: Mapping[str, int | None]
) -> dict[str, int | None]:
    """The batch dimension of each input.

    Dimension 0 of those whose leading extent is the batch: that of an override, or the one that most
    inputs have (the first among equals).  Raises CaptureError when an override does not fit.
    """
    chosen: dict[str, int | None] = {}
    shapes = {path: tuple(tensor.shape) for path, tensor in tensors}
    for prefix in sorted(overrides, key=len):
        dim = overrides[prefix]
        paths = select([(path, None) for path in shapes], prefix)
        if not paths:
            raise CaptureError(f"batch_dims: no input tensor at {prefix!r}; the inputs are {list(shapes)}")
        for path in paths:
            rank = len(shapes[path])
            if dim is not None and not -rank <= dim < rank:
                raise CaptureError(f"batch_dims[{prefix!r}] = {dim}: {path} has shape {shapes[path]}")
            chosen[path] = dim if dim is None else dim % rank
    extents = {path: shapes[path][dim] for path, dim in chosen.items() if dim is not None}
    if len(set(extents.values())) > 1:
        raise CaptureError(f"batch_dims: the batch has different extents: {extents}")
    if extents:
        batch: int | None = next(iter(extents.values()))
    else:
        leading = Counter(shape[0] for path, shape in shapes.items() if shape and path not in chosen)
        batch = max(leading, key=lambda extent: leading[extent]) if leading else None
    return {
        path: chosen[path] if path in chosen else (0 if shape and shape[0] == batch else None)
        for path, shape in shapes.items()
    }


def _call(args: Sequence[Any], kwargs: Mapping[str, Any] | None, loss_args: Sequence[Any]) -> dict[str, Any]:
    if isinstance(args, torch.Tensor) or isinstance(loss_args, torch.Tensor):
        raise CaptureError("args and loss_args are tuples: for one tensor x write (x,)")
    return {"args": tuple(args), "kwargs": dict(kwargs or {}), "loss_args": tuple(loss_args)}


def _identifier(path: str) -> str:
    return "x_" + re.sub(r"\W", "_", path.removeprefix("kwargs."))


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b):
        return True
    return type(a) is type(b) and bool(a == b)


def _short(value: Any) -> str:
    text = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
