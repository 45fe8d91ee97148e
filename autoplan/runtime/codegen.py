"""Code generation: a segment becomes one readable, straight-line Python function.

The text that runs is the text that is dumped: a module that binds each target once and defines one
function whose variables are called after the graph's tensors.  Equal texts are compiled once.
"""

from __future__ import annotations

import keyword
import linecache
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from searchspace.errors import ExecutionError
from searchspace.graph import (
    Argument,
    Context,
    GlobalSize,
    InputRef,
    LocalEnd,
    LocalOffset,
    LocalSize,
    Symbol,
    TensorDim,
    operator_number,
)
from searchspace.layout import local_shape
from searchspace.program import BoundOperator, SegmentCode

Segment = Callable[..., tuple[Tensor, ...]]

# Builtins with the operator's own schema, as torch generates them from the same declarations.  A call costs
# 1 to 2 microseconds less than through the OpOverload.  Only names whose binding is generated are listed
# (`to`, `contiguous` are written by hand and differ), and whose defaults agree (those of losses do not).
_FAST: dict[str, Any] = {
    name: owner
    for owner, names in {
        torch._C._nn: "linear gelu scaled_dot_product_attention silu log_sigmoid pad",
        torch._C._VariableFunctions: """
            add sub mul div neg pow exp log sqrt rsqrt abs sin cos tanh sigmoid relu clamp where masked_fill
            mm bmm matmul addmm baddbmm conv1d conv2d conv3d max_pool2d embedding
            layer_norm rms_norm batch_norm group_norm softmax log_softmax mean sum amax cumsum
            cat stack split_with_sizes chunk unbind select index_select gather triu tril clone
            reshape flatten transpose permute unsqueeze squeeze
            eq ne lt le gt ge bitwise_and logical_not
        """,
        torch._C.TensorBase: "view expand unflatten",
    }.items()
    for name in names.split()
}


def bind(target: str) -> Callable[..., Any]:
    """The cheapest callable that computes ``target``; ExecutionError when nothing is called so."""
    namespace, _, rest = target.partition(".")
    name = rest.partition(".")[0]
    if namespace == "aten" and name in _FAST:
        found = getattr(_FAST[name], name, None)
        if found is not None:
            return found
    return _resolve(target)


def _resolve(target: str) -> Callable[..., Any]:
    from autoplan.operators import resolve  # registers our own operators

    try:
        return resolve(target)
    except AttributeError as error:
        raise ExecutionError(f"no operator is called {target!r}: {error}") from error


def returns_sequence(target: str) -> bool:
    """Whether a call returns several tensors (or a list), so that even one result must be unpacked."""
    schema = getattr(_resolve(target), "_schema", None)
    if schema is None:
        return False
    returned = schema.returns
    return len(returned) != 1 or isinstance(returned[0].type, torch.ListType)


@dataclass(frozen=True)
class SegmentOptions:
    """How segments are compiled.

    ``compile`` passes each segment to torch.compile with this backend (None: plain Python);
    ``dump`` is a folder in which each generated module is written.
    """

    compile: str | None = None
    dump: Path | None = None


class SegmentCompiler:
    """Turns segments into functions for one device; equal source texts share one function."""

    def __init__(self, device: torch.device, options: SegmentOptions = SegmentOptions()) -> None:
        self.device = device
        self.options = options
        self._by_text: dict[str, Segment] = {}
        self._by_segment: dict[int, tuple[SegmentCode, Segment]] = {}

    def __call__(self, segment: SegmentCode) -> Segment:
        known = self._by_segment.get(id(segment))
        if known is None:  # the pair keeps the segment alive, so that its id stays its own
            known = self._by_segment[id(segment)] = (segment, self._compile(segment))
        return known[1]

    def _compile(self, segment: SegmentCode) -> Segment:
        text = source(segment, self.device)
        if text not in self._by_text:
            function = load(text, _identifier(segment.name))
            if self.options.dump is not None:
                self.options.dump.mkdir(parents=True, exist_ok=True)
                name = f"{_identifier(segment.name)}_{len(self._by_text):03d}.py"
                (self.options.dump / name).write_text(text, encoding="utf-8")
            if self.options.compile is not None:
                function = torch.compile(function, backend=self.options.compile, dynamic=False)
            self._by_text[text] = function
        return self._by_text[text]


def load(text: str, function: str) -> Segment:
    """Execute a generated module and return its function; tracebacks show the generated lines."""
    file = f"<autoplan segment {function} {hash(text) & 0xFFFFFFFF:08x}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    namespace: dict[str, Any] = {"__name__": f"autoplan.segment.{function}"}
    exec(compile(text, file, "exec"), namespace)
    return namespace[function]


