"""Builds a graph operator by operator.

Shapes, dtypes and whether a gradient flows are not computed here: each distinct call is run once on fake
tensors, with autograd, and remembered (the layers of a deep model are the same calls).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from autoplan.capture.call import Call, TensorMeta, Traits, overload, symbolic
from searchspace.errors import CaptureError
from searchspace.graph import Argument, Context, Graph, InputRef, Operator, Symbol, Tensor, TensorKind
from searchspace.layout import Shape

Describe = Callable[[Call], Traits]


@dataclass(eq=False)
class Value:
    """A tensor of the graph under construction (a ``call.Handle``); ``origin`` is the call that made it."""

    shape: Shape
    stride: tuple[int, ...]
    dtype: str
    requires_grad: bool
    kind: TensorKind = "activation"
    source: str = ""
    aliases: tuple[str, ...] = ()
    batch_dim: int | None = None
    origin: Emitted | None = None

    @property
    def meta(self) -> TensorMeta:
        return TensorMeta(self.shape, self.dtype, self.requires_grad)

    @property
    def contiguous(self) -> bool:
        expected = 1
        for extent, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if extent != 1 and stride != expected:
                return False
            expected *= extent
        return True


@dataclass(eq=False)
class Emitted:
    """An operator under construction; ``given`` are its arguments with values in place of references."""

    call: Call
    inputs: tuple[Value, ...]
    given: tuple[Any, ...]
    module: str
    outputs: tuple[Value, ...] = ()

    @property
    def target(self) -> str:
        return self.call.target


@dataclass(frozen=True)
class _Result:
    """What a call returned on fake tensors: metas in ``call``, strides, and whether it returns several tensors."""

    call: Call
    strides: tuple[tuple[int, ...], ...]
    several: bool


@dataclass
class GraphBuilder:
    """Appends operators; ``module`` and ``context`` are those of the operators that come next.

    Fields
        describe: gives an operator its meaning.
        gradients: False for inference: nothing requires a gradient then.
    """

    mode: FakeTensorMode
    device: str
    describe: Describe
    gradients: bool = True
    module: str = ""
    context: Context = Context()
    sources: list[Value] = field(default_factory=list)
    operators: list[Emitted] = field(default_factory=list)
    _results: dict[Any, _Result] = field(default_factory=dict)
    _common: dict[Any, tuple[Value, ...]] = field(default_factory=dict)

    def source(
        self,
        kind: TensorKind,
        source: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        *,
        requires_grad: bool = False,
        aliases: Sequence[str] = (),
        batch_dim: int | None = None,
    ) -> Value:
        """Add an input, parameter, buffer or constant, stored contiguously."""
        shape = tuple(shape)
        stride = torch.empty(shape, device="meta").stride()
        grad = requires_grad and self.gradients
        value = Value(shape, stride, dtype_name(dtype), grad, kind, source, tuple(aliases), batch_dim)
        self.sources.append(value)
        return value

    def emit(self, target: str, *args: Any, **kwargs: Any) -> Any:
        """Append a call of ``target``; tensors are Values.  Returns a Value, or a tuple of them.

        A call that was made before in the same context gives the same values, unless it is random.
        """
        call, inputs = self._call(target, args, kwargs)
        result = self._run_once(call, inputs)
        common = (_exact(call), tuple(map(id, inputs)))
        outputs = None if is_random(call) else self._common.get(common)
        if outputs is None:
            metas = zip(result.call.outputs, result.strides, strict=True)
            outputs = tuple(Value(m.shape, stride, m.dtype, m.requires_grad) for m, stride in metas)
            emitted = Emitted(result.call, inputs, args, self.module, outputs)
            for value in outputs:
                value.origin = emitted
            self.operators.append(emitted)
            self._common[common] = outputs
        return outputs if result.several else outputs[0]

    def results(self, target: str, *args: Any, **kwargs: Any) -> tuple[TensorMeta, ...]:
        """What a call would return, without making it."""
        return self._run_once(*self._call(target, args, kwargs)).call.outputs

    @contextmanager
    def at(self, module: str, context: Context) -> Iterator[None]:
        """While active, operators belong to ``module`` and run in ``context``."""
        before = self.module, self.context
        self.module, self.context = module, context
        try:
            yield
        finally:
            self.module, self.context = before

    def _context(self, inputs: Sequence[Value]) -> Context:
        """The present context, without what makes no difference to a call with these inputs."""
        floating = any(_floating(v.dtype) for v in inputs)
        return Context(
            no_grad=self.context.no_grad and any(v.requires_grad for v in inputs),
            autocast=self.context.autocast if floating else None,
        )

    def _call(self, target: str, args: Any, kwargs: Any) -> tuple[Call, tuple[Value, ...]]:
        """The call of ``target`` without results, and its tensors."""
        inputs: list[Value] = []
        plain_args = tuple(_plain(arg, inputs) for arg in args)
        plain_kwargs = tuple((name, _plain(arg, inputs)) for name, arg in sorted(kwargs.items()))
        metas = tuple(v.meta for v in inputs)
        return Call(target, plain_args, plain_kwargs, metas, (), self._context(inputs)), tuple(inputs)

    def _run_once(self, call: Call, inputs: Sequence[Value]) -> _Result:
        strides = tuple(v.stride for v in inputs)
        key = (_exact(call), call.inputs, strides)
        if key not in self._results:
            self._results[key] = self._run(call, strides)
        return self._results[key]

    def _run(self, call: Call, strides: Sequence[tuple[int, ...]]) -> _Result:
        """Run the call on fake tensors."""
        with ExitStack() as stack:
            stack.enter_context(self.mode)
            fakes = [
                torch.empty_strided(m.shape, stride, dtype=torch_dtype(m.dtype), device=self.device)
                for m, stride in zip(call.inputs, strides, strict=True)
            ]
            for fake, meta in zip(fakes, call.inputs, strict=True):
                fake.requires_grad_(meta.requires_grad)
            stack.enter_context(torch.set_grad_enabled(self.gradients and not call.context.no_grad))
            if call.context.autocast is not None:
                dtype = torch_dtype(call.context.autocast)
                stack.enter_context(torch.autocast(self.device, dtype=dtype, cache_enabled=False))
            args = [concrete(arg, fakes, self.device) for arg in call.args]
            kwargs = {name: concrete(arg, fakes, self.device) for name, arg in call.kwargs}
            try:
                returned = overload(call.target)(*args, **kwargs)
            except Exception as error:
                raise CaptureError(
                    f"operator {call.target} in module {self.module!r} fails on {call.inputs}: {error}"
                ) from error
        written = [i for i, fake in enumerate(fakes) if fake._version]
        if written:
            raise CaptureError(f"operator {call.target} writes to its inputs {written}, which its schema does not say")
        several = isinstance(returned, list | tuple)
        results = list(returned) if several else [returned]
        if not all(isinstance(result, torch.Tensor) for result in results):
            raise CaptureError(
                f"operator {call.target} in module {self.module!r} returns "
                f"{[type(r).__name__ for r in results]}; only tensors can be captured"
            )
        metas = tuple(TensorMeta(tuple(r.shape), dtype_name(r.dtype), r.requires_grad) for r in results)
        call = Call(call.target, call.args, call.kwargs, call.inputs, metas, call.context)
        return _Result(call, tuple(r.stride() for r in results), several)

    def finish(
        self,
        name: str,
        outputs: Sequence[Value],
        loss: Value | None,
        updates: Sequence[tuple[Value, Value]],
        batch: int | None,
    ) -> Graph:
        """The graph of what outputs, loss and buffer updates need; names are given here."""
        wanted = [*outputs, *([loss] if loss is not None else []), *(new for _, new in updates)]
        live = _live(self.operators, wanted)
        names = _tensor_names(self.sources, live)
        kinds = Counter[str]()
        traits: dict[Any, Traits] = {}
        operators = []
        for emitted in live:
            base = f"{emitted.module}/{_kind(emitted.target)}" if emitted.module else _kind(emitted.target)
            kinds[base] += 1
            operator = base if kinds[base] == 1 else f"{base}_{kinds[base] - 1}"
            key = (_exact(emitted.call), emitted.call.inputs)
            if key not in traits:
                traits[key] = self.describe(emitted.call)
            operators.append(_operator(operator, emitted, traits[key], names))
        tensors = [_tensor(value, names) for value in self.sources]
        tensors += [_tensor(value, names) for emitted in live for value in emitted.outputs]
        return Graph(
            name=name,
            tensors=tuple(tensors),
            operators=tuple(operators),
            inputs=tuple(names[v] for v in self.sources if v.kind == "input"),
            outputs=tuple(names[v] for v in outputs),
            loss=names[loss] if loss is not None else None,
            buffer_updates=tuple((names[buffer], names[new]) for buffer, new in updates),
            batch=batch,
        )


def _live(operators: Sequence[Emitted], wanted: Sequence[Value]) -> list[Emitted]:
    """The operators that ``wanted`` depend on, in order."""
    needed = {id(value.origin) for value in wanted}
    for emitted in reversed(operators):
        if id(emitted) in needed:
            needed.update(id(value.origin) for value in emitted.inputs)
    return [emitted for emitted in operators if id(emitted) in needed]


def _tensor_names(sources: Sequence[Value], live: Sequence[Emitted]) -> dict[Value, str]:
    """Short, unique identifiers: ``p_lin_weight``, ``linear``, ``linear_1``, ``topk_0``, ``topk_1``."""
    prefixes = {"input": "x_", "parameter": "p_", "buffer": "b_", "constant": "c_"}
    names: dict[Value, str] = {}
    taken: set[str] = set()
    counts = Counter[str]()

    def claim(value: Value, base: str) -> None:
        name = base
        while name in taken:
            counts[base] += 1
            name = f"{base}_{counts[base]}"
        taken.add(name)
        names[value] = name

    for value in sources:
        path = value.source.removeprefix("kwargs.") if value.kind == "input" else value.source
        claim(value, prefixes[value.kind] + re.sub(r"\W", "_", path))
    for emitted in live:
        for value in emitted.outputs:
            claim(value, "t_" + _kind(emitted.target))
    return names


def _operator(name: str, emitted: Emitted, traits: Traits, names: dict[Value, str]) -> Operator:
    saved = [emitted.inputs[i] for i in traits.saved_inputs] + [emitted.outputs[i] for i in traits.saved_outputs]
    return Operator(
        name=name,
        target=emitted.target,
        args=traits.args,
        kwargs=traits.kwargs,
        inputs=tuple(names[v] for v in emitted.inputs),
        outputs=tuple(names[v] for v in emitted.outputs),
        rule=traits.rule,
        module=emitted.module,
        flops=traits.flops,
        saved=tuple(dict.fromkeys(names[v] for v in saved)),
        saved_extra_bytes=traits.saved_extra_bytes,
        family=traits.family,
        random=traits.random,
        context=emitted.call.context,
    )


def _tensor(value: Value, names: dict[Value, str]) -> Tensor:
    return Tensor(
        names[value],
        value.shape,
        value.dtype,
        value.kind,
        value.requires_grad,
        value.source,
        value.aliases,
        value.batch_dim,
    )


def _kind(target: str) -> str:
    return target.split(".")[1].strip("_")


def _plain(arg: Any, inputs: list[Value]) -> Argument:
    """``arg`` with tensors replaced by references to ``inputs``, which grows."""
    if isinstance(arg, Value):
        inputs.append(arg)
        return InputRef(len(inputs) - 1)
    if isinstance(arg, list | tuple):
        return tuple(_plain(item, inputs) for item in arg)
    return symbolic(arg)


def _exact(arg: Any) -> Any:
    """A key of a call's arguments (or of one argument) in which 1, 1.0 and True differ."""
    if isinstance(arg, Call):
        return arg.target, _exact(arg.args), _exact(arg.kwargs), arg.context
    if isinstance(arg, tuple):
        return tuple(_exact(item) for item in arg)
    return (type(arg), repr(arg)) if isinstance(arg, bool | int | float | complex) else arg


def concrete(arg: Any, tensors: Sequence[torch.Tensor], device: str) -> Any:
    """An argument as torch takes it: references and symbols resolved, sequences as lists."""
    if isinstance(arg, InputRef):
        return tensors[arg.index]
    if isinstance(arg, tuple):
        return [concrete(item, tensors, device) for item in arg]
    if arg == Symbol("operator"):
        return 0  # its number makes no difference to shapes
    if isinstance(arg, Symbol):
        return torch.device(device) if arg.name == "device" else getattr(torch, arg.name.removeprefix("torch."))
    return arg


def is_random(call: Call) -> bool:
    """Whether the call draws random numbers: torch says so, or it has a number of its own to draw by."""
    tags: Sequence[torch.Tag] = getattr(overload(call.target), "tags", ())
    return torch.Tag.nondeterministic_seeded in tags or Symbol("operator") in call.args


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    return getattr(torch, name)


def _floating(dtype: str) -> bool:
    return torch_dtype(dtype).is_floating_point


__all__ = ["Emitted", "GraphBuilder", "Value", "concrete", "dtype_name", "is_random", "torch_dtype"]
