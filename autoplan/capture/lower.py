"""Lowering: the exported program becomes a graph.

Regions without gradient and with autocast are inlined (each node knows its context), in-place operators become
out-of-place ones, buffers that were written become updates, and every call passes through the folds
(:mod:`autoplan.capture.canonical`), the rewrites, and the builder.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from autoplan.capture import guards
from autoplan.capture.aliasing import SELF, Alias, View, picked
from autoplan.capture.builder import Emitted, GraphBuilder, Value, dtype_name, is_random, torch_dtype
from autoplan.capture.call import Rewrite, schema
from autoplan.capture.canonical import DEVICE, DROPPED, FOLDS, out_of_place, writes
from autoplan.capture.export import CONTEXT, MODEL
from searchspace.errors import CaptureError
from searchspace.graph import Context, InputRef, Symbol

_REGIONS = {
    torch.ops.higher_order.wrap_with_set_grad_enabled: 1,
    torch.ops.higher_order.wrap_with_autocast: 4,
}
"""Operators that run a subgraph in a context, and which argument the subgraph is; its inputs follow."""

Entry = Any
"""What a traced node stands for: an Alias, a tuple of entries, _Unknown, or a plain value."""


@dataclass(frozen=True)
class _Unknown:
    """A number that only the data knows; refused where it is used."""

    error: CaptureError


class Emitter:
    """Emits calls on values: folded, rewritten, or appended as they are (a ``call.Emit``)."""

    def __init__(self, builder: GraphBuilder, rewrites: Mapping[str, Rewrite]) -> None:
        self.builder = builder
        self._rewrites = rewrites
        self._active: list[str] = []

    def __call__(self, target: str, *args: Any, **kwargs: Any) -> Any:
        fold = FOLDS.get(target)
        result = fold(self, *args, **kwargs) if fold is not None else NotImplemented
        if result is NotImplemented:
            result = self.rewritten(target, *args, **kwargs)
        if result is not NotImplemented and self.builder.context.autocast is not None:
            result = self._as_autocast(result, target, args, kwargs)
        return self.builder.emit(target, *args, **kwargs) if result is NotImplemented else result

    def again(self, made: Emitted, *args: Any) -> Any:
        """See ``call.Emit``."""
        kwargs = dict(made.call.kwargs)
        if is_random(made.call) or any(isinstance(value, InputRef) for value in kwargs.values()):
            return None
        with self.builder.at(made.module, made.call.context):
            return self.builder.emit(made.target, *args, **kwargs)

    def _as_autocast(self, result: Any, target: str, args: Any, kwargs: Any) -> Any:
        """A folded or rewritten call under autocast, where the original may have cast its inputs first.

        If the dtypes of the results tell so, the cast is made explicit; if that does not help, the call is kept.
        """
        wanted = [meta.dtype for meta in self.builder.results(target, *args, **kwargs)]
        if _dtypes(result) == wanted or len(set(wanted)) != 1:
            return result

        def cast(arg: Any) -> Any:
            if isinstance(arg, Value) and torch_dtype(arg.dtype).is_floating_point and arg.dtype != wanted[0]:
                return self("aten.to.dtype", arg, Symbol(f"torch.{wanted[0]}"))
            return tuple(map(cast, arg)) if isinstance(arg, tuple) else arg

        args = tuple(map(cast, args))
        result = self.rewritten(target, *args, **kwargs)
        return result if result is not NotImplemented and _dtypes(result) == wanted else NotImplemented

    def rewritten(self, target: str, *args: Any, **kwargs: Any) -> Any:
        """What the target's rewrite gives, or NotImplemented; a rewrite is not applied inside itself."""
        rewrite = self._rewrites.get(target)
        if rewrite is None or target in self._active:
            return NotImplemented
        self._active.append(target)
        try:
            return rewrite(self, *args, **kwargs)
        finally:
            self._active.pop()


def _dtypes(result: Any) -> list[str]:
    return [value.dtype for value in (result if isinstance(result, tuple) else (result,))]