def source(segment: SegmentCode, device: torch.device) -> str:
    """The text of the module that defines ``segment`` for ``device``.

    A line's comment gives the local shape of what it computes, and the module that it came from.
    """
    targets = _target_names(segment)
    names = _variables(segment, taken={"torch", "device", "bind", _identifier(segment.name), *targets.values()})
    last = _last_use(segment)
    body: list[str] = []
    context = Context()
    where = ""
    for position, bound in enumerate(segment.operators):
        if bound.operator.module != where:
            where = bound.operator.module
            body.append(f"    # {where or 'the root module'}")
        if bound.operator.context != context:
            context = bound.operator.context
            if context != Context():
                body.append(f"    with {_with_items(context)}:")
        indent = "    " if context == Context() else "        "
        body.append(indent + _call(bound, names, targets))
        dead = [names[v] for v in dict.fromkeys(bound.inputs + bound.outputs) if last.get(v) == position]
        if dead:
            body.append(f"{indent}del {', '.join(dead)}")
    results = "".join(f"{names[v]}, " for v in segment.outputs).rstrip()
    parameters = ", ".join(names[v] for v in range(segment.inputs))
    return "\n".join(
        [
            f'"""Segment {segment.name}: {len(segment.operators)} operators."""',
            "",
            "import torch",
            "",
            "from autoplan.runtime.codegen import bind",
            "",
            f"device = torch.device({str(device)!r})",
            *(f"{name} = bind({target!r})" for target, name in targets.items()),
            "",
            "",
            f"def {_identifier(segment.name)}({parameters}):",
            *body,
            f"    return ({results})",
            "",
        ]
    )


def _call(bound: BoundOperator, names: Sequence[str], targets: dict[str, str]) -> str:
    op = bound.operator
    arguments = [_argument(a, bound, names) for a in op.args]
    arguments += [f"{name}={_argument(a, bound, names)}" for name, a in op.kwargs]
    left = ", ".join(names[v] for v in bound.outputs)
    if len(bound.outputs) == 1 and returns_sequence(op.target):
        left += ","
    shapes = ", ".join(str(list(local_shape(region))) for region in bound.regions[len(op.inputs) :])
    return f"{left} = {targets[op.target]}({', '.join(arguments)})  # {shapes}"


def _argument(value: Argument, bound: BoundOperator, names: Sequence[str]) -> str:
    match value:
        case InputRef(index):
            return names[bound.inputs[index]]
        case LocalSize(of):
            low, high = _interval(of, bound)
            return str(high - low)
        case LocalOffset(of):
            return str(_interval(of, bound)[0])
        case LocalEnd(of):
            return str(_interval(of, bound)[1])
        case GlobalSize(of):
            return str(bound.whole[_position(of, bound)][of.dim])
        case Symbol("operator"):
            return str(operator_number(bound.operator.name))
        case Symbol(name):
            return name if name == "device" or name.startswith("torch.") else f"torch.device({name!r})"
        case tuple():
            return f"[{', '.join(_argument(item, bound, names) for item in value)}]"
        case float() if not math.isfinite(value):
            return f'float("{value}")'
        case _:
            return repr(value)


def _position(of: TensorDim, bound: BoundOperator) -> int:
    return of.index + (len(bound.operator.inputs) if of.output else 0)


def _interval(of: TensorDim, bound: BoundOperator) -> tuple[int, int]:
    return bound.regions[_position(of, bound)][of.dim]


def _with_items(context: Context) -> str:
    items = ["torch.no_grad()"] if context.no_grad else []
    if context.autocast is not None:
        items.append(f"torch.autocast(device.type, torch.{context.autocast})")
    return ", ".join(items)


def _target_names(segment: SegmentCode) -> dict[str, str]:
    """A name for each target: ``aten.linear.default`` is ``linear``, ``aten.add.Tensor`` is ``add_Tensor``."""
    found: dict[str, str] = {}
    taken = {"torch", "device", "bind", _identifier(segment.name)}
    for bound in segment.operators:
        target = bound.operator.target
        if target not in found:
            short = target.removeprefix("aten.").removesuffix(".default")
            found[target] = _fresh(_identifier(short), taken)
    return found


def _variables(segment: SegmentCode, taken: set[str]) -> list[str]:
    """A distinct name for each variable, after the tensor it holds."""
    tensor: dict[int, str] = {}
    for bound in segment.operators:
        for variable, name in zip(
            bound.inputs + bound.outputs, bound.operator.inputs + bound.operator.outputs, strict=True
        ):
            tensor.setdefault(variable, name)
    count = max([segment.inputs - 1, *tensor, *segment.outputs]) + 1
    return [_fresh(_identifier(tensor.get(v, f"unused_{v}")), taken) for v in range(count)]


def _last_use(segment: SegmentCode) -> dict[int, int]:
    """Position of the last operator that touches each inner variable that is not returned."""
    last: dict[int, int] = {}
    for position, bound in enumerate(segment.operators):
        last.update(dict.fromkeys(bound.inputs + bound.outputs, position))
    kept = set(segment.outputs)
    return {v: position for v, position in last.items() if v >= segment.inputs and v not in kept}


def _identifier(name: str) -> str:
    """``name`` as a Python identifier."""
    cleaned = re.sub(r"\W", "_", name)
    return cleaned if cleaned[:1].isalpha() and not keyword.iskeyword(cleaned) else f"v_{cleaned}"


def _fresh(wanted: str, taken: set[str]) -> str:
    name, counter = wanted, 1
    while name in taken:
        counter += 1
        name = f"{wanted}_{counter}"
    taken.add(name)
    return name