class Lowering:
    """Feeds a traced program to a builder."""

    def __init__(self, builder: GraphBuilder, rewrites: Mapping[str, Rewrite]) -> None:
        self.builder = builder
        self.call = Emitter(builder, rewrites)

    def run(self, graph_module: fx.GraphModule, inputs: Sequence[Entry]) -> tuple[Entry, ...]:
        """Lower one (sub)graph; returns the entries of its outputs."""
        env: dict[fx.Node, Entry] = {}
        supply = iter(inputs)
        module = self.builder.module
        for node in graph_module.graph.nodes:
            if node.op == "placeholder":
                env[node] = next(supply)
            elif node.op == "get_attr":
                env[node] = getattr(graph_module, node.target)
            elif node.op == "output":
                return tuple(fx.node.map_arg(node.args[0], env.__getitem__))
            else:
                path = module_path(node)
                module = module if path is None else path
                with self.builder.at(module, node.meta.get(CONTEXT, self.builder.context)):
                    env[node] = self._located(node, env)
        raise CaptureError("the exported graph has no output")

    def _located(self, node: fx.Node, env: dict[fx.Node, Entry]) -> Entry:
        try:
            return self._node(node, env)
        except CaptureError as error:
            place = guards.place_of_node(self.builder.module, node.meta.get("stack_trace"))
            if place and place not in str(error):
                raise CaptureError(f"{error} ({place})") from error
            raise

    def _node(self, node: fx.Node, env: dict[fx.Node, Entry]) -> Entry:
        mapped: Any = fx.node.map_arg((node.args, dict(node.kwargs)), env.__getitem__)
        args, kwargs = mapped
        if node.target is operator.getitem:
            return args[0][args[1]]
        if node.target in _REGIONS:
            first = _REGIONS[node.target]
            return self.run(args[first], args[first + 1 :])
        if not isinstance(node.target, torch._ops.OpOverload):
            unknown = _first_unknown((args, kwargs))
            if unknown is not None or isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool):
                return unknown or _Unknown(_data_dependent(node, self.builder.module))
            name = getattr(node.target, "__name__", str(node.target))
            raise CaptureError(
                f"{name} cannot be captured; control flow operators (torch.cond) and transforms (torch.vmap, "
                "torch.func) are not supported, write the model without them or make the module a composite operator"
            )
        target = qualified_name(node.target)
        if target in DROPPED:
            return None
        if _depends_on_data(node.meta.get("val")):
            return _Unknown(_data_dependent(node, self.builder.module))
        unknown = _first_unknown((args, kwargs))
        if unknown is not None:
            raise unknown.error
        return self._operator(node, target, *normalised(target, args, kwargs))

    def _operator(self, node: fx.Node, target: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Entry:
        if target == "aten.detach_.default":
            target = "aten.detach.default"
        if writes(target):
            return self._write(target, args, kwargs)
        if target in ("aten.batch_norm.default", "aten.instance_norm.default") and args[5] and args[3] is not None:
            return self._batch_norm(args) if "batch" in target else self._instance_norm(args)
        values, keywords = self._read(args), self._read(kwargs)
        result = self.call(target, *values, **keywords)
        _check(node, result)
        return self._entries(node, target, args, kwargs, result)

    def _write(self, target: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Entry:
        """An in-place operator: compute the new value, and let all that share memory see it."""
        functional = out_of_place(target)
        kwargs = dict(kwargs)
        written = kwargs.pop("out") if "out" in writes(target) else args[0]
        if written.memory.fixed:
            raise CaptureError(written.memory.fixed)
        before = self.read(written)
        if before.requires_grad and self.builder.context.no_grad:
            raise CaptureError(
                f"{target} changes a tensor that has a gradient where gradients are off; write it out of place"
            )
        value = self.call(functional, *self._read(args), **self._read(kwargs))
        if value.dtype != before.dtype:
            value = self.call("aten.to.dtype", value, Symbol(f"torch.{before.dtype}"))
        if value.shape != before.shape:
            raise CaptureError(f"{target} changes the shape {before.shape} to {value.shape} in place")
        self._store(written, value)
        return written

    def _batch_norm(self, args: tuple[Any, ...]) -> Entry:
        """Batch norm in training: the running statistics take new values, without a gradient."""
        x, weight, bias, mean, variance, _, momentum, eps, *_ = args
        read = self._read((x, weight, bias, mean, variance))
        result = self.call.rewritten("aten.batch_norm.default", *read, True, momentum, eps, False)
        if result is NotImplemented:
            target = "aten._native_batch_norm_legit_functional.default"
            y, _, _, new_mean, new_variance = self.builder.emit(target, *read, True, momentum, eps)
        else:
            y, new_mean, new_variance = result
        self._store(mean, new_mean)
        self._store(variance, new_variance)
        return Alias.fresh(y)

    def _instance_norm(self, args: tuple[Any, ...]) -> Entry:
        """Instance norm that keeps running statistics: averages over the batch of each instance's own."""
        x, weight, bias, mean, variance, _, momentum, eps, *_ = args
        read = self._read((x, weight, bias))
        y = self.call("aten.instance_norm.default", *read, None, None, True, momentum, eps, False)
        with self.builder.at(self.builder.module, Context(no_grad=True)):
            inside = tuple(range(2, len(read[0].shape)))
            for running, statistic in (
                (mean, self.call("aten.mean.dim", read[0], inside)),
                (variance, self.call("aten.var.correction", read[0], inside, correction=1)),
            ):
                before = self.read(running)
                now = self.call(
                    "aten.to.dtype", self.call("aten.mean.dim", statistic, (0,)), Symbol(f"torch.{before.dtype}")
                )
                self._store(running, self.call("aten.lerp.Scalar", before, now, momentum))
        return Alias.fresh(y)

    def _store(self, alias: Alias, value: Value) -> None:
        with self.builder.at(self.builder.module, Context()):
            alias.write(self.call, value)

    def _read(self, arg: Any) -> Any:
        if isinstance(arg, Alias):
            return self.read(arg)
        if isinstance(arg, list | tuple):
            return tuple(self._read(item) for item in arg)
        if isinstance(arg, dict):
            return {name: self._read(item) for name, item in arg.items()}
        return symbol(arg)

    def read(self, entry: Entry) -> Value:
        """The present value of a traced tensor."""
        if isinstance(entry, _Unknown):
            raise entry.error
        with self.builder.at(self.builder.module, Context()):  # views are derived again with gradients
            return entry.read(self.call)

    def _entries(self, node: fx.Node, target: str, args: Any, kwargs: Any, result: Any) -> Entry:
        """The results as aliases; those that share memory with an argument become views of it."""
        traced = node.meta.get("val")
        base = next((a for a in args if isinstance(a, Alias)), None)
        source = next(
            (n for n in node.args if isinstance(n, fx.Node) and isinstance(n.meta.get("val"), torch.Tensor)), None
        )
        viewed = None
        if base is not None and source is not None:
            plain = tuple(SELF if a is base else self._read(a) for a in args)
            viewed = View(target, plain, tuple(sorted(self._read(kwargs).items())))

        def entry(value: Value, val: Any, view: View | None) -> Alias:
            if view is not None and source is not None and shares_memory(val, source.meta["val"]):
                return base.viewed(view, value)  # type: ignore[union-attr]
            return Alias.fresh(value)

        if isinstance(result, list | tuple):
            vals = traced if isinstance(traced, list | tuple) else [None] * len(result)
            return tuple(
                entry(value, val, picked(viewed, i) if viewed is not None else None)
                for i, (value, val) in enumerate(zip(result, vals, strict=True))
            )
        return entry(result, traced, viewed)


def shares_memory(a: Any, b: Any) -> bool:
    """Whether two traced tensors lie in the same storage."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return False
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


def module_path(node: fx.Node) -> str | None:
    """Qualified name of the innermost module that made a traced node, "" for the model; None if it is not known."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return None
    path = str(next(reversed(stack.values()))[0])
    return "" if path == MODEL else path.removeprefix(MODEL + ".")


def qualified_name(target: torch._ops.OpOverload) -> str:
    return f"{target.namespace}.{target._schema.name.split('::')[1]}.{target._overloadname}"


_IGNORED = frozenset({"pin_memory", "layout", "non_blocking"})


def normalised(target: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments by the schema: positional ones in order (no trailing defaults), keyword-only ones by name.

    What concerns memory only is left out; a tensor that is created is created on the rank's device.
    """
    arguments = schema(target).arguments
    names = [a.name for a in arguments if not a.kwarg_only]
    given = {**dict(zip(names, args, strict=False)), **{name: kwargs[name] for name in names if name in kwargs}}
    last = max((i + 1 for i, name in enumerate(names) if name in given), default=0)
    positional = tuple(given.get(a.name, a.default_value) for a in arguments[:last])
    keywords = {
        a.name: DEVICE if a.name == "device" else kwargs[a.name]
        for a in arguments
        if a.kwarg_only and a.name not in _IGNORED and (a.name == "device" or kwargs.get(a.name) is not None)
    }
    return positional, keywords


def symbol(arg: Any) -> Any:
    if isinstance(arg, torch.device):
        return DEVICE
    if isinstance(arg, torch.dtype | torch.layout | torch.memory_format):
        return Symbol(str(arg))
    return arg


def _depends_on_data(val: Any) -> bool:
    if isinstance(val, list | tuple):
        return any(_depends_on_data(item) for item in val)
    if isinstance(val, torch.Tensor):
        return any(isinstance(size, torch.SymInt) for size in val.shape)
    return isinstance(val, torch.SymInt | torch.SymFloat | torch.SymBool)


def _first_unknown(arg: Any) -> _Unknown | None:
    if isinstance(arg, _Unknown):
        return arg
    items = arg.values() if isinstance(arg, dict) else arg if isinstance(arg, list | tuple) else ()
    return next((found for found in map(_first_unknown, items) if found is not None), None)


def _data_dependent(node: fx.Node, module: str) -> CaptureError:
    number = not isinstance(node.meta.get("val"), torch.Tensor | list | tuple)
    place = guards.place_of_node(module, node.meta.get("stack_trace"))
    return guards.data_dependent(str(node.target), number, place)


def _check(node: fx.Node, result: Any) -> None:
    """Raise CaptureError when a lowered call gives another shape or dtype than the traced one."""
    traced = node.meta.get("val")
    pairs = zip(result, traced, strict=True) if isinstance(traced, list | tuple) else [(result, traced)]
    for value, val in pairs:
        if isinstance(val, FakeTensor) and (value.shape, value.dtype) != (tuple(val.shape), dtype_name(val.dtype)):
            raise CaptureError(
                f"{node.target} was traced as {dtype_name(val.dtype)} {tuple(val.shape)} but lowered to {value.dtype} "
                f"{value.shape}; please report this"
            )
